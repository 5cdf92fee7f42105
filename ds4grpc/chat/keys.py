"""Records: the texts by which a later prompt finds a bank, and the check that they are sound.

Owns the rule for keys. Knows no slots and no files; pure functions, in worker threads.

What makes it work: the visible text of a bank is the visible text of its turn's prompt and of the
reply. An admission by key guarantees that for the part that it reuses, and the rest of the bank
was encoded from the prompt itself. So a render of the conversation with its reply, and one more
turn after it, is searched for that visible text, and the key is the render up to its end:

    render   … <user> Hi <end> <assistant> Hello! | <end> <user> x <end> <assistant>
    bank     … <user> Hi <end> <assistant> <think> hidden </think> Hello! |
                                                            frontier ─────┘
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from ds4grpc.bank import Ids, Record, RecordKind, Waypoint, common_prefix_bytes
from ds4grpc.chat.codec import IDENTITY_DIGEST
from ds4grpc.chat.prompt import Conversation, Message, Prompt, Reply, Role
from ds4grpc.chat.renderer import Renderer
from ds4grpc.chat.visible import Visible, shared_space, trailing_space
from ds4grpc.errors import InvalidRequest
from ds4grpc.layout import Spans
from ds4grpc.tokenizer import ESCAPE, Tokenizer

# Stands for whatever the next turn says; never part of a key.
_NEXT_TEXT: Final = "x"
# More than the longest spelling of a control token.
_TAIL_BYTES: Final = 1024

Outcome = Literal["built", "prompt", "unsound"]


@dataclass(frozen=True, slots=True)
class BankView:
    """A bank as its turn left it.

    `ids` are committed up to the frontier, cut back to what the client received; `hidden` the
    spans of all reasoning that the stream parser saw in them. `waypoints` were inherited from the
    record that matched: their offsets are in this turn's prompt.
    """

    ids: Ids
    hidden: Spans = field(default_factory=Spans)
    waypoints: tuple[Waypoint, ...] = ()


@dataclass(frozen=True, slots=True)
class BuiltRecords:
    """The records of one turn. `prompt`: the reply is not usable (none, or reasoning still open);
    `unsound`: it is, but no render of it agrees with the bank."""

    records: tuple[Record, ...]
    outcome: Outcome


def build_records(renderer: Renderer, prompt: Prompt, reply: Reply, bank: BankView) -> BuiltRecords:
    """The records of a turn that has ended with `reply`, in a bank that ends with it."""
    if prompt.conversation is None:
        record = _plain_record(renderer, prompt, reply, bank)
        return (
            BuiltRecords((record,), "built")
            if record
            else _prompt_only(renderer, prompt, bank, "prompt")
        )
    if reply.reasoning_open or reply.control_inside or not reply.text.strip():
        return _prompt_only(renderer, prompt, bank, "prompt")
    if not renderer.divides:
        return _prompt_only(renderer, prompt, bank, "prompt")
    turn = _Turn(renderer, prompt, reply, bank)
    records: dict[bytes, Record] = {}
    for text in _renders(renderer, prompt.conversation, reply):
        record = turn.record(text)
        if record is not None and record.key not in records:
            if check_record(renderer, record, bank.ids, bank.hidden):
                records[record.key] = record
    if not records:
        return _prompt_only(renderer, prompt, bank, "unsound")
    return BuiltRecords(tuple(records.values()), "built")


def check_record(renderer: Renderer, record: Record, ids: Ids, hidden: Spans) -> bool:
    """Whether `record` tells the truth about a bank with `ids` and reasoning at `hidden`.

    Between two waypoints the key and the tokens must be the same visible text, and no waypoint
    may stand where a prompt that shares the key up to it could have a control token or marker
    across it. A record of another renderer is not judged, so it is not sound.
    """
    if record.renderer == renderer.digest:
        reader, escaper = renderer.reader, renderer.escaper
    elif record.renderer == IDENTITY_DIGEST:
        reader, escaper = renderer.codec.reader, renderer.codec.escaper
        hidden = Spans()  # plain text replays whole
    else:
        return False
    ends = record.kind is not RecordKind.PROMPT
    last = record.waypoints[-1] if record.waypoints else Waypoint(0, 0)
    if not record.key or (ends and last != Waypoint(len(record.key), len(ids))):
        return False
    bos = renderer.codec.bos(record.key)
    offset, position = 0, len(bos)
    if ids[:position].tolist() != bos:
        return False
    try:
        for waypoint in record.waypoints:
            if not (offset < waypoint.offset <= len(record.key)):
                return False
            if not (position < waypoint.position <= len(ids)):
                return False
            text = record.key[offset : waypoint.offset].decode()
            span = _within(hidden, position, waypoint.position)
            if not reader.agrees(text, ids[position : waypoint.position], span):
                return False
            before = record.key[max(0, waypoint.offset - _TAIL_BYTES) : waypoint.offset]
            if escaper.leaves_open(before.decode(errors="ignore")):
                return False
            offset, position = waypoint.offset, waypoint.position
        rest = record.key[offset:].decode()
    except UnicodeDecodeError:  # a waypoint inside a character
        return False
    return ends or reader.agrees(
        rest, ids[position:], _within(hidden, position, len(ids)), whole=False
    )


def _within(spans: Spans, start: int, end: int) -> Spans:
    """What lies in [start, end), counted from `start`."""
    return Spans(tuple((a - start, b - start) for a, b in spans.clip(start, end).pairs))


class _Turn:
    """One ended turn, searched for in several renders."""

    def __init__(self, renderer: Renderer, prompt: Prompt, reply: Reply, bank: BankView) -> None:
        self._renderer = renderer
        self._prompt = prompt
        self._text = prompt.text.decode()
        self._reply = reply
        self._bank = bank
        self._control_ends = renderer.reader.control_ends(self._text)
        self._said = "".join(reply.text.split())
        self._tails: dict[int, Visible] = {}

    def record(self, render: str) -> Record | None:
        """The record whose key is the longest start of `render` that the bank holds."""
        # Up to the last control token that both texts share nothing needs comparing; no block
        # of reasoning reaches across it.
        shared = common_prefix_bytes(self._prompt.text, data := render.encode())
        shared_characters = len(data[:shared].decode(errors="ignore"))
        index = bisect_right(self._control_ends, shared_characters)
        start = self._control_ends[index - 1] if index else 0
        if start not in self._tails:
            self._tails[start] = self._renderer.reader.visible(self._text[start:])
        asked = self._tails[start]
        seen = self._renderer.reader.visible(render[start:])
        held = asked.characters + self._said
        if not seen.characters.startswith(held):
            return None
        end = seen.end_of(len(held))
        if end is None:
            return None
        end += start
        end += shared_space(render[end:], trailing_space(self._reply.text))
        key = render[:end].encode()
        if self._prompt.text.startswith(key):
            return None
        num_bos = len(self._renderer.codec.bos(key))
        whole = self._renderer.reader.same_text(render[:end], self._bank.ids[num_bos:])
        return Record(
            kind=RecordKind.RAW if whole else RecordKind.VISIBLE,
            key=key,
            renderer=self._renderer.digest,
            waypoints=(
                *self._inherited(render, len(key), start, asked, seen),
                Waypoint(len(key), len(self._bank.ids)),
            ),
        )

    def _inherited(
        self, render: str, key_bytes: int, start: int, asked: Visible, seen: Visible
    ) -> Iterator[Waypoint]:
        """The inherited waypoints, at the same visible text of `render`.

        `asked` and `seen` are what is visible of the prompt and of `render` from `start` on.
        """
        start_bytes = len(self._text[:start].encode())
        offset = position = 0
        for waypoint in self._bank.waypoints:
            moved = waypoint.offset
            if waypoint.offset > start_bytes:
                there = len(self._prompt.text[start_bytes : waypoint.offset].decode())
                count = asked.count_before(there)
                asked_end, seen_end = asked.end_of(count), seen.end_of(count)
                if asked_end is None or seen_end is None:
                    continue
                blank = self._text[start + asked_end : start + there]
                end = start + seen_end
                end += shared_space(render[end:], blank)
                if self._renderer.escaper.leaves_open(render[:end][-_TAIL_BYTES:]):
                    continue
                moved = len(render[:end].encode())
            if offset < moved < key_bytes and position < waypoint.position < len(self._bank.ids):
                offset, position = moved, waypoint.position
                yield Waypoint(offset, position)


def _renders(renderer: Renderer, conversation: Conversation, reply: Reply) -> Iterator[str]:
    """The distinct renders in which a client may send the conversation on."""
    seen: set[str] = set()
    for messages in _next_messages(conversation, reply):
        try:
            text = renderer.render(replace(conversation, messages=messages))
        except InvalidRequest:
            continue  # the template has no such turn
        if text not in seen:
            seen.add(text)
            yield text


def _next_messages(conversation: Conversation, reply: Reply) -> Iterator[tuple[Message, ...]]:
    """The messages of the turns that may follow, the likeliest first."""
    sent = conversation.messages
    histories = [sent]
    if any(message.reasoning for message in sent):
        histories.append(tuple(replace(message, reasoning="") for message in sent))
    contents = dict.fromkeys((reply.text, reply.text.strip()))
    reasonings = dict.fromkeys((reply.reasoning, ""))
    for history in histories:
        for content in contents:
            for reasoning in reasonings:
                said = Message(
                    Role.ASSISTANT, content, reasoning=reasoning, tool_calls=reply.tool_calls
                )
                for turn in _turns_after(conversation, reply):
                    yield (*history, said, *turn)


def _turns_after(conversation: Conversation, reply: Reply) -> Iterator[tuple[Message, ...]]:
    yield (Message(Role.USER, _NEXT_TEXT),)
    if reply.tool_calls:
        yield tuple(
            Message(Role.TOOL, _NEXT_TEXT, tool_call_id=call.id, name=call.name)
            for call in reply.tool_calls
        )
    elif conversation.tools:
        # Calls that a client has read out of the text by itself.
        yield (Message(Role.TOOL, _NEXT_TEXT, name=conversation.tools[0].name),)


def _prompt_only(
    renderer: Renderer, prompt: Prompt, bank: BankView, outcome: Outcome
) -> BuiltRecords:
    """The prompt's text as key, without its open marker: that has no place in a later text."""
    key = prompt.text if prompt.open_at < 0 else prompt.text[: prompt.open_at]
    waypoints = tuple(w for w in bank.waypoints if w.offset <= len(key))
    if not key:
        return BuiltRecords((), outcome)
    record = Record(RecordKind.PROMPT, key, prompt.renderer, waypoints)
    sound = check_record(renderer, record, bank.ids, bank.hidden)
    return BuiltRecords((record,) if sound else (), outcome)


