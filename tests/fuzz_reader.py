"""`make fuzz`: no bytes make the reader of bank files do anything but read them or refuse them.

    python tests/fuzz_reader.py [--inputs N] [--processes N] [--seed N]

Half of the inputs are valid files damaged as disks and copies damage them, the other half files
rebuilt around one lie with all checksums right: a field of the header, the section table, a field
of a record, other ids under their own bank id, a whole other form of the file. Each is opened and
read to its end in memory. It must end in BankCorrupt of a known kind, or in a bank that keeps every
rule; a damaged file that is read must be read as if nothing had happened. What one input asks for
of memory and time is bounded. The first inputs run under coverage and tracemalloc. Prints a table
and fails when a rule is broken or less than 95 % of the reader's branches were taken.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import random
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coverage

ROOT = Path(__file__).parents[1]
READER = ("format", "reader", "content")
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
if __name__ == "__main__":  # what runs when the modules are imported counts, too
    _watch = coverage.Coverage(
        branch=True, include=[f"*/ds4grpc/store/{name}.py" for name in READER], data_file=None
    )
    _watch.start()

import numpy as np  # noqa: E402
from bankkit import FINGERPRINT, PLAIN, RATIO, SPACE, TAILED, WINDOWED, MemorySource, Turns  # noqa: E402

from ds4grpc.bank import PersistReason, bank_id  # noqa: E402
from ds4grpc.errors import BankCorrupt  # noqa: E402
from ds4grpc.layout import Rows, Spans, StateLayout  # noqa: E402
from ds4grpc.store.content import FileContent, ToolReplay, encode_tools, fit_records  # noqa: E402
from ds4grpc.store.files import Files  # noqa: E402
from ds4grpc.store.format import (  # noqa: E402
    PREAMBLE,
    SECTION_ALIGN_BYTES,
    Header,
    StateForm,
    aligned,
    block_bytes,
    checksum,
    data_start,
    encode_preamble,
    file_name,
)
from ds4grpc.store.pace import Pace  # noqa: E402
from ds4grpc.store.reader import BankFile  # noqa: E402
from ds4grpc.store.writer import draft_file, write_file  # noqa: E402

if TYPE_CHECKING:
    pass

KINDS = {"truncated", "checksum", "format", "foreign", "identity", "record", "io"}
NUM_WATCHED = 20_000  # inputs under coverage and tracemalloc: both are slow
MAX_SECONDS = 2.0  # of one input; files are tens of kilobytes
BASE_MEMORY_BYTES = 1 << 20
MEMORY_FACTOR = 40  # of an input's bytes: parsed JSON is that much larger
BRANCH_LIMIT = 95.0
# Tails over a block are put together from several; its files are larger, so there is one.
HEAVY = StateLayout("heavy/1", (Rows("kv", 8),), tail_bytes=(1 << 20) + 4321)
FOLDER = "/banks/ab"


class MemoryFiles(Files):
    """One file in memory, and what was asked of it. It can fail as a disk does."""

    def __init__(self) -> None:
        self.data = b""
        self.num_open = 0
        self.asked_bytes = 0
        self.fails_at = -1  # reads until one fails; -1: none does
        self.opens = True
        self.has_size = True

    def open_read(self, path: str) -> int:
        if not self.opens:
            raise PermissionError(13, "no")
        self.num_open += 1
        return 7

    def close(self, descriptor: int) -> None:
        self.num_open -= 1

    def size_bytes(self, descriptor: int) -> int:
        if not self.has_size:
            raise OSError(5, "no")
        return len(self.data)

    def read_into(self, descriptor: int, view: memoryview, offset: int, path: str) -> int:
        self.asked_bytes += len(view)
        if self.fails_at == 0:
            raise OSError(5, "no")
        self.fails_at -= 1
        part = self.data[offset : offset + len(view)]
        view[: len(part)] = part
        return len(part)


@dataclass(frozen=True, slots=True)
class Sample:
    """A valid file, taken apart."""

    name: str
    form: StateForm
    data: bytes
    document: dict[str, Any]
    parts: dict[str, bytes]  # of each section
    truth: tuple[Any, ...]


@dataclass(slots=True)
class Input:
    """What is read: bytes, under a name, by a model of a form."""

    name: str
    form: StateForm
    data: bytes
    same_as: Sample | None = None  # it may be read only as this one


@dataclass(slots=True)
class Tally:
    """What came of the inputs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    num_inputs: int = 0
    seconds: float = 0.0
    max_seconds: float = 0.0
    peak_ratio: float = 0.0  # bytes asked for, of an input's
    peak_bytes: int = 0  # seen by tracemalloc

    def add(self, other: Tally) -> None:
        self.outcomes += other.outcomes
        self.num_inputs += other.num_inputs
        self.seconds = max(self.seconds, other.seconds)
        self.max_seconds = max(self.max_seconds, other.max_seconds)
        self.peak_ratio = max(self.peak_ratio, other.peak_ratio)
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)


