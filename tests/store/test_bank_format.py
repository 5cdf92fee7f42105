"""The bank file: what is written is read, and nothing else is believed."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bankkit import FINGERPRINT, LAYOUTS, PLAIN, RENDERER, TAILED, WINDOWED, MemorySource, Turns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4grpc.bank import PersistReason, Record, RecordKind, Waypoint, bank_id
from ds4grpc.errors import BankCorrupt
from ds4grpc.layout import Rows, Spans, StateLayout
from ds4grpc.store import content as sections
from ds4grpc.store.content import (
    FileContent,
    ToolReplay,
    decode_records,
    decode_tools,
    encode_records,
    encode_tools,
    fit_records,
)
from ds4grpc.store.files import Files
from ds4grpc.store.format import (
    MAX_BLOCK_BYTES,
    PREAMBLE,
    Header,
    StateForm,
    block_bytes,
    checksum,
    decode_header,
    encode_preamble,
    file_name,
    parse_file_name,
)
from ds4grpc.store.pace import Pace
from ds4grpc.store.reader import BankFile
from ds4grpc.store.writer import draft_file, write_file

TOOLS = (ToolReplay("call_1", b'{"a": 1}'), ToolReplay("call_2", b""))


def write_bank(folder: Path, layout: StateLayout, base: int = 0) -> tuple[Path, Turns]:
    """A file of three turns, under its own name."""
    turns = Turns(layout).grow(1, 50).grow(2, 37).grow(3, 29)
    content = turns.content
    name = bank_id(turns.space, FINGERPRINT, turns.ids)
    header = Header(
        bank_id=name,
        parent_id="ab" * 16 if base else "",
        base=base,
        frontier=turns.frontier,
        head=0,
        fingerprint=FINGERPRINT,
        namespace=turns.space,
        reason=PersistReason.REST,
        created_at_ms=1_700_000_000_123,
        ttl_seconds=60.5,
        layout_id=layout.layout_id,
        windows=content.held,
        tails=content.tails,
    )
    form = StateForm(FINGERPRINT, layout)
    file_content = FileContent(turns.ids, content.hidden, turns.records, TOOLS)
    draft = draft_file(header, file_content, form)
    path = folder / file_name(name, base)
    write_file(Files(), str(path), draft, MemorySource(layout, turns.ids), Pace())
    assert path.stat().st_size == draft.size_bytes
    return path, turns


def open_bank(path: Path, layout: StateLayout = PLAIN) -> BankFile:
    return BankFile.open(Files(), str(path), StateForm(FINGERPRINT, layout))


def read_everything(path: Path, layout: StateLayout = PLAIN) -> None:
    with open_bank(path, layout) as file:
        file.verify()


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the header as an attacker would: checksum and length are right afterwards."""
    data = bytearray(path.read_bytes())
    _, _, _, length, _ = PREAMBLE.unpack(data[: PREAMBLE.size])
    document = json.loads(data[PREAMBLE.size : PREAMBLE.size + length])
    change(document)
    header = json.dumps(document, separators=(",", ":")).encode().ljust(length)
    start = PREAMBLE.size + length
    assert -(-(PREAMBLE.size + len(header)) // 4096) == -(-start // 4096)
    data[: PREAMBLE.size + len(header)] = encode_preamble(header) + header
    path.write_bytes(data)


each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)


@each_layout
@pytest.mark.parametrize("base", [0, 40])
def test_file_content_comes_back(tmp_path: Path, layout: StateLayout, base: int) -> None:
    path, turns = write_bank(tmp_path, layout, base)
    with open_bank(path, layout) as file:
        read = file.read_content()
        assert np.array_equal(read.ids, turns.ids)
        assert (read.hidden, read.records, read.tools) == (
            turns.content.hidden,
            turns.records,
            TOOLS,
        )
        header = file.header
        assert (header.base, header.frontier) == (base, turns.frontier)
        assert (header.windows, header.tails) == (turns.content.held, turns.content.tails)
        assert (header.reason, header.ttl_seconds) == (PersistReason.REST, 60.5)
        total = sum(section.length for section in header.sections)
        assert file.verify() == total