def _plain_record(
    renderer: Renderer, prompt: Prompt, reply: Reply, bank: BankView
) -> Record | None:
    """The record of a prompt that is text or ids: all of the bank replays."""
    codec = renderer.codec
    if reply.control_inside or not len(bank.ids):
        return None
    if prompt.text:
        if not reply.text:
            return None
        key = prompt.text.decode()
        said = codec.escaper.escape_inside(reply.text)
        # A control token spelled half by the prompt and half by the reply is text.
        if any(start < len(key) < end for start, end in codec.control_spans(key + said)):
            said = ESCAPE + said
        key += said
    else:
        ids = bank.ids[len(codec.bos(b"")) :].tolist()
        if not _is_text(codec.tokenizer, ids):
            return None
        key = codec.tokenizer.bank_text(ids, codec.escaper.escape_inside)
    data = key.encode()
    record = Record(
        kind=RecordKind.RAW,
        key=data,
        renderer=prompt.renderer,
        waypoints=(
            *(w for w in bank.waypoints if w.offset < len(data)),
            Waypoint(len(data), len(bank.ids)),
        ),
    )
    return record if check_record(renderer, record, bank.ids, bank.hidden) else None


def _is_text(tokenizer: Tokenizer, ids: list[int]) -> bool:
    """Whether `ids` stand for whole characters: else no text stands for them alone."""
    try:
        b"".join(map(tokenizer.token_bytes, ids)).decode()
    except UnicodeDecodeError:
        return False
    return True
