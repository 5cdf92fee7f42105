"""A conversation to a prompt: the model's template around escaped client text, and ids.

Owns how messages are handed to a template, and thinking on any model: opening the block where the
template does not, closing it where it does, reasoning of earlier turns kept where it is wanted.
Knows no banks and no keys. Immutable once built; any thread, not the event loop: it computes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ds4grpc.bank import common_prefix, common_prefix_bytes
from ds4grpc.chat import escape
from ds4grpc.chat.codec import Codec, joined
from ds4grpc.chat.conversation import check_conversation, parse_object
from ds4grpc.chat.escape import Escaper
from ds4grpc.chat.markers import Markers, tool_markers_in
from ds4grpc.chat.probe import find_traits, thinking_variables, turns
from ds4grpc.chat.prompt import Conversation, Message, Prompt, ReplyForm, Role, Tool
from ds4grpc.chat.template import Template
from ds4grpc.chat.visible import Reader
from ds4grpc.errors import InvalidRequest
from ds4grpc.tokenizer import Tokenizer

RULES_VERSION: Final = 1
"""Part of every digest: moves when the same conversation would render or be keyed differently."""

MIN_HEAD_TOKENS: Final = 64
"""A shorter stable head is not worth a bank of its own."""

# Stands for reasoning that the server puts in after the template has run.
_PLACE: Final = "\ufdd1"


class Renderer:
    """One model's chat template with its tokenizer.

    Raises ModelError when `source` is not a template.
    """

    digest: bytes
    """16 bytes that name what made a prompt's text."""
    markers: Markers
    default_thinking: bool
    """Whether the template thinks when a conversation says nothing."""
    divides: bool
    """Whether control tokens stand between turns; without them text alone divides, so a
    client's text could pass for turns and no key of a whole turn is safe."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.codec = Codec(tokenizer)
        self._template = Template(source)
        self._constants: Mapping[str, Any] = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **({"bos_token": tokenizer.bos_text} if tokenizer.bos_text else {}),
            **({"eos_token": tokenizer.eos_text} if tokenizer.eos_text else {}),
        }
        self._traits = find_traits(self._template, source, tokenizer.specials, self._constants)
        self.markers = self._traits.markers
        self.default_thinking = self._traits.default_thinking
        between = turns(self._template, self._constants)
        self.reader = Reader(tokenizer, self.markers.open, self.markers.close)
        self.divides = between is not None and all(map(self.reader.control_ends, between))
        self.escaper = Escaper(
            {
                *filter(None, tokenizer.controls),
                # User-defined tokens that the template writes are structure to it as well.
                *(s for s in tokenizer.specials if s in source and _is_markup(s)),
                *tool_markers_in(source),
                self.markers.open,
                self.markers.close,
            }
        )
        self._forced_close = tuple(tokenizer.encode(self.markers.close_text))
        self.digest = self._digest(source)

    def prompt(self, conversation: Conversation, *, budget: int | None = None) -> Prompt:
        """Renders and encodes `conversation`, its generation prompt included.

        `budget` is the most reasoning tokens; 0 is thinking off. Raises InvalidRequest: a bound of
        `chat.conversation`, or the template refuses.
        """
        check_conversation(conversation)
        if budget == 0:
            conversation = replace(conversation, thinking=False)
        text = self.render(conversation)
        thinking = conversation.thinking
        if thinking is None:
            thinking = self.default_thinking
        open_at = -1
        if thinking:
            text, open_at = self._opened(text)
        else:
            text = self._closed(text)
        data = text.encode()
        if thinking:
            open_at = len(text[:open_at].encode())
        head_text, head_end = self._head(conversation, text)
        head_at = len(text[:head_end].encode())
        pieces = self.codec.encode_pieces(data, (head_at, open_at))
        bos = self.codec.bos(data)
        return Prompt(
            text=data,
            ids=joined([bos, *pieces]),
            renderer=self.digest,
            marks=self.codec.marks(text),
            form=ReplyForm(
                open_marker=self.markers.open,
                close_marker=self.markers.close,
                reasoning_open=thinking,
                forced_close=self._forced_close,
                budget=budget,
            ),
            head=self._head_tokens(head_text[head_end:], bos, pieces, split=head_at > 0),
            open_at=open_at,
            open_tokens=len(pieces[-1]) if thinking else 0,
            conversation=conversation,
        )

    def render(self, conversation: Conversation, *, generation: bool = True) -> str:
        """The escaped text that the template makes of `conversation`.

        `generation` asks for the generation prompt, as the template writes it. Raises
        InvalidRequest.
        """
        sent = {i: m.reasoning for i, m in enumerate(conversation.messages) if m.reasoning}
        variables: dict[str, Any] = {
            **self._constants,
            **thinking_variables(conversation.thinking),
            "add_generation_prompt": generation,
        }
        if conversation.tools:
            variables["tools"] = [self._tool(tool) for tool in conversation.tools]
        if conversation.effort:
            variables["reasoning_effort"] = self.escaper.escape(conversation.effort)
        if not sent or conversation.keep_reasoning is False:
            return self._run(conversation, variables, {}, {})
        escaped = {i: self.escaper.escape(reasoning) for i, reasoning in sent.items()}
        if conversation.keep_reasoning is None:
            return self._run(conversation, variables, escaped, {})
        return self._render_with_all(conversation, variables, escaped)

    def _render_with_all(
        self, conversation: Conversation, variables: Mapping[str, Any], sent: Mapping[int, str]
    ) -> str:
        """A render with every reasoning in it: where the template leaves one out, inline.

        It goes in after the template has run, in place of a stand-in at the start of the content:
        templates cut apart content that holds markers.
        """
        place = _PLACE
        while any(place in text for text in _client_texts(conversation)):
            place += _PLACE
        places = {i: f"{place}{i}{place}" for i in sent}
        trial = self._run(conversation, variables, places, {})
        shown = {i: reasoning for i, reasoning in sent.items() if places[i] in trial}
        missing = {i: places[i] for i in sent if i not in shown}
        text = self._run(conversation, variables, shown, missing)
        for i, mark in missing.items():
            before, found, after = text.partition(mark)
            if found:
                block = f"{self.markers.open_text}{sent[i]}{self.markers.close_text}"
                text = f"{self._without_closed(before)}{block}{after}"
        return text

    def _run(
        self,
        conversation: Conversation,
        variables: Mapping[str, Any],
        reasoning: Mapping[int, str],
        prefixes: Mapping[int, str],
    ) -> str:
        """Runs the template; `reasoning` and `prefixes` of contents are by message, escaped."""
        messages = [
            self._message(message, reasoning.get(i, ""), prefixes.get(i, ""))
            for i, message in enumerate(conversation.messages)
        ]
        return self._template.render({**variables, "messages": messages})

    def _message(self, message: Message, reasoning: str, prefix: str) -> dict[str, Any]:
        content: str | None = prefix + self.escaper.escape(message.content)
        fields: dict[str, Any] = {"role": message.role.value}
        if message.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": self.escaper.escape(call.id),
                    "type": "function",
                    "function": {
                        "name": self.escaper.escape(call.name),
                        "arguments": self._arguments(call.arguments_json),
                    },
                }
                for call in message.tool_calls
            ]
            content = content or self._traits.empty_content
        fields["content"] = content
        if message.role is Role.TOOL and message.tool_call_id:
            fields["tool_call_id"] = self.escaper.escape(message.tool_call_id)
        if message.name:
            fields["name"] = self.escaper.escape(message.name)
        if reasoning and self._traits.reasoning_field is not None:
            fields[self._traits.reasoning_field] = reasoning
        return fields

    def _arguments(self, arguments_json: str) -> Any:
        arguments = self.escaper.escape_json(parse_object(arguments_json, "chat.messages"))
        if self._traits.arguments_as_text:
            return json.dumps(arguments, ensure_ascii=False)
        return arguments

    def _tool(self, tool: Tool) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {
                "name": self.escaper.escape(tool.name),
                "description": self.escaper.escape(tool.description),
                "parameters": self.escaper.escape_json(tool.parameters),
            },
        }

    def _opened(self, text: str) -> tuple[str, int]:
        """`text` with the reasoning block open at its end, and where the open marker starts."""
        kept = text.rstrip()
        if kept.endswith(self.markers.open):
            return text, len(kept) - len(self.markers.open)
        text = self._without_closed(text)
        return text + self.markers.open_text, len(text)

    def _closed(self, text: str) -> str:
        """`text` with no reasoning block open at its end."""
        return text + self.markers.close_text if self._is_open(text) else text

    def _is_open(self, text: str) -> bool:
        return text.rstrip().endswith(self.markers.open)

    def _without_closed(self, text: str) -> str:
        """`text` without an empty block, or a lone close marker, at its end."""
        kept = text.rstrip()
        if not kept.endswith(self.markers.close):
            return text
        kept = kept.removesuffix(self.markers.close)
        opened = kept.rstrip()
        return opened.removesuffix(self.markers.open) if self._is_open(opened) else kept

    def _head(self, conversation: Conversation, text: str) -> tuple[str, int]:
        """The render of another conversation with the same head, and where the last control token
        stands in both texts before they part (characters; 0: nowhere)."""
        messages = conversation.messages
        num_system = next((i for i, m in enumerate(messages) if m.role is not Role.SYSTEM), 0)
        other = "1" if messages[num_system].content.startswith("0") else "0"
        dummy = replace(
            conversation,
            messages=(*messages[:num_system], Message(Role.USER, other)),
        )
        try:
            head = self.render(dummy, generation=False)
        except InvalidRequest:
            return "", 0
        shared = common_prefix_bytes(head.encode(), text.encode())
        spans = self.codec.control_spans(text.encode()[:shared].decode(errors="ignore"))
        return head, spans[-1][0] if spans else 0

    def _head_tokens(
        self, other: str, bos: list[int], pieces: Sequence[list[int]], *, split: bool
    ) -> int:
        """Tokens that the prompt shares with every conversation of the same head.

        `other` is the other render from the place where the first of `pieces` ends, or, unless
        they are `split` there, from its start.
        """
        if not other or len(bos) + sum(map(len, pieces)) < MIN_HEAD_TOKENS:
            return 0
        before, rest = (len(pieces[0]), pieces[1]) if split else (0, pieces[0])
        shared = common_prefix(joined([rest]), self.codec.encode_suffix(other.encode()))
        head = len(bos) + before + shared
        return head if head >= MIN_HEAD_TOKENS else 0

    def _digest(self, source: str) -> bytes:
        digest = hashlib.sha256(b"ds4grpc/renderer")
        markers = self.markers
        texts = (markers.open, markers.close, markers.open_text, markers.close_text)
        for part in (source, f"{RULES_VERSION}.{escape.VERSION}", *texts):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.digest()[:16]


def _is_markup(spelling: str) -> bool:
    """Whether a token's spelling is one that text has only on purpose."""
    return len(spelling) > 1 and not spelling.isspace() and not spelling.isalnum()


def _client_texts(conversation: Conversation) -> list[str]:
    texts = [conversation.effort]
    for tool in conversation.tools:
        texts += (tool.name, tool.description, json.dumps(tool.parameters, ensure_ascii=False))
    for message in conversation.messages:
        texts += (message.content, message.reasoning, message.name, message.tool_call_id)
        for call in message.tool_calls:
            texts += (call.id, call.name, call.arguments_json)
    return texts
