"""What a conversation may be, checked before a template sees it.

Owns the bounds and the field paths of errors. Knows no template and no tokenizer; pure
functions, any thread.
"""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from ds4grpc.chat.prompt import Conversation, Message, Role
from ds4grpc.errors import InvalidRequest

MAX_MESSAGES: Final = 4096
MAX_TOOLS: Final = 1024
MAX_TEXT_BYTES: Final = 16 << 20
MAX_JSON_DEPTH: Final = 64
_MAX_NAME_BYTES: Final = 256


def check_conversation(conversation: Conversation) -> None:
    """Raises InvalidRequest, with the culprit's field path, unless a template can be tried."""
    messages = conversation.messages
    if not messages:
        _refuse("a conversation needs at least one message", "chat.messages")
    if len(messages) > MAX_MESSAGES:
        _refuse(
            f"the conversation has {len(messages):,} messages; the limit is {MAX_MESSAGES:,}",
            "chat.messages",
        )
    if len(conversation.tools) > MAX_TOOLS:
        _refuse(
            f"the conversation has {len(conversation.tools):,} tools; the limit is {MAX_TOOLS:,}",
            "chat.tools",
        )
    if messages[-1].role not in (Role.USER, Role.TOOL):
        _refuse(
            f"the last message is of the {messages[-1].role}; it must be of a user or a tool",
            f"chat.messages[{len(messages) - 1}].role",
        )
    total = len(conversation.effort.encode())
    for i, message in enumerate(messages):
        total += _check_message(message, f"chat.messages[{i}]")
    for i, tool in enumerate(conversation.tools):
        path = f"chat.tools[{i}]"
        _check_name(tool.name, f"{path}.name")
        if not isinstance(tool.parameters, dict):
            _refuse("the parameters of a tool must be a JSON object", f"{path}.parameters_json")
        total += len(tool.description.encode())
        total += _check_json(tool.parameters, f"{path}.parameters_json")
    if total > MAX_TEXT_BYTES:
        _refuse(
            f"the conversation has {total:,} bytes of text; the limit is {MAX_TEXT_BYTES:,}",
            "chat",
        )


def parse_object(text: str, field: str) -> dict[str, Any]:
    """The JSON object that `text` is. Raises InvalidRequest, naming `field`."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        _refuse(f"not JSON: {error}"[:200], field)
    if not isinstance(value, dict):
        _refuse(f"a JSON object is needed, not {type(value).__name__}", field)
    _check_json(value, field)
    return value


def _check_message(message: Message, path: str) -> int:
    """Bytes of text in `message`; raises InvalidRequest."""
    if message.role is not Role.ASSISTANT:
        if message.tool_calls:
            _refuse("only an assistant message has tool calls", f"{path}.tool_calls")
        if message.reasoning:
            _refuse("only an assistant message has reasoning", f"{path}.reasoning")
    if message.tool_call_id and message.role is not Role.TOOL:
        _refuse("only a tool message answers a call", f"{path}.tool_call_id")
    if message.name:
        _check_name(message.name, f"{path}.name")
    total = len(message.content.encode()) + len(message.reasoning.encode())
    ids: set[str] = set()
    for i, call in enumerate(message.tool_calls):
        call_path = f"{path}.tool_calls[{i}]"
        if call.id and call.id in ids:
            _refuse(f"two calls have the id {call.id!r}"[:200], f"{call_path}.id")
        ids.add(call.id)
        if len(call.id.encode()) > _MAX_NAME_BYTES:
            _refuse(f"a call's id has at most {_MAX_NAME_BYTES} bytes", f"{call_path}.id")
        _check_name(call.name, f"{call_path}.name")
        parse_object(call.arguments_json, f"{call_path}.arguments_json")
        total += len(call.arguments_json.encode())
    if len(message.tool_call_id.encode()) > _MAX_NAME_BYTES:
        _refuse(f"a call's id has at most {_MAX_NAME_BYTES} bytes", f"{path}.tool_call_id")
    return total


def _check_name(name: str, field: str) -> None:
    if not name:
        _refuse("a name is needed", field)
    if len(name.encode()) > _MAX_NAME_BYTES:
        _refuse(f"a name has at most {_MAX_NAME_BYTES} bytes", field)


def _check_json(value: Any, field: str) -> int:
    """Bytes of `value` as JSON; raises InvalidRequest.

    Templates and escaping recurse into it, so its depth is bounded here, without recursion.
    """
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        _refuse(f"JSON nested deeper than {MAX_JSON_DEPTH} levels", field)
    try:
        return len(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, UTF-8 cannot
        _refuse("JSON with a lone surrogate is no text", field)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse(message: str, field: str) -> NoReturn:
    raise InvalidRequest(message, field=field)
