"""Log lines: their form, and a writer that nothing can hold up."""

import io
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ds4grpc import logs
from ds4grpc.bank import Admission
from ds4grpc.logs import LogWriter, line

log = logging.getLogger("ds4grpc.engine")


@contextmanager
def captured(form: str, level: str = "info") -> Iterator[io.StringIO]:
    """The writer on a stream in memory; all of it is there after the block."""
    stream = io.StringIO()
    with LogWriter(stream, form=form, level=level):
        yield stream


def test_line_has_the_form_of_the_field() -> None:
    admit = line(
        "admit",
        admission=Admission.PARTIAL_FORK,
        slot=1,
        pos_base=29056,
        suffix=212,
        seconds=0.80,
    )
    assert admit == "admit admission=partial_fork slot=1 pos_base=29056 suffix=212 seconds=0.80"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "x=plain"),
        ("two words", 'x="two words"'),
        ("", 'x=""'),
        ('say "a"', 'x="say \\"a\\""'),
        ("a=b", 'x="a=b"'),
        ("line\nbreak", 'x="line\\nbreak"'),
        ("\x1b[31m", 'x="\\u001b[31m"'),
        ("größe", "x=größe"),
        (True, "x=true"),
        (0.0, "x=0.00"),
        (0.0669, "x=0.0669"),
        (1e-7, "x=1e-07"),
        (1234.5678, "x=1234.57"),
        (29056, "x=29056"),
    ],
)
def test_value_is_quoted_only_where_it_must_be(value: logs.Value, text: str) -> None:
    assert line("e", x=value) == f"e {text}"


def test_line_leaves_none_out_and_cuts_long_values() -> None:
    made = line("e", absent=None, long="x" * 10_000)
    assert made.fields == {"long": "x" * 255 + "…"}
    assert len(made) < 300


def test_text_form_has_time_level_name_and_traceback() -> None:
    with captured("text") as stream:
        log.info(line("admit", slot=1))
        try:
            raise ValueError("cause")
        except ValueError:
            log.exception("failed %s", "here")
    first, second, *trace = stream.getvalue().splitlines()
    assert first.endswith("Z INFO engine: admit slot=1")
    assert second.endswith("Z ERROR engine: failed here")
    assert trace[-1] == "ValueError: cause"


def test_json_form_keeps_the_types_of_fields() -> None:
    with captured("json") as stream:
        log.warning(line("admit", slot=1, seconds=0.5, exact=True))
        log.error("plain %d", 7)
    admit, plain = map(json.loads, stream.getvalue().splitlines())
    assert admit.pop("time").endswith("Z")
    assert admit == {
        "level": "warning",
        "logger": "ds4grpc.engine",
        "event": "admit",
        "slot": 1,
        "seconds": 0.5,
        "exact": True,
    }
    assert plain["event"] == "plain 7"


def test_level_holds_for_this_package_and_warning_for_others() -> None:
    with captured("text", "debug") as stream:
        log.debug("own detail")
        logging.getLogger("someone.else").info("their detail")
        logging.getLogger("someone.else").warning("their warning")
    assert [text.split(": ")[1] for text in stream.getvalue().splitlines()] == [
        "own detail",
        "their warning",
    ]


def test_writer_that_is_left_hears_nothing_more() -> None:
    with captured("text") as stream:
        log.info("in")
    log.error("out")
    assert "out" not in stream.getvalue()


def test_stuck_pipe_drops_lines_counts_them_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING_LINES", 10)
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stream:
        writer = LogWriter(stream, form="text", level="info")
        with writer:
            begun = time.monotonic()
            for _ in range(1000):
                log.info("x" * 10_000)  # fills the pipe after a few
            assert time.monotonic() - begun < 5
            text = bytearray()
            drained = threading.Thread(target=drain, args=(read_end, text))
            drained.start()
            while not writer._waiting.empty():
                time.sleep(0.01)
            log.info("after")
    drained.join()
    lines = text.decode().splitlines()
    assert any("log lines were dropped: stderr was too slow" in line for line in lines)
    assert lines[-1].endswith("after") or lines[-2].endswith("after")


def drain(read_end: int, text: bytearray) -> None:
    with os.fdopen(read_end, "rb") as stream:
        while block := stream.read(65536):
            text += block
