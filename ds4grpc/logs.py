"""Log lines: `event key=value …` or JSON, written to stderr by a thread of their own.

Owns the form of a line and the thread that writes it, so that a terminal or pipe that does not
take its bytes never holds up the event loop or the engine: past a bound, lines are dropped and
counted. Knows nothing of what is logged; callers never hand it text of prompts or replies.

    log.info(line("admit", admission="partial_fork", slot=1, pos_base=29056, seconds=0.80))
    admit admission=partial_fork slot=1 pos_base=29056 seconds=0.80
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Self, TextIO

Value = str | int | float | bool | None

# Bounds of one value, and of the lines that wait for stderr.
MAX_VALUE_CHARS = 256
MAX_WAITING_LINES = 10_000
# How long the last lines may take at the end.
CLOSE_SECONDS = 1.0


class Line(str):
    """A log line that still knows its parts, for the JSON form."""

    __slots__ = ("event", "fields")

    event: str
    fields: dict[str, Value]


def line(event: str, **fields: Value) -> Line:
    """One event with its fields, in order; None is left out, long values are cut."""
    present = {key: _bounded(value) for key, value in fields.items() if value is not None}
    made = Line(" ".join((event, *(f"{key}={_word(value)}" for key, value in present.items()))))
    made.event = event
    made.fields = present
    return made


def _bounded(value: Value) -> Value:
    if isinstance(value, str):
        return value if len(value) <= MAX_VALUE_CHARS else value[: MAX_VALUE_CHARS - 1] + "…"
    return value


def _word(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # Two decimals, or three digits where that would hide the value: 0.80, 0.0669.
        return f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"
    text = str(value)
    plain = text.isprintable() and not any(char in text for char in ' "=')
    return text if text and plain else json.dumps(text, ensure_ascii=not text.isprintable())


class TextForm(logging.Formatter):
    """`2026-11-30T18:48:02.123Z INFO engine: admit …`, the traceback after it."""

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix("ds4grpc.")
        text = f"{_time(record)} {record.levelname} {name}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class JsonForm(logging.Formatter):
    """One JSON object a line: time, level, logger, event, the line's fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Value] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if isinstance(record.msg, Line):
            entry |= {"event": record.msg.event} | record.msg.fields
        else:
            entry["event"] = record.getMessage()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


class LogWriter(logging.Handler):
    """Takes the root logger's records while it is open (`with`), any thread.

    `form` is `text` or `json`. `level` holds for this package; others are heard from `warning`
    on.
    """

    def __init__(self, stream: TextIO, *, form: str, level: str) -> None:
        super().__init__()
        self.setFormatter(JsonForm() if form == "json" else TextForm())
        self._stream = stream
        self._package_level = level.upper()
        self._waiting: queue.Queue[str | None] = queue.Queue(MAX_WAITING_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="ds4grpc-log", daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1  # under the handler's lock
        except Exception:
            self.handleError(record)

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self)
        logging.getLogger("ds4grpc").setLevel(self._package_level)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        logging.getLogger().removeHandler(self)
        logging.getLogger("ds4grpc").setLevel(logging.NOTSET)
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return  # nobody reads stderr; the thread is a daemon
        self._thread.join(CLOSE_SECONDS)

    def _write_all(self) -> None:
        while (text := self._waiting.get()) is not None:
            try:
                self._stream.write(text + "\n")
                if dropped := self._take_dropped():
                    self._stream.write(f"{dropped} log lines were dropped: stderr was too slow\n")
                self._stream.flush()
            except (OSError, ValueError):
                continue  # a closed stderr must not end the server

    def _take_dropped(self) -> int:
        self.acquire()
        try:
            dropped, self._dropped = self._dropped, 0
            return dropped
        finally:
            self.release()
