"""Random lives of a store against a simple model: what should be there is, bit for bit.

`make test-long` runs 2,000 lives of up to 60 steps and prints how often each rule ran and each
pair crash -> next rule.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from bankkit import (
    TAILED,
    WINDOWED,
    DyingFiles,
    MemorySink,
    MemorySource,
    Observed,
    Turns,
    config_of,
    names,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ds4grpc.errors import BankPinned
from ds4grpc.store.files import Files
from ds4grpc.store.store import Store

LONG = bool(os.environ.get("DS4GRPC_LONG"))
picks = st.integers(0, 1 << 16)


@dataclass
class Known:
    """A bank that should be there."""

    turns: Turns
    pinned: bool = False


class StoreLife(RuleBasedStateMachine):
    ran: Counter[str] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-life-"))
        self.runner = asyncio.Runner()
        self.known: dict[str, Known] = {}
        self.seed = 0
        self.before = ""

    @initialize(layout=st.sampled_from([WINDOWED, TAILED]))
    def start(self, layout: object) -> None:
        assert layout in (WINDOWED, TAILED)
        self.layout = WINDOWED if layout is WINDOWED else TAILED
        self.store = self.open()

    def open(self, files: Files | None = None, quota_bytes: int = 1 << 30) -> Store:
        config = config_of(self.folder, self.layout, quota_bytes)
        store = Store(config, Observed(), files)
        self.run(store.__aenter__())
        return store

    def close(self) -> None:
        self.run(self.store.__aexit__(None, None, None))

    def run(self, work: Awaitable[object]) -> object:
        async def wait() -> object:
            return await work

        return self.runner.run(wait())

    def note(self, name: str) -> None:
        self.ran[name] += 1
        if self.before == "crash":
            self.ran[f"crash -> {name}"] += 1
        self.before = name

    def pick(self, number: int) -> str:
        return sorted(self.known)[number % len(self.known)]

    def grown(self, number: int) -> Turns:
        """A turn more on a known bank, a branch of one, or a new conversation."""
        self.seed += 1
        count = 20 + number % 50
        if not self.known or number % 4 == 0:
            return Turns(self.layout, head=18 * (number % 3)).grow(self.seed, count)
        turns = self.known[self.pick(number)].turns
        if number % 4 == 1 and turns.frontier > 40:
            turns = turns.branch_at(turns.waypoints[0].position)
        return turns.grow(self.seed, count)

    async def put(self, store: Store, turns: Turns, *, pin: bool = False) -> str:
        persisted = await store.persist(turns.source(pin=pin))
        assert (persisted.detail, persisted.frontier) == ("", turns.frontier)
        return persisted.bank_id

    def learn(self, bank_id: str, turns: Turns, *, pinned: bool = False) -> None:
        already = self.known.get(bank_id)
        self.known[bank_id] = Known(turns, pinned or (already is not None and already.pinned))
        head_id = self.head_id(turns)
        if head_id is not None and head_id not in self.known:
            info = [each for each in self.listed() if each == head_id]
            if info:
                self.known[head_id] = Known(turns.head_only())

    def head_id(self, turns: Turns) -> str | None:
        return turns.head_only().bank_id if 16 <= turns.head < turns.frontier else None

    def listed(self) -> dict[str, bool]:
        infos = self.runner.run(self.store.list_banks())
        return {info.bank_id: info.pinned for info in infos}

    @rule(number=picks, pin=st.booleans())
    def persist(self, number: int, pin: bool) -> None:
        self.note("persist")
        turns = self.grown(number)
        bank_id = self.run(self.put(self.store, turns, pin=pin))
        assert isinstance(bank_id, str)
        self.learn(bank_id, turns, pinned=pin)

    @precondition(lambda self: self.known)
    @rule(number=picks, share=st.integers(1, 100))
    def restore(self, number: int, share: int) -> None:
        self.note("restore")
        turns = self.known[self.pick(number)].turns
        self.run(self.check_restores(turns, share))

    async def check_restores(self, turns: Turns, share: int) -> None:
        leases = await self.store.match(turns.query())
        exact = [each for each in leases if each.bank_id == turns.bank_id]
        # A head of under 256 tokens has nothing to be found by, except as a parent.
        assert exact or len(leases) == 4 or not turns.records, "a stored bank is not found"
        for lease in exact or leases[:1]:
            content = lease.content
            cut = max(1, content.frontier * share // 100)
            position = self.layout.replay_base(cut, content.held, content.tails)
            sink = MemorySink(self.layout, content.frontier)
            await lease.load(position, sink)
            source = MemorySource(self.layout, content.ids)
            sink.assert_holds(source, position, content.held)
            if lease.bank_id == turns.bank_id:
                whole = self.layout.replay_base(content.frontier, content.held, content.tails)
                assert whole == turns.resumes_at
        for lease in leases:
            lease.release()

    @precondition(lambda self: self.known)
    @rule(number=picks, pinned=st.booleans())
    def pin(self, number: int, pinned: bool) -> None:
        self.note("pin" if pinned else "unpin")
        bank_id = self.pick(number)
        self.run((self.store.pin if pinned else self.store.unpin)(bank_id))
        self.known[bank_id].pinned = pinned

    @precondition(lambda self: self.known)
    @rule(number=picks)
    def delete(self, number: int) -> None:
        self.note("delete")
        bank_id = self.pick(number)
        try:
            self.run(self.store.delete(bank_id))
        except BankPinned:
            assert self.known[bank_id].pinned
        else:
            assert not self.known.pop(bank_id).pinned

    @precondition(lambda self: self.known)
    @rule(number=picks, proven=st.booleans())
    def use(self, number: int, proven: bool) -> None:
        self.note("use")
        self.run(self.store.note_use(self.pick(number), proven=proven))

    @rule()
    def rescan(self) -> None:
        self.note("rescan")
        self.run(self.store.rescan())

    @rule()
    def restart(self) -> None:
        self.note("restart")
        self.close()
        self.store = self.open()

    @rule()
    def lose_catalog(self) -> None:
        self.note("lose_catalog")
        self.close()
        for name in names(self.folder, "catalog.db*"):
            next(self.folder.rglob(name)).unlink()
        self.store = self.open()

    @precondition(lambda self: self.known)
    @rule(keep=st.integers(30, 90))
    def squeeze(self, keep: int) -> None:
        """A start with a smaller cap: something goes, never what is pinned or needed."""
        self.note("squeeze")
        quota_bytes = self.store.disk_bytes * keep // 100
        self.close()
        self.store = self.open(quota_bytes=quota_bytes)
        listed = self.listed()
        assert listed.keys() <= self.known.keys()
        for bank_id, known in list(self.known.items()):
            if bank_id not in listed:
                assert not known.pinned
                del self.known[bank_id]
        self.close()
        self.store = self.open()

    @rule(number=picks, deadline=st.integers(1, 25), deletes=st.booleans())
    def crash(self, number: int, deadline: int, deletes: bool) -> None:
        """Another process persists or deletes, and dies in the middle of it."""
        victim = self.pick(number) if deletes and self.known else None
        turns = self.grown(number)
        self.close()

        async def work(files: DyingFiles) -> None:
            config = config_of(self.folder, self.layout)
            async with Store(config, Observed(), files) as store:
                files.arm(deadline)
                if victim is not None:
                    await store.delete(victim)
                else:
                    await self.put(store, turns)

        finished = in_child(work)
        self.store = self.open()
        listed = self.listed()
        if victim is not None:
            if finished == 0:
                assert victim not in listed
            if victim not in listed:
                del self.known[victim]
        else:
            if finished == 0:
                assert turns.bank_id in listed
            if turns.bank_id in listed:
                self.learn(turns.bank_id, turns)
            head_id = self.head_id(turns)
            if head_id in listed and head_id not in self.known:
                self.known[head_id] = Known(turns.head_only())
        self.note("crash")

    @invariant()
    def lists_what_it_should(self) -> None:
        if not hasattr(self, "store"):
            return
        listed = self.listed()
        assert listed == {bank_id: known.pinned for bank_id, known in self.known.items()}
        assert self.store.num_leased == 0
        assert names(self.folder, "*.tmp") == names(self.folder, "*.dead") == []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.close()
        self.runner.close()
        shutil.rmtree(self.folder)


def in_child(work: Callable[[DyingFiles], Awaitable[None]]) -> int:
    """Runs `work` in a forked process; returns its exit status: 0 when it got to its end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with asyncio.Runner() as runner:
                runner.run(_awaited(work(DyingFiles())))
            status = 0
        finally:
            os._exit(status)
    _, code = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(code)


async def _awaited(work: Awaitable[None]) -> None:
    await work


@pytest.mark.slow
def test_store_lives_as_the_model_says(
    no_blocking_calls: object, measured: Callable[[str], None]
) -> None:
    StoreLife.ran.clear()
    run_state_machine_as_test(
        StoreLife,
        settings=settings(
            max_examples=2000 if LONG else 10,
            stateful_step_count=60 if LONG else 15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    for name, count in sorted(StoreLife.ran.items()):
        measured(f"{count:6d}  {name}")
