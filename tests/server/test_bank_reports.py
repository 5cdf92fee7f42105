"""Faults of stored banks that users of other servers reported: entries that never help, that were
another model's, that are gone, or that hold somebody else's conversation.

The names carry the ids of docs/field-reports.md. Servers run in this process, behind real sockets,
where a disk can be made to fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import tiny as tiny_models
from client import Client, Reply, chat_request, connect
from process import metrics_of
from texts import preamble, question, sentences
from tiny import TinyShape, write_tiny

from ds4grpc import server as serve
from ds4grpc.config import Address, ServeConfig
from ds4grpc.store.files import Files
from ds4grpc.v1 import bank_pb2

LONG = "DS4GRPC_LONG" in os.environ
ANY = Address("127.0.0.1", 0)
NO_END = {2: -100.0}
SHAPE = TinyShape(window=0)
pytestmark = pytest.mark.timeout(900 if LONG else 120)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", SHAPE)


@contextlib.asynccontextmanager
async def running(model: Path, folder: Path, **options: Any) -> AsyncIterator[serve.Server]:
    settings: dict[str, Any] = {"slots": 1, "dtype": "float32", **options}
    config = ServeConfig(
        model=str(model),
        listen=ANY,
        metrics_listen=ANY,
        kv_disk_dir=folder,
        kv_cache_min_tokens=16,
        threads=1,
        **settings,
    )
    async with serve._start(config) as started:
        yield started


async def say(client: Client, messages: Sequence[tuple[str, ...]], **options: Any) -> Reply:
    settings = {"max_tokens": 8, "bias": NO_END, "thinking": False, **options}
    reply = await client.chat(messages, **settings)
    assert reply.finish_reason == "length"
    return reply


async def equal_to_cold(client: Client, reply: Reply, bias: dict[int, float] | None = None) -> None:
    answer = await client.tokens(
        reply.prompt_ids,
        max_tokens=len(reply.token_ids),
        bypass=True,
        no_store=True,
        bias=bias or NO_END,
    )
    assert (answer.admission, answer.token_ids) == ("cold", reply.token_ids)


async def stored(client: Client, reply: Reply) -> bank_pb2.Bank:
    """What the reply ended as, once it is a file."""
    for _ in range(200):
        async for written in client.banks.FlushBanks(bank_pb2.FlushBanksRequest()):
            assert not written.detail
        with contextlib.suppress(grpc.aio.AioRpcError):  # it is between its slot and its file
            bank = await client.bank(reply.finished.bank_id)
            if bank.size_bytes:
                return bank
        await asyncio.sleep(0.05)
    raise AssertionError("the bank was not stored")


def opening(seed: int) -> list[tuple[str, ...]]:
    return [("system", preamble(20, seed=seed)), ("user", question(seed))]


def restored(lines: Iterable[str]) -> Counter[str]:
    """How often each bank was loaded, by the log."""
    return Counter(found[1] for line in lines if (found := re.search(r"restored bank=(\w+)", line)))


async def refused(of: serve.Server) -> float:
    page = await asyncio.to_thread(metrics_of, f"http://{of.metrics_address}/metrics")
    name = 'ds4grpc_bank_restores_total{result="'
    return sum(v for text, v in page.items() if text.startswith(name) and '"ok"' not in text)


async def test_b05_reply_of_unusual_tokens_is_loaded_and_helps_at_each_turn(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model spells its replies letter by letter, as no tokenizer would: the tokens at the end
    of each bank are none that a later prompt of the same text has."""
    caplog.set_level("INFO")
    messages = opening(5)
    cached: list[int] = []
    async with running(tiny, tmp_path) as started, connect(str(started.address)) as client:
        letters = [(await client.encode(letter))[-1] for letter in "the"]
        bias = NO_END | dict.fromkeys(letters, 80.0)
        for turn in range(6):
            reply = await say(client, messages, bias=bias)
            cached.append(reply.started.cached_tokens)
            assert await client.encode(reply.text) != reply.token_ids
            await stored(client, reply)
            await equal_to_cold(client, reply, bias)  # and out of the only slot
            messages += [("assistant", reply.text), ("user", question(50 + turn))]
    assert all(later > before for before, later in zip(cached[1:], cached[2:], strict=False))
    assert cached[1] >= 300
    loads = restored(record.getMessage() for record in caplog.records)
    assert loads and max(loads.values()) <= 2


async def test_b22_file_that_is_gone_or_torn_is_tried_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: set[str] = set()
    tried: Counter[str] = Counter()

    def before(files: Files, operation: str, path: str) -> None:
        if operation == "open_read":
            tried[path] += 1
        if operation == "read" and path in bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with running(tiny, tmp_path) as started, connect(str(started.address)) as client:
        talks: list[list[tuple[str, ...]]] = []
        paths: list[str] = []
        frontiers: list[int] = []
        for seed in range(3):
            messages = opening(seed)
            reply = await say(client, messages)
            bank = await stored(client, reply)
            talks.append([*messages, ("assistant", reply.text), ("user", question(seed + 50))])
            paths += [str(path) for path in _files_of(tmp_path, bank.bank_id)]
            frontiers.append(bank.frontier)
        await say(client, [("user", question(90))], no_store=True, bypass=True)
        torn, lost, unreadable = paths
        os.truncate(torn, 8192)
        os.unlink(lost)
        bad.add(unreadable)
        monkeypatch.setattr(Files, "before", before)
        for talk, frontier in zip(talks, frontiers, strict=True):
            reply = await say(client, talk)
            assert reply.started.cached_tokens < frontier
            await equal_to_cold(client, reply)
        assert all(tried[path] <= 2 for path in paths)
        assert await refused(started) == 3
        bad.clear()  # what was rewritten under the same names is good
        tried.clear()
        for talk in talks:
            await equal_to_cold(client, await say(client, talk))
        assert await refused(started) == 3