@cache
def samples() -> tuple[Sample, ...]:
    """Valid files of several layouts, roots and deltas."""
    made: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in (PLAIN, RATIO, WINDOWED, TAILED, HEAVY):
            bases = (0, 16) if layout is not HEAVY else (0,)
            made += [_sample(Path(folder), layout, base) for base in bases]
    return tuple(made)


def _sample(folder: Path, layout: StateLayout, base: int) -> Sample:
    turns = Turns(layout).grow(1, 20).grow(2, 9)
    if layout is not HEAVY:
        turns = turns.grow(3, 11)
    content = turns.content
    form = StateForm(FINGERPRINT, layout)
    header = Header(
        bank_id=bank_id(SPACE, FINGERPRINT, turns.ids),
        parent_id="ab" * 16 if base else "",
        base=base,
        frontier=turns.frontier,
        head=8,
        fingerprint=FINGERPRINT,
        namespace=SPACE,
        reason=PersistReason.REST,
        created_at_ms=1_700_000_000_123,
        ttl_seconds=60.5 if base else None,
        layout_id=layout.layout_id,
        windows=content.held,
        tails=content.tails,
    )
    records = fit_records(turns.records)
    tools = (ToolReplay("call_1", b'{"a": 1}'), ToolReplay("call_2", b""))
    draft = draft_file(header, FileContent(turns.ids, content.hidden, records, tools), form)
    draft.check()
    name = file_name(header.bank_id, base)
    path = folder / name
    write_file(Files(), str(path), draft, MemorySource(layout, turns.ids), Pace())
    data = path.read_bytes()
    path.unlink()
    length = PREAMBLE.unpack(data[: PREAMBLE.size])[3]
    document = json.loads(data[PREAMBLE.size : PREAMBLE.size + length])
    start = data_start(length)
    parts = {
        section["name"]: data[start + section["offset"] :][: section["length"]]
        for section in document["sections"]
    }
    files = MemoryFiles()
    files.data = data
    truth = _read(files, name, form)
    assert assemble(document, parts, form) == data
    return Sample(name, form, data, document, parts, truth)


