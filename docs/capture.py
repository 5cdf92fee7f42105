"""Records a real session for the README: `python docs/capture.py` writes it between its marks.

A server, a thinking chat of three turns, a refused option and a bad request, each command run in a
terminal of its own (a pty) and shown as it was printed, without colours. Only the home folder, ids
and the time of day are shortened.
"""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- capture: docs/capture.py -->", "<!-- end of capture -->"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r")
QUESTIONS = (
    "What is the capital of France?",
    "And what is it famous for?",
    "Which river flows through it?",
)


class Terminal:
    """A command in a pty; what it prints, and what is typed into it."""

    def __init__(self, *arguments: str) -> None:
        self._main, terminal = pty.openpty()
        environ = os.environ | {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ds4grpc", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environ,
            start_new_session=True,
        )
        os.close(terminal)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text = ""
        self._seen = 0  # up to here earlier calls have read

    def read_until(self, pattern: str, seconds: float = 120.0) -> None:
        """Reads until something that matches has been printed after the last match."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := re.compile(pattern).search(self.text, self._seen):
                self._seen = found.end()
                return
            ready, _, _ = select.select([self._main], [], [], 0.1)
            if ready:
                try:
                    data = os.read(self._main, 65536)
                except OSError:  # the process has closed its side
                    data = b""
                if not data:
                    return
                self.text += ESCAPES.sub("", self._decoder.decode(data))
        raise SystemExit(f"{pattern!r} was never printed:\n{self.text}")

    def type(self, line: str) -> None:
        os.write(self._main, f"{line}\n".encode())

    def end(self) -> str:
        """Reads to the end and returns all that was printed."""
        self.read_until(r"(?!)", 60)
        self.process.wait(60)
        os.close(self._main)
        return self.text


def session(folder: str) -> str:
    """The commands and what they printed."""
    parts = []
    server = Terminal("serve", "--kv-disk-dir", folder, "--kv-cache-min-tokens", "64")
    server.read_until("ready in .*\n")
    chat = Terminal("chat", "--thinking", "--max-tokens", "64", "--temperature", "0")
    for question in QUESTIONS:
        chat.read_until("› ")
        chat.type(question)
        chat.read_until(r"\d tokens/s")
    chat.read_until("› ")
    chat.type("/quit")
    parts.append(("ds4grpc chat --thinking --max-tokens 64 --temperature 0", chat.end()))
    refused = (["serve", "--slots", "0"], ["generate", "Hello", "--temperature", "1000"])
    parts += [(f"ds4grpc {' '.join(words)}", Terminal(*words).end()) for words in refused]
    server.process.terminate()
    parts.insert(0, ("ds4grpc serve", server.end()))
    return "\n\n".join(f"$ {command}\n{shortened(text, folder)}" for command, text in parts)


def shortened(text: str, folder: str) -> str:
    text = text.replace(folder, "~/.cache/ds4grpc/banks").replace(str(Path.home()), "~")
    text = re.sub(r"\d{4}-\d\d-\d\dT(\d\d:\d\d:\d\d)\.\d+Z", r"\1", text)
    text = re.sub(r"\b([0-9a-f]{6})[0-9a-f]{10,}\b", r"\1…", text)
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        printed = session(f"{folder}/banks")
    before, _, rest = README.read_text().partition(START)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{START}\n```text\n{printed}\n```\n{END}{after}")


if __name__ == "__main__":
    main()
