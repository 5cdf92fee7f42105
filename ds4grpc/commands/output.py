"""How client commands print: tables, sizes, ages, JSON lines, text that cannot drive a terminal.

Rich on a terminal, plain text with tabs when piped, so that `cut` and `awk` work. Main thread.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp


def json_line(message: Message, **more: Any) -> None:
    """One message as one line of proto3 JSON with the names of the proto files."""
    facts = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    click.echo(json.dumps(more | facts, ensure_ascii=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows under their columns; a column that starts with `>` is set to the right."""
    names = [column.removeprefix(">") for column in columns]
    if not sys.stdout.isatty():
        for row in (names, *rows):
            click.echo("\t".join(printable(cell).replace("\t", " ") for cell in row))
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, header_style="bold", pad_edge=False)
    for column, name in zip(columns, names, strict=True):
        shown.add_column(name, justify="right" if column[0] == ">" else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*(printable(cell) for cell in row))
    Console(markup=False, highlight=False).print(shown)


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while the block runs, when that is a terminal; it moves by the bytes given
    to what this yields. Any thread may call that."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    shown = Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True), transient=True)
    with shown as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def printable(text: str) -> str:
    """The text without control characters: model output must not drive the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or ord(c) > 159 or c.isprintable() else "\ufffd" for c in text)


def size(num_bytes: int) -> str:
    """Such as `12.4 MiB`."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def age(at: Timestamp, now: datetime | None = None) -> str:
    """How long ago, such as `3m`; `-` when unset."""
    if not at.seconds:
        return "-"
    seconds = max(0.0, ((now or datetime.now(UTC)) - at.ToDatetime(UTC)).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def word(name: str, prefix: str) -> str:
    """An enum value's name as the docs and metrics write it; "" for the unspecified one."""
    text = name.removeprefix(prefix).lower()
    return "" if text == "unspecified" else text
