"""What is really computed is what was rendered: the effective ids of every kind of admission.

For SmolLM2's, a Llama 3 and a DeepSeek template, with a user message and with a tool result
following: without hidden reasoning the effective ids are the rendered prompt, byte for byte but
for white space that the template trims, and what is hidden is reasoning that was really sent.
The model is the small one with sliding windows, so no answer here means anything; but each is
compared with a cold run as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from client import Client, Messages, Reply, chat_request, collect, connect
from process import ServerProcess, server
from rule import Judge
from sources import llama_cpp_source
from texts import preamble, question, sentences
from tiny import write_tiny

from ds4grpc.v1 import generation_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# Template file (None: SmolLM2's own) and the control tokens that it writes, its end marker first.
TEMPLATES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "smollm2": (None, ()),
    "llama3": (
        "meta-llama-Llama-3.1-8B-Instruct",
        ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ),
    "deepseek": (
        "deepseek-ai-DeepSeek-V3.1",
        (
            *("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
    ),
}
OPTIONS = ("--kv-cache-min-tokens", "16", "--dtype", "float32")
SYSTEM = ("system", preamble(8, seed=41))
TOOL = pb.Tool(name="look_up", description="Looks up a word.", parameters_json="{}")
BLOCK = re.compile(r"<think>(.*?)</think>", re.DOTALL)


@dataclass
class Checked:
    """A client that checks the effective prompt of every reply against a render of its own."""

    client: Client
    options: dict[str, object]
    sent_reasoning: set[str]
    replies: dict[str, Reply]

    async def chat(self, messages: Messages, kind: str, **more: object) -> Reply:
        reply = await self.client.chat(messages, **self.options, **more)
        assert reply.admission == kind, (kind, reply.admission, reply.miss_reason)
        await self.check(messages, reply)
        self.replies.setdefault(kind, reply)
        return reply

    async def check(self, messages: Messages, reply: Reply) -> None:
        rendered = await self.client.render(messages, **render_options(self.options))
        effective = await self.client.decode(reply.prompt_ids)
        assert bare(effective) == bare(rendered.text)
        assert effective.count("<think>") <= rendered.text.count("<think>") + len(
            self.sent_reasoning
        )
        hidden = {squeezed(block) for block in BLOCK.findall(effective)}
        shown = {squeezed(block) for block in BLOCK.findall(rendered.text)}
        assert hidden - shown <= self.sent_reasoning
        if reply.started.hidden_tokens:
            assert len(reply.prompt_ids) > rendered.prompt_tokens
        self.sent_reasoning.add(squeezed(reply.reasoning))


def render_options(options: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in options.items() if k in ("thinking", "replay", "tools")}


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


def bare(text: str) -> str:
    """Text without reasoning blocks, lone markers and white space."""
    return squeezed(re.sub("</?think>", "", BLOCK.sub("", text)))


@pytest.fixture(scope="module", params=TEMPLATES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, int]:
    """The small model with one of the templates, and the id of its end marker."""
    file, controls = TEMPLATES[request.param]
    source = None
    if file is not None:
        folder = llama_cpp_source() / "models" / "templates"
        source = (folder / f"{file}.jinja").read_text()
    path = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
    write_tiny(path, template=source, controls=controls)
    return str(path), 49152 if controls else 2


@pytest.fixture(scope="module")
def cold(
    model: tuple[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A second process that is asked with cache.bypass only."""
    with server(tmp_path_factory.mktemp("cold"), *OPTIONS, model=model[0]) as running:
        yield running


@pytest.mark.parametrize("following", ["user", "tool"])
async def test_effective_ids_are_the_rendered_prompt_for_every_admission(
    following: str, model: tuple[str, int], cold: ServerProcess, tmp_path: Path
) -> None:
    path, end_id = model
    options: dict[str, object] = {
        **{"thinking": True, "replay": "drop", "thinking_tokens": 6, "max_tokens": 18},
        "bias": {end_id: -100.0},
    }
    if following == "tool":
        options["tools"] = [TOOL]
    replies: dict[str, Reply] = {}
    sent: set[str] = set()
    messages: list[tuple[str, ...]] = [SYSTEM, ("user", question(1))]

    def next_message(seed: int) -> tuple[str, ...]:
        # Long enough for a write after the turn.
        text = f"{question(seed)} {sentences(4, seed)}"
        return (following, f"Found: {text}" if following == "tool" else text)

    with server(tmp_path / "banks", "--slots", "3", *OPTIONS, model=path) as running:
        async with connect(running.target) as client:
            checked = Checked(client, options, sent, replies)
            first = await checked.chat(messages, "cold")
            messages += [("assistant", first.text), next_message(2)]
            second = await checked.chat(messages, "warm")
            assert second.started.hidden_tokens > 0
            messages += [("assistant", second.text)]
            await fork_while_running(checked, messages, next_message)
            await checked.chat([*messages[:-2], next_message(9)], "partial_fork")
            # A short turn is not written by itself, so no bank on disk ends with it; it is long
            # enough to be worth cutting another bank for (ds4grpc.engine.reuse).
            short: list[tuple[str, ...]] = [*messages, (following, question(7))]
            said = await client.chat(short, **options)
            sent.add(squeezed(said.reasoning))
            short += [("assistant", said.text), (following, f"No? {sentences(9, 7)}")]
            sent.add(squeezed((await client.chat(short, **options)).reasoning))
        assert running.stop() == 0
    with server(tmp_path / "banks", "--slots", "1", *OPTIONS, model=path) as running:
        async with connect(running.target) as client:
            checked = Checked(client, options, sent, replies)
            await checked.chat([*messages, next_message(5)], "disk")
            await checked.chat([*messages, next_message(6)], "partial_truncate")
            other: Messages = [("system", preamble(8, seed=42)), ("user", "Hello?")]
            await client.chat(other, **options)
            await checked.chat([*short[:-1], next_message(8)], "disk_partial")
        assert running.stop() == 0
    assert len(replies) == 7
    await equal_to_cold(cold, replies, end_id)


async def fork_while_running(checked: Checked, messages: Messages, next_message: object) -> None:
    """Sends the conversation on twice at once: the second copies the slot that the first is in."""
    assert callable(next_message)
    long = chat_request([*messages, next_message(3)], **{**checked.options, "max_tokens": 2000})
    call = checked.client.generation.Generate(long)
    trunk = Reply()
    async for response in call:
        collect(trunk, response)
        if trunk.token_ids:
            break
    await checked.chat([*messages, next_message(4)], "fork")
    call.cancel()


async def equal_to_cold(running: ServerProcess, replies: dict[str, Reply], end_id: int) -> None:
    """Each reply's first tokens (its reasoning) against a process that knows nothing."""
    async with connect(running.target) as cold:
        judge = Judge(cold, bias={end_id: -100.0})
        for kind, reply in replies.items():
            await judge.check(reply, kind)
        judge.finish(at_least=40)
