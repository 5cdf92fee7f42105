"""What the chat layer hands down with a request, and what comes back of a reply.

Frozen values, any thread. Knows no template, no tokenizer, no engine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from ds4grpc.bank import Ids


class Role(enum.StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Channel(enum.StrEnum):
    """What a piece of output is."""

    TEXT = "text"
    REASONING = "reasoning"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message as the client sent it: nothing is escaped yet."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: Any  # the JSON Schema, parsed


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked conversation.

    `thinking` None leaves it to the template. `keep_reasoning` None leaves earlier reasoning to
    the template, True puts all of it inline, False drops it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    effort: str = ""
    keep_reasoning: bool | None = None


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """How the reply that follows a prompt is to be read.

    `open_marker` and `close_marker` are the family's reasoning markers as text ("" when the
    prompt is not a conversation: then everything is text). `reasoning_open`: the reply begins
    inside a reasoning block. `forced_close` are the ids that close it, with the template's white
    space. `budget` is the most sampled reasoning tokens; None when the client set none.
    """

    open_marker: str = ""
    close_marker: str = ""
    reasoning_open: bool = False
    forced_close: tuple[int, ...] = ()
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, rendered and encoded.

    `text` is UTF-8 of the escaped render (empty for `token_ids` input) and `ids` its canonical
    ids, BOS included where the tokenizer asks for one. `marks` are ascending byte offsets of
    `text` where a key of an earlier turn may end: the start of each control token, and of the
    white space before it. `head` is the token frontier of the stable head (system and tools).
    `open_at` is the byte offset in `text` where the trailing open marker of the generation
    prompt begins, -1 when there is none; `open_tokens` is how many ids stand for it and what
    follows it, the same in every encoding of the prompt.
    """

    text: bytes
    ids: Ids
    renderer: bytes  # 16 bytes
    marks: tuple[int, ...] = ()
    form: ReplyForm = field(default_factory=ReplyForm)
    head: int = 0
    open_at: int = -1
    open_tokens: int = 0
    conversation: Conversation | None = None

    @property
    def thinking(self) -> bool:
        return self.form.reasoning_open


@dataclass(frozen=True, slots=True)
class Reply:
    """What of a reply the bank holds and the client received: cut back to whole tokens.

    `text` and `reasoning` are as delivered (not escaped). `reasoning_open`: it ended inside the
    block. `control_inside`: the committed reply holds a control token that no client can replay.
    """

    text: str
    reasoning: str = ""
    reasoning_open: bool = False
    control_inside: bool = False
    tool_calls: tuple[ToolCall, ...] = ()
