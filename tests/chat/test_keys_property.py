"""The property of keys, over the real templates: what a keyed admission delivers is the next
prompt with nothing but hidden reasoning put in.

DS4GRPC_LONG=1 runs the full count; `--hypothesis-show-statistics` prints the shares.
"""

from __future__ import annotations

import enum
import os
import random
from dataclasses import dataclass, replace

import pytest
from bankplay import Bank, Said, doubled, judge, split_encode
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from vocabularies import renderer, template_names

from ds4grpc.bank import RecordKind
from ds4grpc.chat.prompt import Conversation, Message, ReplyForm, Role, Tool
from ds4grpc.chat.renderer import Renderer
from ds4grpc.errors import InvalidRequest
from ds4grpc.tokenizer import ESCAPE

LONG = bool(os.environ.get("DS4GRPC_LONG"))

# Templates that render no conversation at all, with the reason.
EXCLUDED = {
    "fireworks-ai-llama-3-firefunction-v2": "wants a variable `functions` with text",
}
# Templates that divide turns by plain text: they get prompt records only.
UNDIVIDED = {
    "llama-cpp-rwkv-world",
    "poolside-Laguna-S-2.1",
    "poolside-Laguna-XS-2.1",
    "poolside-Laguna-XS.2",
}
# Templates that may write a reply, or what stands before it, in another place or with other words
# once a turn follows: those turns get prompt records, outcome unsound.
MOVING = {
    "Apertus-8B-Instruct",  # joins a tool's result to the reply before it
    "Apriel-1.6-15b-Thinker-fixed",  # words in the generation prompt that no history has
    "Bielik-11B-v3.0-Instruct",  # leaves out the end of a tool's turn when a reply follows
    "Cohere2MoE",  # answers are opened by a token of their own
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "Mistral-Small-3.2-24B-Instruct-2506",  # tools go to the last user turn
    "google-gemma-4-31B-it",  # joins replies around a tool's result
    "google-gemma-4-31B-it-interleaved",
    "meetkai-functionary-medium-v3.2",  # names the recipient before the reply
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "muse-glimmer",  # channels: the recipient is a part of the turn's opening
    "openai-gpt-oss-120b",
    "unsloth-mistral-Devstral-Small-2507",
    "upstage-Solar-Open-100B",
}
TEMPLATES = [name for name in template_names() if name not in EXCLUDED]
TOOL = Tool(
    name="lookup",
    description="Finds a line",
    parameters={
        "type": "object",
        "properties": {"line": {"type": "string", "description": "Which"}},
        "required": ["line"],
    },
)


class Client(enum.Enum):
    """What a client does with the reasoning it received."""

    KEEPS = "keeps"
    DROPS = "drops"
    DROPS_AT_USER = "drops at the next user turn"


@dataclass(frozen=True)
class Turn:
    """One turn: what the client asks, what the model says, and how that reaches the bank."""

    asked: str
    reasoning: str
    answer: str
    close: int  # 0: forced; else a natural spelling
    spontaneous: bool  # reasoning though the prompt did not open a block
    cut: int  # sampled tokens that a limit takes away
    by_tool: bool  # asked by a tool result where that is possible


@dataclass(frozen=True)
class Scenario:
    template: str
    system: str
    thinking: bool | None
    keep_reasoning: bool | None
    tools: bool
    client: Client
    strips: bool
    turns: tuple[Turn, ...]
    seed: int


FRAGMENTS = (
    *("word", "two words", "\n", "  ", "\n\n", "\r\n", "é", "😀", "<", "<|im_", "|im_end|>"),
    *("<|im_end|>", "<｜User｜>", "[/INST]", "</s>", "<think>", "</think>", "[THINK]", "}", "x"),
    *("<tool_call>", "</tool_call>", ESCAPE, "'", '"', "\\n", "\u00a0", "\u2028", "a" * 200),
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)
BIG_TEXTS = st.one_of(TEXTS, TEXTS, TEXTS, TEXTS.map(lambda text: text + "long text " * 1000))
TURNS = st.builds(
    Turn,
    asked=BIG_TEXTS,
    reasoning=TEXTS,
    answer=BIG_TEXTS,
    close=st.integers(0, 3),
    spontaneous=st.sampled_from((False, False, True)),
    cut=st.sampled_from((0, 0, 0, 1, 2, 9)),
    by_tool=st.booleans(),
)
SCENARIOS = st.builds(
    Scenario,
    template=st.sampled_from(TEMPLATES),
    system=st.one_of(st.just(""), TEXTS),
    thinking=st.sampled_from((True, True, False, None)),
    keep_reasoning=st.sampled_from((None, None, True, False)),
    tools=st.booleans(),
    client=st.sampled_from(Client),
    strips=st.booleans(),
    turns=st.lists(TURNS, min_size=2, max_size=4).map(tuple),
    seed=st.integers(0, 2**32),
)


def test_templates_that_render_are_all_but_the_named() -> None:
    failing = set()
    undivided = set()
    for name in template_names():
        if not any(_renders(name, tools) for tools in ((), (TOOL,))):
            failing.add(name)
        elif not renderer(name).divides:
            undivided.add(name)
    assert failing == set(EXCLUDED)
    assert undivided == UNDIVIDED
    assert len(TEMPLATES) == 69


def _renders(name: str, tools: tuple[Tool, ...]) -> bool:
    try:
        renderer(name).prompt(Conversation((Message(Role.USER, "Hi"),), tools=tools))
    except InvalidRequest:
        return False
    return True


