"""What makes many lives of a store cheap, and a crash possible at each of its steps.

`LifeFiles` are real files whose changes a `powerkit.Disk` follows: nothing waits for a sync, and
still it is known what a disk would hold. A crash is a picture of that disk, taken after any step
of an operation that ran to its end all the same, put in place of the folder.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest
from powerkit import CATALOG, Disk, Moment, RecordingFiles, Step, picture

from ds4grpc.store import catalog, tasks

P = ParamSpec("P")
T = TypeVar("T")

_UNSEEN = Moment(None, None)


class LifeFiles(RecordingFiles):
    """The files of one life, whose folder is `root`. Steps are recorded while it is armed."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.armed = False
        self._rest()

    def arm(self) -> None:
        """From now on the power may go."""
        self.armed = True

    def crash(self, chance: random.Random, loss: str) -> int:
        """Takes the picture after some or all of the steps since `arm`; returns how many. `loss`
        says what of the un-synced part survives."""
        num_steps = chance.randrange(len(self.steps) + 1)
        for step in self.steps[:num_steps]:
            self._disk.do(step)
        picture(self._disk, self, num_steps, loss, chance, self._aside)
        self.armed = False
        return num_steps

    def put_picture(self) -> None:
        """Goes on with what has survived; the store must be closed."""
        shutil.rmtree(self.root)
        (self._aside / self.root.name).rename(self.root)
        self._aside.rmdir()
        self._rest()

    @property
    def _aside(self) -> Path:
        return self.root.with_name(f"{self.root.name}-survived")

    def _rest(self) -> None:
        self.steps.clear()
        self.moments.clear()
        self._disk = Disk(str(self.root.parent))
        self._disk.hold(self.root)

    def look(self) -> Moment:
        return super().look() if self.armed else _UNSEEN

    def keep(self, step: Step, moment: Moment) -> None:
        if Path(step.path).name.startswith(CATALOG):
            return  # comes into a picture as it is
        if self.armed:
            super().keep(step, moment)
        elif not self._aside.exists():  # else it comes after the crash
            self._disk.do(step)

    def sync_data(self, descriptor: int, path: str) -> None:
        self._synced("sync_data", path)

    def sync_folder(self, path: str) -> None:
        self._synced("sync_folder", path)

    def _synced(self, operation: str, path: str) -> None:
        moment = self.look()
        self.before(operation, path)
        self.keep(Step(operation, path), moment)


class InPlace(ThreadPoolExecutor):
    """Runs work in the thread that submits it: lives are the same each time, and twice as many."""

    def __init__(self, *_: object) -> None:
        super().__init__(1)

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def run_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores have no threads of their own from now on, but for SQLite's writer."""
    for module in (tasks, catalog):
        monkeypatch.setattr(module, "ThreadPoolExecutor", InPlace)
