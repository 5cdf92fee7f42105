"""The reply parser: channels, what is held back, stop strings, and what counts as received."""

from __future__ import annotations

import random

import pytest
from bankplay import split_encode
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import tokenizer_for

from ds4grpc.chat.prompt import Channel, ReplyForm
from ds4grpc.chat.stream import ReplyParser

TOKENIZER = tokenizer_for("<|im_start|><|im_end|><seed:think></seed:think>")
THINK = ReplyForm("<think>", "</think>", reasoning_open=True)
ANSWER = ReplyForm("<think>", "</think>")
SEED = ReplyForm("<seed:think>", "</seed:think>", reasoning_open=True)
END = TOKENIZER.controls["<|im_end|>"]


def _bytes(text: str) -> list[int]:
    """One id a byte: the finest split."""
    single = {TOKENIZER.token_bytes(i): i for i in range(256)}
    return [single[bytes([byte])] for byte in text.encode()]


def _run(
    form: ReplyForm, ids: list[int], stop: tuple[str, ...] = ()
) -> tuple[str, str, ReplyParser]:
    parser = ReplyParser(form, TOKENIZER, stop)
    pieces = []
    for token_id in ids:
        pieces += parser.feed(token_id)
        if parser.stopped is not None:
            break
    else:
        pieces += parser.flush()
    assert all(text for _, text in pieces)
    joined = {
        channel: "".join(text for got, text in pieces if got is channel) for channel in Channel
    }
    return joined[Channel.REASONING], joined[Channel.TEXT], parser


@pytest.mark.parametrize(
    ("form", "raw", "reasoning", "text"),
    [
        (THINK, "why\n</think>\n\nSo.", "why", "So."),
        (THINK, "\n why \n\n</think>So.", "why", "So."),
        (THINK, "</think>So.", "", "So."),
        (THINK, "a </thin </think> b", "a </thin", "b"),
        (THINK, "a<think>b</think>c</think>d<think>e", "a<think>b", "c</think>d<think>e"),
        (THINK, "open \n", "open \n", ""),
        (THINK, "open </thin", "open </thin", ""),
        (THINK, "", "", ""),
        (ANSWER, " \n Hi  \n", "", " \n Hi  \n"),
        (ANSWER, " \n", "", " \n"),
        (ANSWER, "\n<think>\nwhy</think>\nSo.", "why", "So."),
        (ANSWER, "<thin", "", "<thin"),
        (ANSWER, "Hi <think>x</think>", "", "Hi <think>x</think>"),
        (ANSWER, "</think>Hi", "", "</think>Hi"),
        (ReplyForm(), "<think>x</think>", "", "<think>x</think>"),
    ],
)
def test_reply_is_split_by_its_markers(
    form: ReplyForm, raw: str, reasoning: str, text: str
) -> None:
    for ids in (TOKENIZER.plain_ids(raw), _bytes(raw)):
        assert _run(form, ids)[:2] == (reasoning, text)


def test_markers_that_are_control_tokens_split_the_reply() -> None:
    ids = TOKENIZER.encode("why</seed:think>So.")
    reasoning, text, parser = _run(SEED, ids)
    assert (reasoning, text) == ("why", "So.")
    end = ids.index(TOKENIZER.controls["</seed:think>"]) + 1
    assert parser.hidden_span == (0, end)
    assert parser.delivered_tokens(len(ids)) == len(ids)


def test_markers_of_control_tokens_spelled_as_text_split_it_too() -> None:
    assert _run(SEED, TOKENIZER.plain_ids("why</seed:think>So."))[:2] == ("why", "So.")


@given(
    parts=st.lists(
        st.sampled_from(
            (
                "<think>",
                "</think>",
                "</",
                "think",
                ">",
                "a",
                " ",
                "\n",
                "😀",
                "é",
                "STOP",
                "ST",
                "O",
            )
        ),
        max_size=14,
    ),
    opened=st.booleans(),
    stop=st.sampled_from(((), ("STOP",), ("OP", "STO"), ("aa", "a a", "é\n"))),
    seed=st.integers(0, 2**20),
)
@settings(deadline=None, max_examples=150)
def test_split_into_tokens_does_not_change_the_pieces(
    parts: list[str], opened: bool, stop: tuple[str, ...], seed: int
) -> None:
    raw = "".join(parts)
    form = THINK if opened else ANSWER
    reasoning, text, parser = _run(form, _bytes(raw), stop)
    for ids in (split_encode(TOKENIZER, raw, random.Random(seed)), TOKENIZER.plain_ids(raw)):
        other_reasoning, other_text, other = _run(form, ids, stop)
        assert (other_reasoning, other_text) == (reasoning, text)
        assert other.stopped == parser.stopped
    assert not any(target in text for target in stop)
    if parser.stopped is None:
        _assert_nothing_is_lost(raw, opened=opened, reasoning=reasoning, text=text)


def _assert_nothing_is_lost(raw: str, *, opened: bool, reasoning: str, text: str) -> None:
    """All but the markers of the first block and white space around them is delivered."""
    if not opened:
        started = raw.lstrip()
        if not started.startswith("<think>"):
            assert (reasoning, text) == ("", raw)
            return
        raw = started.removeprefix("<think>")
    body, closed, rest = raw.partition("</think>")
    assert reasoning == (body.strip() if closed else body.lstrip())
    assert text == rest.lstrip()


