"""The cascade as a function: what a prompt can take from which bank, and why not more.

Ids are the bytes of the text, so a test can be read; hidden reasoning is ids that no text has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ds4grpc.bank import BankContent, Ids, MissReason, Record, RecordKind, Waypoint
from ds4grpc.chat.prompt import Prompt
from ds4grpc.engine.banks import RowSink
from ds4grpc.engine.reuse import Lookup, Rates, ResidentBank, rank
from ds4grpc.layout import Rows, Spans, StateLayout

PLAIN = StateLayout("plain", (Rows("k", 8),))
WINDOW = StateLayout("window", (Rows("k", 8), Rows("w", 8, 1, 16)))
RENDERER = b"r" * 16
SPACE = b"n" * 32
THOUGHT = [1000 + i for i in range(40)]


def ids(*parts: str | list[int]) -> Ids:
    joined: list[int] = []
    for part in parts:
        joined += part if isinstance(part, list) else list(part.encode())
    return np.array(joined, dtype=np.uint32)


def prompt(text: str) -> Prompt:
    return Prompt(text=text.encode(), ids=ids(text), renderer=RENDERER)


def lookup(
    text: str,
    *,
    layout: StateLayout = PLAIN,
    max_context: int = 1000,
    reply_tokens: int = 10,
    exact: bool = False,
) -> Lookup:
    asked = prompt(text)
    return Lookup(
        asked, lambda offset: ids(text[offset:]), layout, max_context, reply_tokens, exact
    )


def record(key: str, *waypoints: tuple[int, int], kind: RecordKind = RecordKind.VISIBLE) -> Record:
    return Record(kind, key.encode(), RENDERER, tuple(Waypoint(o, p) for o, p in waypoints))


def bank(
    all_ids: Ids,
    *records: Record,
    slot: int = 0,
    in_use: bool = False,
    held: Spans | None = None,
    last_use: float = 0.0,
) -> ResidentBank:
    everything = Spans(((0, len(all_ids)),))
    content = BankContent(SPACE, all_ids, records, held=held if held is not None else everything)
    return ResidentBank(slot, 1, content, in_use, pinned=False, last_use=last_use)


@dataclass
class Stored:
    """A stored bank as the cascade sees one."""

    content: BankContent
    bank_id: str = "stored"
    bytes_a_token: int = 100
    released: list[int] = field(default_factory=list)

    def load_bytes(self, position: int) -> int:
        return position * self.bytes_a_token

    async def load(self, position: int, sink: RowSink) -> int:
        raise AssertionError("the cascade loads nothing")

    def release(self) -> None:
        self.released.append(1)


def sound(bank: object, checked: Record) -> bool:
    return True


TURN = "system: be brief. user: what is the tallest tower here? assistant:"
REPLY = " the old mill."
NEXT = TURN + REPLY + " user: and the widest? assistant:"


def thinking_bank(slot: int = 0) -> ResidentBank:
    """Turn 1 with hidden reasoning, keyed on what the client replays."""
    held = ids(TURN, THOUGHT, REPLY)
    key = TURN + REPLY
    return bank(held, record(key, (len(key), len(held))), slot=slot)


def test_visible_key_continues_the_bank_with_its_hidden_reasoning() -> None:
    asked = lookup(NEXT)
    (best,), miss = rank(asked, [thinking_bank()], [], sound, Rates())
    held = len(TURN) + len(THOUGHT) + len(REPLY)
    assert miss is None
    assert best.match.whole
    assert best.match.base == held
    assert best.match.suffix.tolist() == list(NEXT[len(TURN + REPLY) :].encode())
    assert best.match.hidden_tokens == len(THOUGHT)
    assert best.match.waypoints == (Waypoint(len(TURN + REPLY), held),)


def test_exact_reuse_ignores_the_key_and_ends_where_the_tokens_part() -> None:
    (best,), miss = rank(lookup(NEXT, exact=True), [thinking_bank()], [], sound, Rates())
    assert best.match.base == len(TURN)
    assert miss is not None


def test_repeated_prompt_leaves_one_token_to_prefill() -> None:
    held = bank(ids(TURN, REPLY), record(TURN + REPLY, (len(TURN + REPLY), len(TURN + REPLY))))
    (best,), _ = rank(lookup(TURN), [held], [], sound, Rates())
    assert best.match.base == len(TURN) - 1
    assert len(best.match.suffix) == 1


def test_edit_after_a_hidden_block_is_reused_up_to_the_edit() -> None:
    # The bank has turn 2 as well; the client edits its last message.
    second = " user: and the widest tower of them all? assistant:"
    held = ids(TURN, THOUGHT, REPLY, second, " none.")
    key = TURN + REPLY + second + " none."
    first_end = len(TURN) + len(THOUGHT) + len(REPLY)
    content = bank(held, record(key, (len(TURN + REPLY), first_end), (len(key), len(held))))
    edited = TURN + REPLY + " user: and the narrowest? assistant:"
    (best,), miss = rank(lookup(edited), [content], [], sound, Rates())
    assert best.match.base == first_end + len(" user: and the ")
    assert miss is MissReason.KEY_DIFFERS
    assert best.match.waypoints == (Waypoint(len(TURN + REPLY), first_end),)


def test_hidden_reasoning_that_overflows_the_context_is_given_up_turn_by_turn() -> None:
    second = " user: more? assistant:"
    held = ids(TURN, THOUGHT, REPLY, second, THOUGHT, " no.")
    key = TURN + REPLY + second + " no."
    first_end = len(TURN) + len(THOUGHT) + len(REPLY)
    content = bank(held, record(key, (len(TURN + REPLY), first_end), (len(key), len(held))))
    text = key + " user: why? assistant:"
    whole = len(text) + 2 * len(THOUGHT)
    (fits,), _ = rank(lookup(text, max_context=whole + 10), [content], [], sound, Rates())
    assert fits.match.base == len(held)
    (first,), miss = rank(lookup(text, max_context=whole + 9), [content], [], sound, Rates())
    assert first.match.base == first_end + len(second)
    assert miss is MissReason.HIDDEN_OVERFLOW
    (none,), miss = rank(lookup(text, max_context=len(text) + 10), [content], [], sound, Rates())
    assert none.match.base == len(TURN)
    assert miss is MissReason.HIDDEN_OVERFLOW


def test_ranking_is_by_tokens_delivered_not_by_text() -> None:
    # A longer shared text whose tokens part early loses against a shorter one that holds.
    spelled = bank(ids(TURN[:20], [999], TURN[20:]), slot=0)
    shorter = bank(ids(TURN[:40], "x"), slot=1)
    ranked, _ = rank(lookup(TURN), [spelled, shorter], [], sound, Rates())
    assert [p.match.base for p in ranked] == [40]
    assert ranked[0].bank is shorter


def test_trivial_common_beginning_is_no_reuse() -> None:
    other = bank(ids("system: be quiet and say nothing at all"))
    ranked, miss = rank(lookup(TURN), [other], [], sound, Rates())
    assert ranked == ()
    assert miss is MissReason.TOO_SHORT


def test_nothing_in_common_is_no_record() -> None:
    assert rank(lookup(TURN), [], [], sound, Rates()) == ((), MissReason.NO_RECORD)


def test_key_of_another_renderer_is_not_used_but_its_tokens_are() -> None:
    held = thinking_bank()
    other = replace(held.content.records[0], renderer=b"o" * 16)
    (best,), miss = rank(lookup(NEXT), [bank(held.content.ids, other)], [], sound, Rates())
    assert best.match.base == len(TURN)
    assert miss is MissReason.OTHER_RENDERER


def test_idle_bank_is_preferred_to_one_in_use() -> None:
    busy = bank(ids(TURN), slot=0, in_use=True, last_use=9.0)
    idle = bank(ids(TURN), slot=1)
    ranked, _ = rank(lookup(NEXT), [busy, idle], [], sound, Rates())
    assert ranked[0].bank is idle


def test_stored_bank_is_taken_only_when_it_delivers_more() -> None:
    longer = Stored(thinking_bank().content)
    resident = bank(ids(TURN))
    ranked, miss = rank(lookup(NEXT), [resident], [longer], sound, Rates())
    assert [p.bank for p in ranked] == [longer, resident]
    assert miss is None
    ranked, _ = rank(lookup(NEXT), [thinking_bank()], [longer], sound, Rates())
    assert all(isinstance(p.bank, ResidentBank) for p in ranked)


def test_slow_disk_is_overruled_only_when_recomputing_is_clearly_faster() -> None:
    stored = Stored(thinking_bank().content)
    seconds = len(stored.content.ids) / 100.0  # to recompute at 100 tokens/s
    byte_rate = stored.load_bytes(len(stored.content.ids)) / seconds
    even = Rates(100.0, byte_rate / 1.4)
    slow = Rates(100.0, byte_rate / 1.6)
    assert len(rank(lookup(NEXT), [], [stored], sound, even)[0]) == 1
    assert rank(lookup(NEXT), [], [stored], sound, slow) == ((), MissReason.LOAD_SLOWER)


def test_record_from_a_file_that_fails_its_check_is_not_used() -> None:
    stored = Stored(thinking_bank().content)
    (best,), miss = rank(lookup(NEXT), [], [stored], lambda *_: False, Rates())
    assert best.match.base == len(TURN)
    assert miss is not None


def test_window_layout_resumes_only_where_its_window_is_held() -> None:
    held = ids(TURN, THOUGHT, REPLY)
    first = len(TURN)
    windows = Spans.of([(first - 16, first), (len(held) - 16, len(held))])
    key = TURN + REPLY
    content = bank(held, record(key, (len(key), len(held))), held=windows)
    edited = TURN + " the new mill. user: why?"
    (best,), _ = rank(lookup(edited, layout=WINDOW), [content], [], sound, Rates())
    assert best.match.base == first
    earlier = TURN[: first - 5] + "? And then the other one: assistant:"
    ranked, _ = rank(lookup(earlier, layout=WINDOW), [content], [], sound, Rates())
    assert ranked == ()
