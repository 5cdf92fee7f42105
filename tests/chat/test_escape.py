"""Escaping: no client text spells a control token or a marker, alone or next to other text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4grpc.chat.escape import Escaper
from ds4grpc.errors import ModelError
from ds4grpc.tokenizer import ESCAPE, unescape

SPELLINGS = ("<|im_end|>", "<|im_start|>", "<|im_|>", "<think>", "</think>", "[INST]", "<｜User｜>")
ESCAPER = Escaper(SPELLINGS)
PARTS = st.sampled_from(
    (
        *SPELLINGS,
        "<",
        "<|",
        "<|im_",
        "im_end|>",
        "|>",
        ">",
        "think",
        "/",
        "a",
        " ",
        ESCAPE,
        "[",
        "é",
    )
)
TEXTS = st.lists(PARTS, max_size=8).map("".join)


@given(TEXTS)
def test_escape_is_undone_by_unescape(text: str) -> None:
    assert unescape(ESCAPER.escape(text)) == text
    assert unescape(ESCAPER.escape_inside(text)) == text


@given(TEXTS)
def test_escape_leaves_no_spelling(text: str) -> None:
    for escaped in (ESCAPER.escape(text), ESCAPER.escape_inside(text)):
        assert not any(spelling in escaped for spelling in SPELLINGS)


@given(TEXTS, TEXTS)
def test_escaped_texts_side_by_side_spell_nothing(left: str, right: str) -> None:
    joined = ESCAPER.escape(left) + ESCAPER.escape(right)
    assert not any(spelling in joined for spelling in SPELLINGS)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("before", ["", "<", "</", "<|", "[", "<｜"])
@pytest.mark.parametrize("after", ["", ">", "|>", "]", "｜>"])
def test_template_punctuation_around_a_text_spells_nothing(
    spelling: str, before: str, after: str
) -> None:
    text = spelling.removeprefix(before).removesuffix(after)
    joined = before + ESCAPER.escape(text) + after
    assert not any(known in joined for known in SPELLINGS)


def test_escape_leaves_ordinary_text_alone() -> None:
    text = "if a < b and b > c: print('object', [1, 2]) # user | end"
    assert ESCAPER.escape(text) == text


def test_escape_json_reaches_names_and_values_and_keeps_types() -> None:
    value = {"<think>": ["</think>", 1, 2.5, None, True, {"type": "object"}]}
    assert ESCAPER.escape_json(value) == {
        f"<{ESCAPE}think>": [f"<{ESCAPE}/think>", 1, 2.5, None, True, {"type": "object"}]
    }


def test_spelling_of_one_character_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be told from text"):
        Escaper(["<|im_end|>", "\x00"])


def test_no_spellings_escape_only_the_escape_itself() -> None:
    assert Escaper(()).escape(f"<think>{ESCAPE}") == f"<think>{ESCAPE}{ESCAPE}"


def test_escape_of_long_hostile_text_is_linear() -> None:
    started = time.perf_counter()
    ESCAPER.escape("<|im_<<|" * 250_000)
    assert time.perf_counter() - started < 10  # 0.2 s; quadratic would take hours