def test_text_is_held_back_only_while_it_may_be_a_marker_or_stop() -> None:
    parser = ReplyParser(THINK, TOKENIZER, ("STOP",))
    expected = [
        *(("a", "a"), ("b", "b")),
        *((" ", ""), ("c", " c")),  # white space may come before a close marker
        *(("<", ""), ("/", ""), ("d", "</d")),
        *((" ", ""), *((character, "") for character in "</think>")),
        *((" ", ""), ("S", ""), (" ", "S ")),
        *(("S", ""), ("T", ""), ("x", "STx")),
    ]
    for fed, ready in expected:
        assert "".join(text for _, text in parser.feed(*_bytes(fed))) == ready


@pytest.mark.parametrize(
    ("stop", "raw", "text", "matched"),
    [
        (("STOP",), "go STOP on", "go ", "STOP"),
        (("b", "abc"), "xabc", "xa", "b"),  # the first to become complete
        (("bc", "abc"), "xabc", "x", "abc"),  # complete at once: the longest
        (("STOP",), "STO", "STO", None),
        (("\n\n",), "a\n\nb", "a", "\n\n"),
        (("",), "ab", "ab", None),
    ],
)
def test_stop_string_ends_the_text_before_it(
    stop: tuple[str, ...], raw: str, text: str, matched: str | None
) -> None:
    for ids in (TOKENIZER.plain_ids(raw), _bytes(raw)):
        _, got, parser = _run(ANSWER, ids, stop)
        assert (got, parser.stopped) == (text, matched)


def test_stop_string_in_reasoning_is_no_stop() -> None:
    reasoning, text, parser = _run(THINK, _bytes("STOP</think>a STOP b"), ("STOP",))
    assert (reasoning, text, parser.stopped) == ("STOP", "a ", "STOP")


def test_token_that_a_stop_string_overlaps_is_not_received() -> None:
    ids = [*TOKENIZER.plain_ids("ab "), *TOKENIZER.plain_ids("th")]
    assert TOKENIZER.token_bytes(ids[-1]) == b"th"
    _, text, parser = _run(ANSWER, ids, ("h",))
    assert text == "ab t"
    assert parser.delivered_tokens(len(ids)) == len(ids) - 1
    assert parser.reply(len(ids) - 1).text == "ab "


def test_token_that_ends_inside_a_character_is_not_received() -> None:
    ids = _bytes("a😀b")
    parser = ReplyParser(ANSWER, TOKENIZER)
    for token_id in ids[:3]:
        parser.feed(token_id)
    assert parser.flush() == [(Channel.TEXT, "�")]
    assert parser.delivered_tokens(3) == 1
    assert parser.reply(1).text == "a"
    whole = ReplyParser(ANSWER, TOKENIZER)
    for token_id in ids:
        whole.feed(token_id)
    assert whole.delivered_tokens(5) == 5


def test_control_token_is_neither_sent_nor_received() -> None:
    ids = [*TOKENIZER.plain_ids("ab"), END, *TOKENIZER.plain_ids("cd")]
    _, text, parser = _run(ANSWER, ids, ("bc",))
    assert (text, parser.stopped) == ("abcd", None)
    assert parser.delivered_tokens(len(ids)) == 2
    assert parser.reply(len(ids)).control_inside
    assert not parser.reply(2).control_inside


def test_held_text_is_not_received_before_the_flush() -> None:
    parser = ReplyParser(ANSWER, TOKENIZER, ("STOP",))
    ids = _bytes("a STO")
    for token_id in ids:
        parser.feed(token_id)
    assert parser.delivered_tokens(len(ids)) == 2
    assert parser.flush() == [(Channel.TEXT, "STO")]
    assert parser.delivered_tokens(len(ids)) == len(ids)


def test_hidden_span_ends_after_the_token_that_completes_the_close_marker() -> None:
    ids = TOKENIZER.plain_ids("why\n</think>\n\nSo.")
    _, _, parser = _run(THINK, ids)
    start, end = parser.hidden_span
    assert start == 0
    assert TOKENIZER.decode(ids[:end]).startswith("why\n</think>")
    assert not TOKENIZER.decode(ids[: end - 1]).endswith("</think>")


def test_hidden_span_grows_while_reasoning_is_open_and_is_empty_without() -> None:
    parser = ReplyParser(THINK, TOKENIZER)
    for count, token_id in enumerate(_bytes("why"), start=1):
        parser.feed(token_id)
        assert parser.in_reasoning
        assert parser.hidden_span == (0, count)
    assert parser.reply(2).reasoning_open
    _, _, answer = _run(ANSWER, _bytes("So."))
    assert answer.hidden_span == (0, 0)
    assert not answer.reply(3).reasoning_open


def test_reply_is_cut_to_whole_tokens() -> None:
    ids = _bytes("why</think> So it is.")
    _, _, parser = _run(THINK, ids)
    reply = parser.reply(len(ids) - 4)
    assert (reply.reasoning, reply.text) == ("why", "So it")
    inside = parser.reply(5)
    assert (inside.reasoning, inside.text, inside.reasoning_open) == ("why", "", True)
    assert parser.reply(0).text == ""