def _files_of(folder: Path, bank_id: str) -> list[Path]:
    return list(folder.glob(f"*/??/{bank_id}.*.bank"))


def _other_weights(path: Path) -> Path:
    """The same shapes, one tensor less than a thousandth off."""
    tensor = tiny_models._tensors(SHAPE)["blk.1.attn_k.weight"]
    return write_tiny(path, SHAPE, extra={"blk.1.attn_k.weight": tensor * 1.0005})


def _other_merges(path: Path) -> Path:
    vocabulary = tiny_models._vocabulary()
    merges = list(vocabulary["tokenizer.ggml.merges"])
    merges[-2:] = reversed(merges[-2:])
    with pytest.MonkeyPatch.context() as patch:
        changed = {**vocabulary, "tokenizer.ggml.merges": merges}
        patch.setattr(tiny_models, "_vocabulary", lambda: changed)
        return write_tiny(path, SHAPE)


def _other_template(path: Path) -> Path:
    template = tiny_models._vocabulary()["tokenizer.chat_template"]
    return write_tiny(path, SHAPE, template=template.replace("<|im_end|>\\n", "<|im_end|>\\n\\n"))


@pytest.mark.parametrize("change", [_other_weights, _other_merges, _other_template])
async def test_b24_state_of_other_weights_tokenizer_or_template_is_never_used(
    tiny: Path, tmp_path: Path, change: Callable[[Path], Path]
) -> None:
    other, banks = change(tmp_path / "other.gguf"), tmp_path / "banks"
    messages = opening(24)
    async with running(tiny, banks) as started, connect(str(started.address)) as client:
        reply = await say(client, messages)
        bank = await stored(client, reply)
    async with running(other, banks) as started, connect(str(started.address)) as client:
        fresh = await say(client, messages)
        assert fresh.started.cached_tokens == 0 or change is _other_template
        await equal_to_cold(client, fresh)
    messages += [("assistant", reply.text), ("user", question(25))]
    async with running(tiny, banks) as started, connect(str(started.address)) as client:
        back = await say(client, messages)
        assert back.started.disk_tokens == bank.frontier
        await equal_to_cold(client, back)
    if change is not _other_template:
        assert len([each for each in os.listdir(banks) if len(each) == 16]) == 2


@pytest.mark.parametrize(
    ("options", "model_shape"),
    [({"dtype": "bfloat16"}, None), ({"max_context": 128}, None), ({}, TinyShape(window=32))],
    ids=["dtype", "context", "window"],
)
async def test_b25_state_of_another_dtype_context_or_window_is_a_miss(
    tiny: Path, tmp_path: Path, options: dict[str, Any], model_shape: TinyShape | None
) -> None:
    other = tiny if model_shape is None else write_tiny(tmp_path / "other.gguf", model_shape)
    banks = tmp_path / "banks"
    messages = opening(25)
    async with running(tiny, banks) as started, connect(str(started.address)) as client:
        reply = await say(client, messages)
        bank = await stored(client, reply)
    async with running(other, banks, **options) as started, connect(str(started.address)) as client:
        short = [("user", question(25))] if "max_context" in options else messages
        fresh = await say(client, short)
        assert fresh.started.cached_tokens <= options.get("max_context", 0)
        if options.get("dtype") != "bfloat16":  # whose sums depend on their order
            await equal_to_cold(client, fresh)
    messages += [("assistant", reply.text), ("user", question(26))]
    async with running(tiny, banks) as started, connect(str(started.address)) as client:
        back = await say(client, messages)
        assert back.started.disk_tokens == bank.frontier
        await equal_to_cold(client, back)


async def test_b27_conversations_that_come_back_from_disk_hold_their_own_words_only(
    tiny: Path, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    """Six long conversations in two slots, short requests beside them, calls cut at any moment."""
    until = time.monotonic() + (600 if LONG else 6)
    words = [f"codeword-{number}-{number * 7919 % 1000}" for number in range(6)]
    kinds: Counter[str] = Counter()
    async with running(tiny, tmp_path, slots=2) as started, connect(str(started.address)) as client:

        async def long_one(number: int) -> None:
            draw = random.Random(number)
            start = [("system", f"{preamble(12, seed=number)} Say {words[number]}.")]
            messages = [*start, ("user", question(number))]
            while True:
                reply = await say(client, messages)
                kinds[reply.admission] += 1
                shown = await client.decode(reply.prompt_ids)
                assert [word for word in words if word in shown] == [words[number]]
                await equal_to_cold(client, reply)
                if time.monotonic() > until:
                    return
                if len(messages) > 8:
                    messages = [*start]
                messages += [("assistant", reply.text)] if len(messages) > 1 else []
                messages += [("user", question(draw.randrange(10_000)))]

        async def short_ones(seed: int) -> None:
            draw = random.Random(seed)
            while time.monotonic() < until:
                text = [("user", sentences(draw.randrange(1, 4), seed=draw.randrange(1000)))]
                call = client.generation.Generate(
                    chat_request(text, max_tokens=6, bias=NO_END), metadata=client.metadata
                )
                with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                    async for _ in call:
                        if draw.random() < 0.3:
                            call.cancel()
                kinds["short"] += 1

        await asyncio.gather(*map(long_one, range(6)), *map(short_ones, range(100, 103)))
    assert kinds["disk"] + kinds["disk_partial"] >= 3
    measured(", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