@settings(
    max_examples=16_000 if LONG else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(SCENARIOS)
@pytest.mark.timeout(7200 if LONG else 120)
def test_keyed_admission_delivers_the_next_prompt(scenario: Scenario) -> None:
    used = renderer(scenario.template)
    play = _Play(used, scenario)
    for number, turn in enumerate(scenario.turns):
        if not play.turn(number, turn):
            event("refused by the template")
            return


class _Play:
    """A client and a bank, turn by turn."""

    def __init__(self, used: Renderer, scenario: Scenario) -> None:
        self.renderer = used
        self.scenario = scenario
        self.bank = Bank(used)
        self.draw = random.Random(scenario.seed)
        self.messages: list[Message] = []
        self.reasonings: list[str] = []
        self.keyed = False  # the last turn built a key that this client's next prompt begins with
        if scenario.system:
            self.messages.append(Message(Role.SYSTEM, scenario.system))

    def turn(self, number: int, turn: Turn) -> bool:
        """Plays one turn; False when the template refuses it."""
        scenario = self.scenario
        asked = Message(Role.USER, turn.asked or "?")
        if turn.by_tool and scenario.tools and number:
            asked = Message(Role.TOOL, turn.asked, name=TOOL.name)
        conversation = Conversation(
            messages=self._sent(asked),
            tools=(TOOL,) if scenario.tools else (),
            thinking=scenario.thinking,
            keep_reasoning=scenario.keep_reasoning,
        )
        try:
            prompt = self.renderer.prompt(conversation)
        except InvalidRequest:
            return False
        admitted = self.bank.admit(prompt)
        judge(self.renderer, prompt, admitted, self.reasonings)
        plain = not any(_spells_markers(text) for text in self._texts(asked))
        if plain:
            assert not doubled(self.renderer, admitted.ids)
        if number:
            event(
                f"turn {'whole' if admitted.whole else 'partial' if admitted.position else 'cold'}"
            )
        if self.keyed:
            assert admitted.whole, "the key of the last turn does not begin this prompt"
        reused = admitted.position
        said = self.bank.play(
            prompt, admitted, self._sample(number, turn, prompt.form), cut=turn.cut
        )
        event(f"outcome {said.built.outcome}")
        for record in said.built.records:
            event(f"kind {record.kind}")
            assert record.kind is RecordKind.PROMPT or self.renderer.divides
        # The same prompt again, and one with another last message: both are good up to the last
        # place that this turn itself was able to reuse.
        again = self.bank.admit(prompt)
        judge(self.renderer, prompt, again, [*self.reasonings, said.reasoning])
        if said.built.outcome == "built":
            assert again.position >= reused
            edited = replace(conversation, messages=self._sent(replace(asked, content="Else?")))
            other = self.renderer.prompt(edited)
            branch = self.bank.admit(other)
            judge(self.renderer, other, branch, [*self.reasonings, said.reasoning])
            assert branch.position >= reused
            self._branch_off(conversation, said)
        # A key may not end where a control token could go on, as with this reply's last words.
        open_ended = self.renderer.escaper.leaves_open(said.reply.text.rstrip())
        unsound = said.built.outcome == "unsound"
        assert not unsound or open_ended or scenario.template in MOVING
        self.keyed = said.built.outcome == "built" and not turn.cut and not open_ended
        if said.reasoning:
            self.reasonings.append(said.reasoning)
        content = said.text.strip() if scenario.strips else said.text
        self.messages += (asked, Message(Role.ASSISTANT, content, reasoning=said.reasoning))
        return True

    def _branch_off(self, conversation: Conversation, said: Said) -> None:
        """Other questions in place of each earlier one, found by the newest records alone."""
        newest = Bank(self.renderer, self.bank.ids, self.bank.hidden, [*said.built.records])
        for i, message in enumerate(conversation.messages[:-1]):
            if message.role is Role.USER:
                other = (*conversation.messages[:i], Message(Role.USER, "Else?"))
                prompt = self.renderer.prompt(replace(conversation, messages=other))
                judge(
                    self.renderer, prompt, newest.admit(prompt), [*self.reasonings, said.reasoning]
                )

    def _sent(self, asked: Message) -> tuple[Message, ...]:
        """The conversation as this client sends it."""
        messages = [*self.messages, asked]
        last_user = max((i for i, m in enumerate(messages) if m.role is Role.USER), default=0)
        client = self.scenario.client
        return tuple(
            replace(message, reasoning="")
            if client is Client.DROPS or (client is Client.DROPS_AT_USER and i < last_user)
            else message
            for i, message in enumerate(messages)
        )

    def _sample(self, number: int, turn: Turn, form: ReplyForm) -> list[int]:
        tokenizer = self.renderer.codec.tokenizer
        markers = self.renderer.markers
        reasoning = f"Q{number}q{turn.reasoning.replace(markers.close, '')}q{number}Q"
        answer = turn.answer + self.draw.choice((f"A{number}a", ""))
        if answer.lstrip().startswith(markers.open):  # it would be reasoning, found elsewhere too
            answer = f"A{number}a{answer}"
        said = split_encode(tokenizer, answer, self.draw)
        opened: list[int] = []
        if not form.reasoning_open:
            if not turn.spontaneous:
                return said
            opened = tokenizer.encode(f"\n{markers.open_text}")
        close = (markers.close_text, markers.close, f"\n{markers.close}\n", f" {markers.close} ")
        closed = tokenizer.encode(close[turn.close])
        return [*opened, *split_encode(tokenizer, reasoning, self.draw), *closed, *said]

    def _texts(self, asked: Message) -> list[str]:
        return [text for m in (*self.messages, asked) for text in (m.content, m.reasoning)]


def _spells_markers(text: str) -> bool:
    return any(part in text for part in ("think", "THINK"))
