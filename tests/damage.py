"""Bank files made wrong: as disks, other programs and attackers do it."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ds4grpc.bank import bank_id
from ds4grpc.store.format import (
    PREAMBLE,
    aligned,
    checksum,
    data_start,
    decode_preamble,
    encode_preamble,
    file_name,
)


class Parsed:
    """A bank file taken apart; `seal` makes every checksum right again after a change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = bytearray(path.read_bytes())
        length, _ = decode_preamble(bytes(self.data[: PREAMBLE.size]))
        self.header_bytes = length
        self.document: dict[str, Any] = json.loads(
            self.data[PREAMBLE.size : PREAMBLE.size + length]
        )
        self.start = data_start(length)
        self.sections = {each["name"]: each for each in self.document["sections"]}

    def place(self, name: str) -> tuple[int, int]:
        """[start, end) of a section, in bytes of the file."""
        start = self.start + int(self.sections[name]["offset"])
        return start, start + int(self.sections[name]["length"])

    def seal(self) -> None:
        """Writes the file back under its name, consistent in itself."""
        for section in self.sections.values():
            start, end = self.place(section["name"])
            size = section["block_bytes"]
            blocks = [self.data[at : min(at + size, end)] for at in range(start, end, size)]
            section["checksums"] = "".join(f"{checksum(block):016x}" for block in blocks)
        header = json.dumps(self.document, separators=(",", ":")).encode()
        header = header.ljust(self.header_bytes)
        assert aligned(PREAMBLE.size + len(header)) == self.start
        self.data[: PREAMBLE.size + len(header)] = encode_preamble(header) + header
        self.path.write_bytes(self.data)


def flip(path: Path, low: int, high: int, draw: random.Random) -> None:
    """Turns one bit in [low, high) over."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(low, high)] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def flipped_in(section: str) -> Callable[[Path, random.Random], None]:
    """Damage inside the section whose name begins so; the last of them."""

    def damage(path: Path, draw: random.Random) -> None:
        parsed = Parsed(path)
        name = [each for each in parsed.sections if each.startswith(section)][-1]
        flip(path, *parsed.place(name), draw)

    return damage


def flipped_preamble(path: Path, draw: random.Random) -> None:
    flip(path, 0, PREAMBLE.size, draw)


def flipped_header(path: Path, draw: random.Random) -> None:
    flip(path, PREAMBLE.size, PREAMBLE.size + Parsed(path).header_bytes, draw)


def truncated_in_header(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(PREAMBLE.size + 200))


def truncated_in_rows(path: Path, draw: random.Random) -> None:
    start = Parsed(path).start
    os.truncate(path, draw.randrange(start, path.stat().st_size))


def torn(path: Path, draw: random.Random) -> None:
    """The right length, zeros from some page on: the size reached the disk and bytes did not."""
    size = path.stat().st_size
    os.truncate(path, draw.randrange(Parsed(path).start, size - 4096) // 4096 * 4096)
    os.truncate(path, size)


def random_bytes(path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(path.stat().st_size))


def program(path: Path, draw: random.Random) -> None:
    path.write_bytes(Path(sys.executable).read_bytes()[: path.stat().st_size])


def pickled(path: Path, draw: random.Random) -> None:
    """Runs a command when somebody unpickles it."""
    mark = path.parent.parent / "unpickled"
    path.write_bytes(f"cos\nsystem\n(S'touch {mark}'\ntR.".encode().ljust(path.stat().st_size))


def version(number: int) -> Callable[[Path, random.Random], None]:
    def damage(path: Path, draw: random.Random) -> None:
        data = bytearray(path.read_bytes())
        data[8:12] = number.to_bytes(4, "little")
        path.write_bytes(data)

    return damage


def of_another_model(path: Path, draw: random.Random) -> None:
    parsed = Parsed(path)
    parsed.document["fingerprint"] = draw.randbytes(32).hex()
    parsed.seal()


def waypoint_past_the_end(path: Path, draw: random.Random) -> None:
    """The last four bytes of the records are a waypoint's position."""
    parsed = Parsed(path)
    _, end = parsed.place("records")
    parsed.data[end - 4 : end] = (1 << 20).to_bytes(4, "little")
    parsed.seal()


def ids_beyond_the_vocabulary(path: Path, draw: random.Random) -> None:
    """Consistent in everything, the name too: a bank whose last token is none."""
    parsed = Parsed(path)
    start, end = parsed.place("ids")
    parsed.data[end - 4 : end] = (1 << 31).to_bytes(4, "little")
    ids = np.frombuffer(bytes(parsed.data[start:end]), dtype="<u4")
    space, fingerprint = (bytes.fromhex(parsed.document[n]) for n in ("namespace", "fingerprint"))
    name = bank_id(space, fingerprint, ids)
    parsed.document["bank_id"] = name
    parsed.seal()
    folder = path.parent.parent / name[:2]
    folder.mkdir(exist_ok=True)
    path.rename(folder / file_name(name, parsed.document["base"]))


Damage = Callable[[Path, random.Random], None]
# What is done to a file, and the kinds by which the reader may refuse it.
DAMAGES: dict[str, tuple[Damage, set[str]]] = {
    "a bit of the preamble": (flipped_preamble, {"format", "checksum", "truncated"}),
    "a bit of the header": (flipped_header, {"checksum"}),
    "a bit of the ids": (flipped_in("ids"), {"checksum"}),
    "a bit of the records": (flipped_in("records"), {"checksum"}),
    "a bit of the rows": (flipped_in("rows/"), {"checksum"}),
    "cut in the header": (truncated_in_header, {"truncated"}),
    "cut in the rows": (truncated_in_rows, {"truncated"}),
    "zeros from some page on": (torn, {"checksum"}),
    "random bytes": (random_bytes, {"format"}),
    "a program": (program, {"format"}),
    "a pickle": (pickled, {"format"}),
    "an older version": (version(0), {"format"}),
    "a newer version": (version(2), {"format"}),
    "another model's": (of_another_model, {"foreign"}),
    "a waypoint past the end": (waypoint_past_the_end, {"record"}),
    "ids beyond the vocabulary": (ids_beyond_the_vocabulary, {"record"}),
}
