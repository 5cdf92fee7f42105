"""Bounds of a conversation, and the field that an error names."""

from __future__ import annotations

import json

import pytest

from ds4grpc.chat.conversation import check_conversation, parse_object
from ds4grpc.chat.prompt import Conversation, Message, Role, Tool, ToolCall
from ds4grpc.errors import InvalidRequest

USER = Message(Role.USER, "Hi")


def _calls(*calls: ToolCall) -> Conversation:
    return Conversation((Message(Role.ASSISTANT, tool_calls=calls), USER))


@pytest.mark.parametrize(
    ("conversation", "field"),
    [
        (Conversation(()), "chat.messages"),
        (Conversation((USER,) * 5000), "chat.messages"),
        (Conversation((USER, Message(Role.ASSISTANT, "a"))), "chat.messages[1].role"),
        (Conversation((Message(Role.SYSTEM, "a"),)), "chat.messages[0].role"),
        (Conversation((Message(Role.USER, "a", reasoning="b"),)), "chat.messages[0].reasoning"),
        (
            Conversation((Message(Role.USER, "a", tool_calls=(ToolCall("1", "f", "{}"),)),)),
            "chat.messages[0].tool_calls",
        ),
        (
            Conversation((Message(Role.USER, "a", tool_call_id="1"),)),
            "chat.messages[0].tool_call_id",
        ),
        (Conversation((Message(Role.USER, "a", name="n" * 300),)), "chat.messages[0].name"),
        (
            _calls(ToolCall("1", "f", "{}"), ToolCall("1", "g", "{}")),
            "chat.messages[0].tool_calls[1].id",
        ),
        (_calls(ToolCall("1", "", "{}")), "chat.messages[0].tool_calls[0].name"),
        (_calls(ToolCall("1", "f", "[]")), "chat.messages[0].tool_calls[0].arguments_json"),
        (_calls(ToolCall("1", "f", "{")), "chat.messages[0].tool_calls[0].arguments_json"),
        (Conversation((USER,), (Tool("", "d", {}),)), "chat.tools[0].name"),
        (Conversation((USER,), (Tool("f", "d", []),)), "chat.tools[0].parameters_json"),
        (Conversation((USER,), (Tool("f", "d", {}),) * 2000), "chat.tools"),
        (Conversation((Message(Role.USER, "a" * (16 << 20) + "a"),)), "chat"),
    ],
)
def test_bad_conversation_names_its_field(conversation: Conversation, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_conversation(conversation)
    assert caught.value.field == field


def test_good_conversation_passes() -> None:
    call = ToolCall("c1", "lookup", '{"a": {"b": [1, "é"]}}')
    check_conversation(
        Conversation(
            (
                Message(Role.SYSTEM, "Be brief."),
                USER,
                Message(Role.ASSISTANT, reasoning="Hm.", tool_calls=(call,)),
                Message(Role.TOOL, "42", tool_call_id="c1", name="lookup"),
            ),
            (Tool("lookup", "", {"type": "object"}),),
        )
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        "NaN",
        '{"a": NaN}',
        '{"a": "\\ud800"}',
        '{"a": ' + "[" * 100 + "]" * 100 + "}",
        "[" * 100_000,
    ],
)
def test_text_that_is_no_bounded_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(text, "here")
    assert caught.value.field == "here"


def test_nesting_up_to_the_limit_is_accepted() -> None:
    value: object = 1
    for _ in range(60):
        value = {"a": value}
    assert parse_object(json.dumps(value), "here") == value