def test_file_is_private_and_aligned(tmp_path: Path) -> None:
    path, _ = write_bank(tmp_path, PLAIN)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size % 4096 == 0
    with open_bank(path) as file:
        assert all(section.offset % 4096 == 0 for section in file.header.sections)


@each_layout
def test_file_bit_flip_anywhere_is_found(tmp_path: Path, layout: StateLayout) -> None:
    path, _ = write_bank(tmp_path, layout)
    good = path.read_bytes()
    with open_bank(path, layout) as file:
        start = len(good) - file.header.data_bytes
        header_end = PREAMBLE.size + PREAMBLE.unpack(good[: PREAMBLE.size])[3]
        places = [*range(0, PREAMBLE.size, 3), *range(PREAMBLE.size, header_end, 97)]
        for section in file.header.sections:
            for index in range(section.num_blocks):
                first, last = section.block(index)
                places += [start + section.offset + at for at in (first, (first + last) // 2)]
                places.append(start + section.offset + last - 1)
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        path.write_bytes(bad)
        with pytest.raises(BankCorrupt):
            read_everything(path, layout)


@pytest.mark.parametrize("keep", [0, 1, 31, 32, 100, 4095, 4096, 8191, -4096, -1])
def test_file_truncated_is_refused(tmp_path: Path, keep: int) -> None:
    path, _ = write_bank(tmp_path, PLAIN)
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    with pytest.raises(BankCorrupt):
        open_bank(path)


def test_file_with_more_bytes_is_refused(tmp_path: Path) -> None:
    path, _ = write_bank(tmp_path, PLAIN)
    os.truncate(path, path.stat().st_size + 4096)
    with pytest.raises(BankCorrupt, match="sections take"):
        open_bank(path)


def test_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path, _ = write_bank(tmp_path, PLAIN)
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", 2)
    path.write_bytes(data)
    with pytest.raises(BankCorrupt, match="version 2") as caught:
        open_bank(path)
    assert caught.value.kind == "format"


def test_file_of_another_model_is_foreign(tmp_path: Path) -> None:
    path, _ = write_bank(tmp_path, PLAIN)
    other = StateLayout("plain/2", PLAIN.rows)
    for form in (StateForm(b"x" * 32, PLAIN), StateForm(FINGERPRINT, other)):
        with pytest.raises(BankCorrupt) as caught:
            BankFile.open(Files(), str(path), form)
        assert caught.value.kind == "foreign"


def test_file_under_another_name_is_refused(tmp_path: Path) -> None:
    path, _ = write_bank(tmp_path, PLAIN)
    swapped = path.rename(tmp_path / file_name("0" * 32, 0))
    with pytest.raises(BankCorrupt) as caught:
        open_bank(swapped)
    assert caught.value.kind == "identity"


def test_file_with_other_ids_is_refused(tmp_path: Path) -> None:
    path, _ = write_bank(tmp_path, PLAIN)
    with open_bank(path) as file:
        section = file.header.section("ids")
        start = path.stat().st_size - file.header.data_bytes
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    value = checksum(bytes(data[start : start + section.length]))
    path.write_bytes(data)
    rewrite_header(path, lambda header: header["sections"][0].update(checksums=f"{value:016x}"))
    with open_bank(path) as file, pytest.raises(BankCorrupt) as caught:
        file.read_content()
    assert caught.value.kind == "identity"


def test_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    path, _ = write_bank(tmp_path, PLAIN)
    real = path.rename(tmp_path / "elsewhere")
    path.symlink_to(real)
    with pytest.raises(BankCorrupt) as caught:
        open_bank(path)
    assert caught.value.kind == "io"


def test_file_in_a_linked_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    path, _ = write_bank(tmp_path / "real", PLAIN)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(BankCorrupt):
        open_bank(tmp_path / "link" / path.name)


def test_file_that_is_a_pipe_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / file_name("0" * 32, 0)
    os.mkfifo(path)
    with pytest.raises(BankCorrupt):
        open_bank(path)


def _set(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header.update(values)


def _section(number: int, **values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["sections"][number].update(values)


@pytest.mark.parametrize(
    "change",
    [
        _set(bank_id="0" * 31),
        _set(bank_id=7),
        _set(parent_id="../../etc/passwd"),
        _set(parent_id="0" * 32),
        _set(base=-4),
        _set(base=True),
        _set(base=1 << 40),
        _set(frontier=0),
        _set(frontier=115),
        _set(frontier=1 << 31),
        _set(frontier="116"),
        _set(head=117),
        _set(fingerprint="00"),
        _set(namespace="zz" * 32),
        _set(reason="because"),
        _set(created_at_ms=1.5),
        _set(ttl_seconds=-1),
        _set(ttl_seconds=True),
        _set(layout_id=""),
        _set(windows=[[0, 16]]),
        _set(windows=None),
        _set(tails=[16]),
        _set(sections=[]),
        _set(sections=None),
        _set(extra=1),
        lambda header: header.pop("windows"),
        lambda header: header["sections"].reverse(),
        lambda header: header["sections"].pop(),
        lambda header: header["sections"].append(header["sections"][0]),
        _section(0, name="rows/../x"),
        _section(0, encoding="zstd"),
        _section(0, encoding="pickle"),
        _section(0, length=460),
        _section(0, length=1 << 61),
        _section(1, offset=0),
        _section(1, offset=4097),
        _section(1, length=-1),
        _section(1, length=1 << 40),
        _section(1, block_bytes=0),
        _section(1, block_bytes=1 << 30),
        _section(1, checksums=""),
        _section(1, checksums="0" * 15),
        _section(1, checksums="g" * 16),
        _section(3, length=96 * 115),
        _section(3, length=96 * 117),
        _section(3, extra=0),
        lambda header: header["sections"].__setitem__(0, 5),
    ],
)
def test_header_impossible_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    path, _ = write_bank(tmp_path, PLAIN)
    rewrite_header(path, lambda header: None)
    read_everything(path)  # the rewriting itself does no harm
    rewrite_header(path, change)
    with pytest.raises(BankCorrupt):
        open_bank(path)


@pytest.mark.parametrize(
    "change",
    [
        _set(windows=[[0, 16], [16, 20]]),
        _set(windows=[[20, 30], [0, 16]]),
        _set(windows=[[0, 117]]),
        _set(windows=[[5, 5]]),
        _set(windows=[[0, 16, 20]]),
        _set(windows=[["0", 16]]),
        _set(tails=[0, 50, 87, 116]),
        _set(tails=[50, 50, 116]),
        _set(tails=[50, 87, 117]),
        _set(tails=[50, 87]),
        _set(base=2, parent_id="0" * 32),
    ],
)
def test_header_impossible_for_the_layout_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    path, _ = write_bank(tmp_path, TAILED)
    rewrite_header(path, change)
    with pytest.raises(BankCorrupt):
        open_bank(path, TAILED)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 100_000, b'{"base":NaN}', b"\xff"])
def test_header_that_is_no_object_is_refused(tmp_path: Path, text: bytes) -> None:
    path, _ = write_bank(tmp_path, PLAIN)
    path.write_bytes((encode_preamble(text) + text).ljust(200_000, b"\0"))
    with pytest.raises(BankCorrupt):
        open_bank(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_header_fuzzed_is_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    """Any value in any field: BankCorrupt or a file that reads as what it says, nothing else."""
    path = next(tmp_path.glob("*.bank"), None) or write_bank(tmp_path, WINDOWED)[0]
    good = path.read_bytes()
    try:

        def change(header: dict[str, Any]) -> None:
            section = data.draw(st.integers(-1, len(header["sections"]) - 1))
            target = header if section < 0 else header["sections"][section]
            target[data.draw(st.sampled_from(sorted(target)))] = data.draw(json_values)

        rewrite_header(path, change)
        read_everything(path, WINDOWED)
    except BankCorrupt:
        pass
    finally:
        path.write_bytes(good)


def test_blocks_hold_whole_rows() -> None:
    assert block_bytes(1) == MAX_BLOCK_BYTES
    assert block_bytes(7000) == 149 * 7000
    assert block_bytes(MAX_BLOCK_BYTES) == MAX_BLOCK_BYTES
    assert block_bytes(MAX_BLOCK_BYTES * 3 + 1) == MAX_BLOCK_BYTES


def test_tails_over_a_block_come_back(tmp_path: Path) -> None:
    layout = StateLayout("heavy/1", (Rows("kv", 8),), tail_bytes=MAX_BLOCK_BYTES + 4321)
    path, turns = write_bank(tmp_path, layout)
    source = MemorySource(layout, turns.ids)
    with open_bank(path, layout) as file:
        tails = list(file.read_tails(87))
        assert [(at, tail == source.tail(at)) for at, tail, _ in tails] == [(50, True), (87, True)]
        assert len(list(file.read_tails(86))) == 1


def test_file_name_parses_only_itself() -> None:
    name = file_name("0123456789abcdef" * 2, 40)
    assert parse_file_name(name) == ("0123456789abcdef" * 2, 40)
    for bad in (name.upper(), name + ".tmp", "../" + name, name.replace(".40.", ".040."), "x", ""):
        assert parse_file_name(bad) is None


records_strategy = st.lists(
    st.builds(
        lambda kind, key, points: Record(
            kind,
            key.encode(),
            RENDERER,
            tuple(
                Waypoint(offset, position)
                for offset, position in zip(
                    sorted(min(a, len(key.encode())) for a, _ in points),
                    sorted(b for _, b in points),
                    strict=True,
                )
            ),
        ),
        st.sampled_from(RecordKind),
        st.text(max_size=60),
        st.lists(st.tuples(st.integers(0, 60), st.integers(0, 100)), max_size=4),
    ),
    max_size=5,
).map(tuple)


@given(records=records_strategy)
@settings(max_examples=60, deadline=None)
def test_records_come_back(records: tuple[Record, ...]) -> None:
    hidden = Spans.of([(3, 9), (40, 100)])
    assert decode_records(encode_records(hidden, records), 100) == (hidden, records)


def test_records_share_their_beginnings() -> None:
    keys = ["x" * 10_000 + "y" * turn for turn in range(40)]
    records = [Record(RecordKind.RAW, key.encode(), RENDERER) for key in keys]
    assert len(encode_records(Spans(), records)) < 14_000


@given(data=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_records_of_noise_are_refused(data: bytes) -> None:
    try:
        decode_records(data, 50)
    except BankCorrupt as error:
        assert error.kind == "record"


@given(cut=st.integers(0, 200), flips=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 255))))
@settings(max_examples=200, deadline=None)
def test_records_damaged_are_refused_or_read(cut: int, flips: list[tuple[int, int]]) -> None:
    turns = Turns().grow(1, 20).grow(2, 20)
    data = bytearray(encode_records(turns.content.hidden, turns.records))
    for at, mask in flips:
        data[at % len(data)] ^= mask
    del data[len(data) - cut % len(data) :]
    try:
        hidden, records = decode_records(bytes(data), 40)
    except BankCorrupt:
        return
    assert all(end <= 40 for _, end in hidden.pairs)
    assert all(point.position <= 40 for record in records for point in record.waypoints)


def test_records_that_would_blow_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MAX_DECODED_BYTES", 5000)
    records = [Record(RecordKind.RAW, b"x" * 2000, RENDERER)] * 4
    data = encode_records(Spans(), records)
    assert len(data) < 2500
    with pytest.raises(BankCorrupt, match="key length"):
        decode_records(data, 10)
    assert len(fit_records(records)) == 2


def test_tools_come_back_or_are_refused() -> None:
    data = encode_tools(TOOLS)
    assert decode_tools(data) == TOOLS
    for bad in (data[:-1], data + b"\0", b"", b"\xff" * 4, struct.pack("<III", 1, 0, 0)):
        with pytest.raises(BankCorrupt):
            decode_tools(bad)
    with pytest.raises(BankCorrupt, match="UTF-8"):
        decode_tools(struct.pack("<III", 1, 1, 0) + b"\xff")


def test_header_with_a_million_values_is_refused() -> None:
    """Two bytes of JSON become fifty in memory, and nothing is known of them before that."""
    data = b'{"windows": [' + b"[]," * 1_000_000 + b"[]]}"
    with pytest.raises(BankCorrupt, match="values") as refused:
        decode_header(data, checksum(data))
    assert refused.value.kind == "format"
