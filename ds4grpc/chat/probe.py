"""What a chat template does, found by rendering small conversations with it.

Owns the trial renders; they hold no client text. Knows no tokenizer. Runs once a model, at start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from ds4grpc.chat.markers import Family, Markers, family_before, family_in
from ds4grpc.chat.template import Template
from ds4grpc.errors import InvalidRequest

Variables = dict[str, Any]

# Names under which templates read the reasoning of a message, the usual one first.
_REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")

# Words that no template holds and none changes.
_ASK: Final = "Qwhatask"
_SAY: Final = "Qwhatsay"
_NEXT: Final = "Qwhatnext"
_REASON: Final = "Qreasoning"


@dataclass(frozen=True, slots=True)
class Traits:
    """The answers.

    `reasoning_field` is the field of a message that the template reads reasoning from, None when
    it knows none. `arguments_as_text`: it wants the arguments of calls as JSON text, not as an
    object. `empty_content` is what it wants as content of a message that only has calls.
    """

    markers: Markers
    reasoning_field: str | None
    arguments_as_text: bool
    empty_content: str | None
    default_thinking: bool


def thinking_variables(thinking: bool | None) -> Variables:
    """The names by which templates ask whether to think; none of them when nothing is said."""
    return {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}


def find_traits(
    template: Template, source: str, spellings: Collection[str], constants: Mapping[str, Any]
) -> Traits:
    """Tries `template` out.

    `source` is its text, `spellings` the vocabulary's special tokens, `constants` the variables
    that every render of it gets.
    """
    probe = _Probe(template, constants)
    reasoning_field, rendered = probe.reasoning()
    family = family_in(source, spellings)
    open_text, close_text = f"{family.open}\n", f"\n{family.close}\n\n"
    if rendered is not None:
        before, after = rendered.split(_REASON, 1)
        family = family_before(before) or family
        open_text, close_text = f"{family.open}\n", f"\n{family.close}\n\n"
        opened = before.rfind(family.open)
        if opened >= 0 and not before[opened + len(family.open) :].strip():
            open_text = before[opened:]
        close_text = _close_text(after, family) or close_text
    arguments_as_text, empty_content = probe.calls()
    return Traits(
        markers=Markers(family.open, family.close, open_text, close_text),
        reasoning_field=reasoning_field,
        arguments_as_text=arguments_as_text,
        empty_content=empty_content,
        default_thinking=probe.default_thinking(family),
    )


def turns(probe_template: Template, constants: Mapping[str, Any]) -> tuple[str, str] | None:
    """What the template writes between a user's and an assistant's text, and after the latter up
    to the next user's; None when it refuses such a conversation or moves the texts."""
    rendered = _Probe(probe_template, constants).render(
        [
            {"role": "user", "content": _ASK},
            {"role": "assistant", "content": _SAY},
            {"role": "user", "content": _NEXT},
        ]
    )
    if rendered is None:
        return None
    _, asked, rest = rendered.partition(_ASK)
    to_answer, said, rest = rest.partition(_SAY)
    to_next, following, _ = rest.partition(_NEXT)
    return (to_answer, to_next) if asked and said and following else None


class _Probe:
    """Renders trial conversations; a refusal is an answer, None."""

    def __init__(self, template: Template, constants: Mapping[str, Any]) -> None:
        self._template = template
        self._constants = constants

    def render(self, messages: list[Variables], **variables: Any) -> str | None:
        # Some templates are for conversations with tools only.
        for tools in ({}, {"tools": [_TOOL]}):
            try:
                return self._template.render(
                    {**self._constants, "messages": messages, **tools, **variables}
                )
            except InvalidRequest:
                continue
        return None

    def reasoning(self) -> tuple[str | None, str | None]:
        """The field that reasoning is read from, and a render that holds it."""
        for name in _REASONING_FIELDS:
            for messages in self._with_reasoning(name):
                for thinking in (True, None):
                    rendered = self.render(messages, **thinking_variables(thinking))
                    if rendered is not None and rendered.count(_REASON) == 1:
                        return name, rendered
        return None, None

    def calls(self) -> tuple[bool, str | None]:
        """Whether arguments go in as text, and the content beside calls that shows them."""
        for as_text in (False, True):
            for content in ("", None):
                messages = _call_messages(as_text=as_text, content=content)
                if any(
                    _shows_call(rendered)
                    for tools in (None, [_TOOL])
                    if (rendered := self.render(messages, tools=tools)) is not None
                ):
                    return as_text, content
        return False, ""

    def default_thinking(self, family: Family) -> bool:
        """Whether the template thinks when nothing is said."""
        messages = [{"role": "user", "content": _ASK}]
        unset, on, off = (
            self.render(messages, add_generation_prompt=True, **thinking_variables(thinking))
            for thinking in (None, True, False)
        )
        if unset is None:
            return False
        return unset.rstrip().endswith(family.open) or (unset == on and on != off)

    def _with_reasoning(self, name: str) -> Iterator[list[Variables]]:
        answer = {"role": "assistant", "content": _SAY, name: _REASON}
        ask = {"role": "user", "content": _ASK}
        yield [ask, answer]
        yield [ask, answer, {"role": "user", "content": _NEXT}]
        for as_text in (False, True):
            messages = _call_messages(as_text=as_text, content=_SAY)
            messages[1][name] = _REASON
            yield messages


_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "qlookup",
        "description": "Looks up",
        "parameters": {
            "type": "object",
            "properties": {"qkey": {"type": "string", "description": "Key"}},
        },
    },
}


def _call_messages(*, as_text: bool, content: str | None) -> list[Variables]:
    arguments: Any = '{"qkey": "qvalue"}' if as_text else {"qkey": "qvalue"}
    call = {
        "id": "call00001",  # Mistral's templates insist on nine letters and digits
        "type": "function",
        "function": {"name": "qlookup", "arguments": arguments},
    }
    result = {"role": "tool", "content": _NEXT, "name": "qlookup", "tool_call_id": "call00001"}
    return [
        {"role": "user", "content": _ASK},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        result,
    ]


def _close_text(after: str, family: Family) -> str | None:
    """The close marker with what stands around it, from the text `after` the reasoning.

    Up to the answer, when nothing else comes before it: families that open the answer with a
    token of its own need that one too. Else up to the white space after the marker.
    """
    before, closed, rest = after.partition(family.close)
    if not closed or before.strip():
        return None
    between, answered, _ = rest.partition(_SAY)
    if not answered or "qlookup" in between:
        between = rest[: len(rest) - len(rest.lstrip())]
    return before + closed + between


def _shows_call(rendered: str) -> bool:
    """Whether the call is there, and neither as Python would print it nor as JSON inside JSON."""
    return (
        "qlookup" in rendered
        and "qvalue" in rendered
        and "'qkey'" not in rendered
        and '\\"qkey' not in rendered
    )
