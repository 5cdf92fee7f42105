"""A model's Jinja chat template, run the way transformers runs it.

Owns the sandbox and its bounds. Knows no roles, no markers, no escaping: variables in, text out.
Compiled once; rendering computes, so it belongs in worker threads, and any number may render.

The environment follows transformers, `utils/chat_template_utils.py`, `_compile_jinja_template`:
https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/utils/chat_template_utils.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ds4grpc.errors import InvalidRequest, ModelError

# Twice the most that a conversation may hold (16 MiB of UTF-8): real templates add kilobytes.
MAX_RENDER_CHARACTERS: Final = 1 << 25
_MAX_MESSAGE_CHARACTERS: Final = 500


class TemplateRefusal(jinja2.TemplateError):
    """What a template's own `raise_exception` raises."""


class Template:
    """One compiled chat template.

    Raises ModelError when the source is not a template.
    """

    def __init__(self, source: str) -> None:
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise ModelError("the chat template does not compile: nested too deeply") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text that the template makes of `variables`.

        Raises InvalidRequest: the template refuses them (with its own message), fails on them,
        or makes more than MAX_RENDER_CHARACTERS of them.
        """
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(**variables):
                parts.append(part)
                length += len(part)
                if length > MAX_RENDER_CHARACTERS:
                    break
        except TemplateRefusal as error:
            raise _invalid(f"the chat template refuses: {error}", "TEMPLATE_REFUSED") from error
        # Templates are programs: what goes wrong in one is whatever Python raises.
        except Exception as error:
            raise _invalid(
                f"the chat template fails: {type(error).__name__}: {error}", "TEMPLATE_FAILED"
            ) from error
        if length > MAX_RENDER_CHARACTERS:
            raise _invalid(
                f"the chat template makes more than {MAX_RENDER_CHARACTERS:,} characters",
                "TEMPLATE_FAILED",
            )
        return "".join(parts)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The immutable sandbox, with the operators bounded that make much of little."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**" and not _is_small_power(left, right):
            raise jinja2.exceptions.SecurityError("a power is too large")
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                if len(sequence) * times > MAX_RENDER_CHARACTERS:
                    raise jinja2.exceptions.SecurityError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: marks training text; renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own filter: not for HTML, so <, > and & stay as they are.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _is_small_power(base: Any, exponent: Any) -> bool:
    if isinstance(base, int) and isinstance(exponent, int):
        return base.bit_length() * exponent <= 1024
    return True  # floats overflow by themselves


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # local time, as the template's author expects


def _invalid(message: str, reason: str) -> InvalidRequest:
    if len(message) > _MAX_MESSAGE_CHARACTERS:
        message = message[:_MAX_MESSAGE_CHARACTERS] + "…"
    return InvalidRequest(message, field="chat", reason=reason)
