"""The reasoning and tool markers that model families use, and which of them a template uses.

Knows templates as text only. Pure values and functions; any thread.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Markers:
    """How a family writes reasoning. `open_text` and `close_text` are the markers with the white
    space that the template puts around them."""

    open: str
    close: str
    open_text: str
    close_text: str


@dataclass(frozen=True, slots=True)
class Family:
    """One way to mark reasoning, as text."""

    open: str
    close: str


FAMILIES: Final = (
    Family("<think>", "</think>"),  # DeepSeek, Qwen, GLM and most others
    Family("<thinking>", "</thinking>"),  # Apriel
    Family("[THINK]", "[/THINK]"),  # Mistral
    Family("<seed:think>", "</seed:think>"),  # Seed-OSS
    Family("<mm:think>", "</mm:think>"),  # MiniMax M3
    Family("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    Family("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    Family("◁think▷", "◁/think▷"),  # Kimi-VL
    Family("<|channel>thought", "<channel|>"),  # Gemma 4
    # Kimi K3 opens the answer like it opens the reasoning, so both steps are the close marker.
    Family("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
)
DEFAULT_FAMILY: Final = FAMILIES[0]

_TOOL_MARKERS: Final = (
    "<tool_call>",
    "</tool_call>",
    "<tool_calls>",
    "</tool_calls>",
    "<tool_response>",
    "</tool_response>",
    "<tool_responses>",
    "</tool_responses>",
    "<tool_result>",
    "</tool_result>",
    "<function_call>",
    "</function_call>",
    "<function_calls>",
    "</function_calls>",
    "<|tool_call|>",
    "<|tool_response|>",
    "<tools>",
    "</tools>",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
)


def family_before(text: str) -> Family | None:
    """The family whose open marker ends `text`, white space aside."""
    text = text.rstrip()
    matching = (family for family in FAMILIES if text.endswith(family.open))
    return max(matching, key=lambda family: len(family.open), default=None)


def family_in(source: str, spellings: Collection[str]) -> Family:
    """The family that a template's source or a vocabulary's `spellings` name; else the default.

    A close marker alone names one too: templates that strip reasoning often hold nothing else.
    """
    for family in FAMILIES:
        if family.open in source and family.close in source:
            return family
    for family in FAMILIES:
        if family.close in source:
            return family
    for family in FAMILIES:
        if family.open in spellings and family.close in spellings:
            return family
    return DEFAULT_FAMILY


def tool_markers_in(source: str) -> tuple[str, ...]:
    """The tool markers that a template's source names."""
    return tuple(marker for marker in _TOOL_MARKERS if marker in source)