def _read(files: MemoryFiles, name: str, form: StateForm) -> tuple[Any, ...]:
    """Opens and reads everything, as lookups, loads and verifications do."""
    with BankFile.open(files, f"{FOLDER}/{name}", form) as file:
        content = file.read_content()
        header = file.header
        assert len(content.ids) == header.frontier
        ends = [end for _, end in content.hidden.pairs]
        assert all(end <= header.frontier for end in ends)
        for record in content.records:
            record.key.decode()
            assert all(point.position <= header.frontier for point in record.waypoints)
            assert all(point.offset <= len(record.key) for point in record.waypoints)
        blocks = []
        for stop in (header.frontier // 2, header.frontier):
            blocks = list(file.row_blocks(stop))
            for block in blocks:
                rows = form.layout.rows[block.plane]
                whole = block.is_whole(rows.row_bytes)
                assert sum(p.stop_row - p.start_row for p in block.pieces) or not whole
                assert all(0 <= p.start_row < p.stop_row for p in block.pieces)
                assert all(p.stop_row <= rows.num_rows(stop) for p in block.pieces)
        data = []
        for block in blocks:
            view = memoryview(bytearray(block.num_bytes))
            file.read_block(block.section, block.index, view)
            data.append(bytes(view))
        tails = list(file.read_tails(header.frontier)) if form.layout.tail_bytes else []
        list(file.read_tails(header.frontier // 2)) if form.layout.tail_bytes else None
        file.verify()
        return header, content.ids.tobytes(), content.hidden, content.records, data, tails


def _read_alone(files: MemoryFiles, name: str) -> None:
    """Reads what can be read without the model, as exports are checked and files offline."""
    with BankFile.open_any(files, f"{FOLDER}/{name}") as file:
        assert len(file.read_ids()) == file.header.frontier
        file.verify()
        file.check_padding()


def assemble(document: dict[str, Any], parts: dict[str, bytes], form: StateForm) -> bytes:
    """A file of a header and sections, all of its arithmetic and checksums right."""
    units = {f"rows/{rows.name}": rows.row_bytes for rows in form.layout.rows}
    units |= {"ids": 4, "tail": max(1, form.layout.tail_bytes)}
    table, body, offset = [], [], 0
    for name, part in parts.items():
        size = block_bytes(units.get(name, 1))
        values = [checksum(part[at : at + size]) for at in range(0, len(part), size)]
        table.append(
            {
                "name": name,
                "encoding": "raw",
                "offset": offset,
                "length": len(part),
                "block_bytes": size,
                "checksums": "".join(f"{value:016x}" for value in values),
            }
        )
        offset = aligned(offset + len(part))
        body.append(part.ljust(aligned(len(part)), b"\0"))
    return seal({**document, "sections": table}, b"".join(body))


def seal(document: Any, body: bytes) -> bytes:
    return seal_text(json.dumps(document, separators=(",", ":")).encode(), body)


def seal_text(header: bytes, body: bytes) -> bytes:
    start = (encode_preamble(header) + header).ljust(data_start(len(header)), b"\0")
    return start + body


# Damage, as it happens


def flip(draw: random.Random, sample: Sample) -> Input:
    data = bytearray(sample.data)
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        data[_place(draw, sample)] ^= 1 << draw.randrange(8)
    return Input(sample.name, sample.form, bytes(data), sample)


def _place(draw: random.Random, sample: Sample) -> int:
    """A byte of the preamble, the header, the records, or anywhere."""
    length = PREAMBLE.unpack(sample.data[: PREAMBLE.size])[3]
    ends = (PREAMBLE.size, PREAMBLE.size + length, data_start(length) + 8192, len(sample.data))
    return draw.randrange(min(draw.choice(ends), len(sample.data)))


def cut(draw: random.Random, sample: Sample) -> Input:
    edges = [0, PREAMBLE.size, SECTION_ALIGN_BYTES, len(sample.data), draw.randrange(40_000)]
    keep = max(0, draw.choice(edges) - draw.choice((0, 1, 1, 4096)))
    return Input(sample.name, sample.form, sample.data[:keep], sample)


def lengthen(draw: random.Random, sample: Sample) -> Input:
    more = draw.choice((b"\0", b"\0" * 4096, draw.randbytes(100)))
    return Input(sample.name, sample.form, sample.data + more, sample)


def blank(draw: random.Random, sample: Sample) -> Input:
    """Pages that never reached the disk."""
    data = bytearray(sample.data)
    at = draw.randrange(0, len(data), 512)
    size = min(draw.choice((512, 4096)), len(data) - at)
    data[at : at + size] = draw.choice((bytes(size), draw.randbytes(size)))
    return Input(sample.name, sample.form, bytes(data), sample)


def splice(draw: random.Random, sample: Sample) -> Input:
    """Part of another file in its place."""
    other = draw.choice(samples())
    at = draw.randrange(0, len(sample.data), 512)
    data = sample.data[:at] + other.data[at : at + draw.choice((512, 4096, 1 << 20))]
    return Input(sample.name, sample.form, data + sample.data[len(data) :], sample)


def swap(draw: random.Random, sample: Sample) -> Input:
    """A whole other file under its name, or read by another model."""
    other = draw.choice(samples())
    form = draw.choice((sample.form, other.form, StateForm(b"x" * 32, sample.form.layout)))
    return Input(sample.name, form, other.data, None)


def noise(draw: random.Random, sample: Sample) -> Input:
    start = draw.choice((b"", b"ds4gbank", sample.data[:16], sample.data[:32]))
    data = start + draw.randbytes(draw.choice((0, 1, 100, 5000)))
    return Input(sample.name, sample.form, data, None)


def misname(draw: random.Random, sample: Sample) -> Input:
    names = (f"{'0' * 32}.0.bank", sample.name + ".tmp", f"{sample.name[:32]}.1.bank", "x", "")
    return Input(draw.choice(names), sample.form, sample.data, None)


# Lies, with every checksum right

NUMBERS = (-1, 0, 1, 2, 15, 16, 17, 39, 40, 41, 255, 4095, 4096, 1 << 20, 1 << 24, 1 << 31)
HUGE = ((1 << 32) - 1, 1 << 32, 1 << 53, 1 << 62, 1 << 64, 10**300)


def _value(draw: random.Random, old: Any) -> Any:
    """Something else for a field."""
    kind = draw.randrange(9)
    if kind == 0 and isinstance(old, int | float) and not isinstance(old, bool):
        return old + draw.choice((-1, 1, 4, -4, 0.5))
    if kind == 1 and isinstance(old, str) and old:
        at = draw.randrange(len(old))
        return old[:at] + draw.choice(("", "0", "f", "\0", "é", "\ud800", "../")) + old[at + 1 :]
    if kind == 2 and isinstance(old, list) and old:
        changed = copy.deepcopy(old)
        at = draw.randrange(len(changed))
        changed[at] = _value(draw, changed[at])
        return changed
    if kind == 3 and isinstance(old, list):
        return draw.choice((old[:-1], old + old[-1:], old[::-1], [*old, [1, 2]], [*old, 40]))
    if kind == 4:
        return draw.choice((None, True, False, [], {}, "", [[]], {"a": 1}, 1e300, 0.0, -0.5))
    if kind == 5:
        return draw.choice(HUGE)
    if kind == 6:
        return draw.choice(("0" * 32, "0" * 64, "a" * 2000, "/etc/passwd", "pickle", "é", "turn"))
    return draw.choice(NUMBERS)


def lie_in_header(draw: random.Random, sample: Sample) -> Input:
    document = copy.deepcopy(sample.document)
    target = document
    if draw.random() < 0.4:
        target = draw.choice(document["sections"])
    for _ in range(draw.choice((1, 1, 1, 2))):
        name = draw.choice(sorted(target))
        if draw.random() < 0.08:
            del target[name]
            break
        target[name] = _value(draw, target[name])
    if draw.random() < 0.05:
        target["more"] = draw.choice(NUMBERS)
    return Input(sample.name, sample.form, seal(document, _body(sample)))


def _body(sample: Sample) -> bytes:
    return sample.data[data_start(PREAMBLE.unpack(sample.data[: PREAMBLE.size])[3]) :]


TOKENS = (
    b"[",
    b"]",
    b"{",
    b"}",
    b",",
    b":",
    b'"',
    b"null",
    b"NaN",
    b"1e999",
    b"-",
    b"\xff",
    b"\\u",
)


def lie_in_json(draw: random.Random, sample: Sample) -> Input:
    """Text that hardly is JSON."""
    length = PREAMBLE.unpack(sample.data[: PREAMBLE.size])[3]
    text = bytearray(sample.data[PREAMBLE.size : PREAMBLE.size + length])
    for _ in range(draw.choice((1, 1, 3))):
        at = draw.randrange(len(text))
        text[at : at + draw.choice((0, 1, 8))] = draw.choice(TOKENS) * draw.choice((1, 1, 2, 3000))
    return Input(sample.name, sample.form, seal_text(bytes(text), _body(sample)))


def lie_in_preamble(draw: random.Random, sample: Sample) -> Input:
    magic, version, zero, length, value = PREAMBLE.unpack(sample.data[: PREAMBLE.size])
    fields = [magic, version, zero, length, value]
    numbers = [n for n in (*NUMBERS, *HUGE) if 0 <= n < 1 << 64]
    at = draw.randrange(1, 5)
    fields[at] = draw.choice(numbers) % (1 << (32 if at < 3 else 64))
    data = PREAMBLE.pack(*fields) + sample.data[PREAMBLE.size :]
    return Input(sample.name, sample.form, data)


def lie_in_table(draw: random.Random, sample: Sample) -> Input:
    """Sections that are there, in another order, twice, longer or shorter; arithmetic right."""
    items = list(sample.parts.items())
    at = draw.randrange(len(items))
    kind = draw.randrange(5)
    if kind == 0:
        draw.shuffle(items)
    elif kind == 1:
        del items[at]
    elif kind == 2:
        items[at] = (draw.choice(("rows/../x", "ids", "é", "", items[at - 1][0])), items[at][1])
    elif kind == 3:
        items[at] = (items[at][0], items[at][1][: -draw.choice((1, 4, 16, 96))])
    else:
        items[at] = (items[at][0], items[at][1] + draw.randbytes(draw.choice((1, 4, 16, 96))))
    return Input(sample.name, sample.form, assemble(sample.document, dict(items), sample.form))


def lie_in_records(draw: random.Random, sample: Sample) -> Input:
    """Another value in one u32 of the records or of the tools, or other bytes."""
    parts = dict(sample.parts)
    name = draw.choice(("records", "records", "records", "toolmap"))
    parts[name] = _bent(draw, parts[name])
    return Input(sample.name, sample.form, assemble(sample.document, parts, sample.form))


def _bent(draw: random.Random, data: bytes) -> bytes:
    bent = bytearray(data)
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.choice((0, 4, draw.randrange(len(bent)))) if bent else 0
        kind = draw.randrange(5)
        if kind == 0:
            numbers = [n for n in (*NUMBERS, *HUGE) if 0 <= n < 1 << 32]
            bent[at : at + 4] = struct.pack("<I", draw.choice(numbers))
        elif kind == 1:
            bent[at : at + 1] = draw.randbytes(1)
        elif kind == 2:
            bent[at:at] = draw.randbytes(draw.choice((1, 4, 8)))
        elif kind == 3:
            del bent[at : at + draw.choice((1, 4, 8))]
        else:
            del bent[at:]
    return bytes(bent)


def records_by_field(draw: random.Random, sample: Sample) -> Input:
    """Records made field by field, each mostly possible."""
    frontier = sample.document["frontier"]

    def some(good: int) -> int:
        return good if draw.random() < 0.93 else draw.choice(NUMBERS[1:]) % (1 << 32)

    spans = sorted(draw.sample(range(frontier + 1), 2 * draw.randrange(4)))
    count = draw.randrange(4)
    out = [struct.pack("<II", some(len(spans) // 2), some(count))]
    out += [struct.pack("<I", some(at)) for at in spans]
    before = b""
    for _ in range(count):
        shared = some(draw.randrange(len(before) + 1))
        own = draw.choice((b"", "né".encode(), b"text " * 5, b"\xc3", draw.randbytes(3)))
        key = before[:shared] + own
        points = draw.randrange(4)
        head = (some(draw.randrange(3)) % 256, b"r" * 16, shared, some(len(own)))
        out.append(struct.pack("<B16sIIII", *head, some(max(0, len(key) - 1)), some(points)))
        out.append(own)
        offsets = sorted(draw.randrange(len(key) + 1) for _ in range(points))
        places = sorted(draw.randrange(frontier + 1) for _ in range(points))
        for offset, place in zip(offsets, places, strict=True):
            out.append(struct.pack("<II", some(offset), some(place)))
        before = key
    calls = [ToolReplay("c" * draw.choice((1, 256, 257)), b"x")] * draw.randrange(3)
    parts = {**sample.parts, "records": b"".join(out), "toolmap": encode_tools(calls)}
    if draw.random() < 0.1:
        parts["toolmap"] = struct.pack("<III", draw.choice((1, 1 << 20)), 1, 0) + b"\xff"
    return Input(sample.name, sample.form, assemble(sample.document, parts, sample.form))


def lie_in_ids(draw: random.Random, sample: Sample) -> Input:
    """Other ids, half of the time under the bank id that they make, and other rows."""
    name, document, parts = sample.name, sample.document, dict(sample.parts)
    ids = np.frombuffer(parts["ids"], "<u4").copy()
    ids[draw.randrange(len(ids))] = draw.choice((0, 7, 49_999, (1 << 32) - 1))
    parts["ids"] = ids.tobytes()
    if draw.random() < 0.5:
        new = bank_id(SPACE, FINGERPRINT, ids)
        document = {**document, "bank_id": new}
        name = file_name(new, document["base"])
    rows = draw.choice([each for each in parts if each not in ("ids", "records", "toolmap")])
    parts[rows] = draw.randbytes(len(parts[rows])) if len(parts[rows]) < 1 << 16 else parts[rows]
    return Input(name, sample.form, assemble(document, parts, sample.form))


def another_form(draw: random.Random, sample: Sample) -> Input:
    """A file of another frontier, base, windows and tails, its sections as long as these say."""
    layout = sample.form.layout
    frontier = draw.randrange(1, 60)
    base = draw.choice((0, 0, draw.randrange(frontier + 1)))
    base -= base % draw.choice((layout.alignment, layout.alignment, 1))
    edges = sorted(draw.sample(range(frontier + 2), min(frontier, 2 * draw.randrange(4))))
    windows = Spans(tuple(zip(edges[::2], edges[1::2], strict=False)) if layout.window else ())
    held = draw.randrange(4) if layout.tail_bytes and sample.form.layout is not HEAVY else 0
    tails = sorted(draw.sample(range(frontier + 1), min(frontier, held)))
    ids = np.arange(frontier, dtype="<u4")
    name = bank_id(SPACE, FINGERPRINT, ids)
    parent = draw.choice(("ab" * 16, "ab" * 16, name)) if base else ""
    document = {
        **sample.document,
        **{"bank_id": name, "parent_id": parent, "base": base, "frontier": frontier},
        "head": draw.choice((0, 0, frontier, frontier + 1)),
        **{"windows": [list(pair) for pair in windows.pairs], "tails": tails},
    }
    parts = {"ids": ids.tobytes(), "records": bytes(8), "toolmap": bytes(4)}
    for rows in layout.rows:
        spans = windows.pairs if rows.window else ((base, frontier),)
        count = sum(max(0, rows.num_rows(end) - rows.num_rows(start)) for start, end in spans)
        parts[f"rows/{rows.name}"] = draw.randbytes(count * rows.row_bytes)
    if layout.tail_bytes:
        parts["tail"] = draw.randbytes(len(tails) * layout.tail_bytes)
    return Input(file_name(name, base), sample.form, assemble(document, parts, sample.form))


DAMAGE = (flip, flip, flip, cut, lengthen, blank, splice, swap, noise, misname)
LIES = (
    *(lie_in_header, lie_in_header, lie_in_json, lie_in_preamble, lie_in_table),
    *(lie_in_records, lie_in_records, records_by_field, lie_in_ids, another_form),
)


class Fuzzer:
    """Makes inputs, has them read, and judges."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.files = MemoryFiles()
        self.tally = Tally()
        light = [sample for sample in samples() if sample.form.layout is not HEAVY]
        self.light, self.heavy = light, samples()[-1]

    def one(self, *, watched: bool = False) -> None:
        draw = self.draw
        sample = self.heavy if draw.random() < 0.0005 else draw.choice(self.light)
        make: Callable[[random.Random, Sample], Input] = draw.choice(
            DAMAGE if self.tally.num_inputs % 2 else LIES
        )
        given = make(draw, sample)
        files = self.files
        files.data, files.asked_bytes = given.data, 0
        chance = draw.random()
        files.opens, files.has_size = chance > 0.0005, chance < 0.9995
        files.fails_at = draw.randrange(12) if 0.4 < chance < 0.405 else -1
        if watched:
            tracemalloc.start()
        began = time.thread_time()
        try:
            if draw.random() < 0.25:
                with contextlib.suppress(BankCorrupt):
                    _read_alone(files, given.name)
                files.asked_bytes = 0
            truth = _read(files, given.name, given.form)
            if given.same_as is not None:
                assert truth == given.same_as.truth, "damage was taken for a bank"
            outcome = "read"
        except BankCorrupt as error:
            assert error.kind in KINDS, error.kind
            outcome = error.kind
        except BaseException:
            _keep(given, make.__name__)
            raise
        seconds = time.thread_time() - began
        size = len(given.data)
        if watched:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            self.tally.peak_bytes = max(self.tally.peak_bytes, peak)
            assert peak <= BASE_MEMORY_BYTES + MEMORY_FACTOR * size, f"{peak} bytes for {size}"
        elif seconds > MAX_SECONDS:
            _keep(given, make.__name__)
            raise AssertionError(f"{make.__name__}: {seconds:.1f} s for {size} bytes")
        assert files.num_open == 0, "a file stays open"
        # Each section is read three times at most: as content or rows, and to be verified.
        assert files.asked_bytes <= 4 * size + 4096, f"{files.asked_bytes} asked of {size} bytes"
        tally = self.tally
        tally.outcomes[outcome] += 1
        tally.num_inputs += 1
        tally.max_seconds = max(tally.max_seconds, seconds)
        tally.peak_ratio = max(tally.peak_ratio, files.asked_bytes / max(size, 4096))


def _keep(given: Input, what: str) -> None:
    """Leaves a bad input where it can be looked at."""
    path = Path(tempfile.gettempdir()) / f"ds4grpc-fuzz-{os.getpid()}-{given.name or 'noname'}"
    path.write_bytes(given.data)
    sys.stderr.write(f"bad input of {what}, {given.form.layout.layout_id}: {path}\n")


def fuzz(num_inputs: int, seed: int) -> Tally:
    fuzzer = Fuzzer(seed)
    began = time.monotonic()
    for _ in range(num_inputs):
        fuzzer.one()
    fuzzer.tally.seconds = time.monotonic() - began
    return fuzzer.tally


def watched(num_inputs: int, seed: int) -> Tally:
    """The first inputs, each with its peak of memory."""
    fuzzer = Fuzzer(seed)
    fuzzer.one()  # what is made once does not count
    for _ in range(num_inputs - 1):
        fuzzer.one(watched=True)
    return fuzzer.tally


def covered(watch: coverage.Coverage) -> tuple[float, list[str]]:
    """Percent of the reader's branches and lines that were taken, and a line for each module."""
    lines, taken, total = [], 0, 0
    for name in READER:
        analysis = watch._analyze(str(ROOT / "ds4grpc" / "store" / f"{name}.py"))
        numbers = analysis.numbers
        num, of = numbers.ratio_covered
        taken, total = taken + num, total + of
        branches = numbers.n_branches - numbers.n_missing_branches
        lines.append(
            f"{name + '.py':12} {100 * num / of:6.1f} % | branches {branches} of "
            f"{numbers.n_branches} | lines missed: {analysis.missing_formatted() or 'none'}"
        )
    return 100 * taken / total, lines


def main(arguments: Sequence[str], watch: coverage.Coverage) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args(arguments)
    num_watched = min(NUM_WATCHED, options.inputs)
    tally = watched(num_watched, options.seed)
    watch.stop()
    percent, lines = covered(watch)
    shares = [(options.inputs - num_watched) // options.processes] * options.processes
    with ProcessPoolExecutor(options.processes) as pool:
        seeds = range(options.seed + 1, options.seed + 1 + options.processes)
        for part in pool.map(partial(fuzz), shares, seeds):
            tally.add(part)
    kinds = " ".join(f"{kind} {count}" for kind, count in tally.outcomes.most_common())
    rate = f", {sum(shares) / tally.seconds:.0f} a second" if tally.seconds else ""
    told = [
        f"seed {options.seed} | inputs {tally.num_inputs}{rate} | half damaged, half lying",
        f"outcomes {kinds}",
        f"longest {1000 * tally.max_seconds:.0f} ms",
        f"most asked for {tally.peak_ratio:.1f} x the file, {tally.peak_bytes / 2**20:.1f} MB",
        *lines,
        f"reader covered, branches included: {percent:.1f} % (at least {BRANCH_LIMIT})",
    ]
    sys.stdout.write("\n".join(told) + "\n")
    return 0 if percent >= BRANCH_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _watch))
