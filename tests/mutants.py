"""`make mutants`: puts the faults of `faults.toml` in, one at a time, and expects a test to see it.

Works on copies of the tree, never on the tree itself. Every named test must be green without a
fault and red with its own; exits 1 when one is not, or when a fault no longer fits its file.

This process imports what the tests need of other packages, and forks for each run: that is most
of the time that a short test takes. It never imports ds4grpc itself; a child does, from its copy.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("ds4grpc", "kernels", "migrations", "grafana", "protos", "tests", "pyproject.toml")
PACKAGES = (
    *("aiosqlite", "alembic", "gguf", "grpc.aio", "hypothesis", "jinja2", "numpy"),
    *("prometheus_client", "pytest", "sqlalchemy.ext.asyncio", "tokenizers", "torch", "xxhash"),
)
TEST_SECONDS = 30  # of one test: some faults make it hang
RUN_SECONDS = 120
PASSED, FAILED = 0, 1  # pytest's exit codes; any other one says that nothing was tested
NOTHING_RUN = 99


@dataclass(frozen=True, slots=True)
class Fault:
    """`old` becomes `new` in `file`; `test` is the pytest node id that must turn red."""

    name: str
    file: str
    old: str
    new: str
    test: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one fault; `detail` is the end of pytest's output when that is of use."""

    fault: Fault
    word: str  # killed, or what is wrong
    seconds: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Tests that a child runs in a copy; `whole` is the text that its fault replaced there."""

    child: int
    copy: Path
    began: float
    fault: Fault | None = None
    whole: str = ""

    def output(self) -> str:
        return self.copy.with_suffix(".out").read_text(errors="replace")


def read_faults() -> list[Fault]:
    with (ROOT / "tests" / "faults.toml").open("rb") as file:
        return [Fault(**entry) for entry in tomllib.load(file)["fault"]]


def make_copy(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for part in PARTS:
        source, target = ROOT / part, folder / part
        if not source.exists():
            continue  # git keeps no empty folder
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, target)


def start(copy: Path, tests: Iterable[str], fault: Fault | None = None, whole: str = "") -> Run:
    """Forks a child that runs `tests` in `copy`."""
    sys.stdout.flush()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = NOTHING_RUN
        try:
            code = _in_child(copy, list(tests))
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.setpgid(child, child)  # so that what a test starts can be ended with it
    return Run(child, copy, began, fault, whole)


def _in_child(copy: Path, tests: list[str]) -> int:
    import pytest

    os.chdir(copy)
    out = os.open(copy.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    here = str(Path(__file__).parent)
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", here, str(ROOT)))]
    os.environ["PYTHONPATH"] = str(copy)  # for what tests start
    found = importlib.util.find_spec("ds4grpc")
    if found is None or not str(found.origin).startswith(str(copy)):
        raise RuntimeError(f"tests would import {found and found.origin}, not the copy")
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
    # Of packages with plugins, which pytest would like to import itself.
    options += ["-W", "ignore:Module already imported"]
    return int(pytest.main([*options, *tests]))


def wait(runs: list[Run]) -> tuple[Run, int]:
    """Takes out the first run that ends; returns it with pytest's exit code. One that hangs is
    ended, and has failed."""
    while True:
        for run in runs:
            child, status = os.waitpid(run.child, os.WNOHANG)
            if child:
                runs.remove(run)
                return run, os.waitstatus_to_exitcode(status)
            if time.monotonic() - run.began > RUN_SECONDS:
                runs.remove(run)
                end(run)
                return run, FAILED
        time.sleep(0.02)


def end(run: Run) -> None:
    os.killpg(run.child, signal.SIGKILL)
    os.waitpid(run.child, 0)


@contextmanager
def ending(runs: list[Run]) -> Iterator[None]:
    """Leaves no run behind."""
    try:
        yield
    finally:
        for run in runs:
            end(run)


def put_in(copy: Path, fault: Fault) -> Run | Verdict:
    """Starts the fault's test with the fault; a verdict at once when it does not apply."""
    path = copy / fault.file
    whole = path.read_text()
    if (count := whole.count(fault.old)) != 1:
        return Verdict(fault, f"DOES NOT APPLY: its text occurs {count} times", 0.0)
    _write(path, whole.replace(fault.old, fault.new))
    return start(copy, [fault.test], fault, whole)


def take_out(run: Run, code: int) -> Verdict:
    """Restores the file and judges the run."""
    fault = run.fault
    assert fault is not None
    _write(run.copy / fault.file, run.whole)
    seconds = time.monotonic() - run.began
    if code == FAILED:
        return Verdict(fault, "killed", seconds)
    word = "SURVIVED" if code == PASSED else f"BROKEN: pytest ended with {code}"
    return Verdict(fault, word, seconds, run.output()[-3000:])


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # Python would take its compiled form for current when size and second are the same.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def try_all(faults: Sequence[Fault], copies: list[Path]) -> list[Verdict]:
    """Tries each fault in whichever copy is free."""
    left = list(reversed(faults))
    runs: list[Run] = []
    verdicts: list[Verdict] = []
    with ending(runs):
        while left or runs:
            if left and copies:
                begun = put_in(copies[-1], left.pop())
                if isinstance(begun, Run):
                    runs.append(begun)
                    copies.pop()
                    continue
                verdict = begun
            else:
                run, code = wait(runs)
                copies.append(run.copy)
                verdict = take_out(run, code)
            say(row(verdict))
            verdicts.append(verdict)
    return verdicts


def row(verdict: Verdict) -> str:
    fault = verdict.fault
    file, test = fault.file.removeprefix("ds4grpc/"), fault.test.removeprefix("tests/")
    return f"{fault.name:<52} {file:<22} {verdict.word:<8} {verdict.seconds:5.1f} s  {test}"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of the names of the faults to run")
    parser.add_argument("--jobs", type=int, default=min(4, os.cpu_count() or 1))
    options = parser.parse_args()
    names = options.names
    faults = [f for f in read_faults() if not names or any(name in f.name for name in names)]
    if not faults:
        parser.error("no fault has such a name")
    began = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    for package in PACKAGES:
        importlib.import_module(package)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Path(folder) / str(number) for number in range(options.jobs)]
        for copy in copies:
            make_copy(copy)
        # In shares, one a copy: compiles each copy's files on the way.
        tests = sorted({fault.test for fault in faults})
        runs = [start(copy, tests[i :: len(copies)] or tests) for i, copy in enumerate(copies)]
        with ending(runs):
            ended = [wait(runs) for _ in copies]
        red = [run.output() for run, code in ended if code != PASSED]
        if red:
            say("\n".join([*red, "the named tests are not green without a fault"]))
            return 1
        say(f"{len(tests)} tests green without a fault, in {time.monotonic() - began:.0f} s")
        verdicts = try_all(faults, copies)
    wrong = [verdict for verdict in verdicts if verdict.word != "killed"]
    for verdict in wrong:
        say(f"\n{row(verdict)}\n{verdict.detail}")
    seconds = time.monotonic() - began
    say(f"{len(verdicts) - len(wrong)} of {len(verdicts)} faults seen, in {seconds:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
