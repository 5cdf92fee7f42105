"""Random lives of a store against a simple model: what should be there is, bit for bit.

`make test-long` runs 1,000 lives of up to 60 steps for each of two layouts, prints how often each
rule ran and each pair crash -> next rule, and fails when a pair ran less than 50 times.
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

import numpy as np
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
from ds4grpc.layout import StateLayout
from ds4grpc.store import compact
from ds4grpc.store.files import Files
from ds4grpc.store.store import Store

LONG = bool(os.environ.get("DS4GRPC_LONG"))
picks = st.integers(0, 1 << 16)

MAX_TOKENS = 350  # of a conversation, so that its rows are soon made
MAX_LEASES = 4  # of one lookup: what is longer goes first
MIN_FOLLOWED = 50  # times that each rule must come right after a crash in the long run
RULES = (
    *("put", "fork", "match", "restore", "pin", "unpin", "use", "delete", "evict"),
    *("compact", "rescan", "restart", "lose_catalog", "crash"),
)
# How often in one life: what opens a store anew takes most of the time.
AT_MOST = {"crash": 3, "evict": 1, "restart": 3, "lose_catalog": 1}


@dataclass
class Known:
    """A bank that should be there."""

    turns: Turns
    pinned: bool = False


def may(name: str) -> Callable[[StoreLife], bool]:
    """Whether a rule that costs much may run once more in this life; right after a crash it may."""
    return lambda life: (
        life.times[name] < AT_MOST[name] or (life.before == "crash" and name != "crash")
    )


class StoreLife(RuleBasedStateMachine):
    ran: Counter[str] = Counter()
    layout: StateLayout
    new_folder: Path  # as a first start leaves it

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-life-"))
        self.runner = asyncio.Runner()
        self.known: dict[str, Known] = {}
        self.times: Counter[str] = Counter()
        self.seed = 0
        self.before = ""

    @initialize()
    def start(self) -> None:
        shutil.copytree(self.new_folder, self.folder, dirs_exist_ok=True)
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
        self.times[name] += 1
        if self.before == "crash":
            self.ran[f"crash -> {name}"] += 1
        self.before = name

    def pick(self, number: int) -> str:
        return sorted(self.known)[number % len(self.known)]

    def grown(self, number: int) -> Turns:
        """A turn more on a known bank, or a new conversation."""
        turns = self.known[self.pick(number)].turns if self.known and number % 4 else None
        if turns is None or turns.frontier > MAX_TOKENS:
            turns = Turns(self.layout, head=18 * (number % 3))
        return self.more(turns, number)

    def branch(self, number: int) -> Turns | None:
        """A turn that nobody has seen after the first one of a known bank; None when that bank
        has no turns."""
        turns = self.known[self.pick(number)].turns
        if not turns.waypoints:
            return None
        return self.more(turns.branch_at(turns.waypoints[0].position), number)

    def more(self, turns: Turns, number: int) -> Turns:
        self.seed += 1
        return turns.grow(self.seed, 20 + number % 50)

    async def put(self, store: Store, turns: Turns, *, pin: bool = False) -> str:
        persisted = await store.persist(turns.source(pin=pin))
        assert (persisted.detail, persisted.frontier) == ("", turns.frontier)
        return persisted.bank_id

    def learn(self, bank_id: str, turns: Turns, *, pinned: bool = False) -> None:
        already = self.known.get(bank_id)
        self.known[bank_id] = Known(turns, pinned or (already is not None and already.pinned))
        self.learn_head(turns)

    def learn_head(self, turns: Turns) -> None:
        """The stable head may have become a bank of its own."""
        head_id = self.head_id(turns)
        if head_id is not None and head_id not in self.known and head_id in self.listed():
            self.known[head_id] = Known(turns.head_only())

    def head_id(self, turns: Turns) -> str | None:
        return turns.head_only().bank_id if 16 <= turns.head < turns.frontier else None

    def listed(self) -> dict[str, bool]:
        infos = self.runner.run(self.store.list_banks())
        return {info.bank_id: info.pinned for info in infos}

    @rule(number=picks, pin=st.booleans())
    def persist(self, number: int, pin: bool) -> None:
        self.note("put")
        turns = self.grown(number)
        bank_id = self.run(self.put(self.store, turns, pin=pin))
        assert isinstance(bank_id, str)
        self.learn(bank_id, turns, pinned=pin)

    @precondition(lambda self: self.known)
    @rule(number=picks)
    def fork(self, number: int) -> None:
        self.note("fork")
        turns = self.branch(number)
        if turns is not None:
            bank_id = self.run(self.put(self.store, turns))
            assert isinstance(bank_id, str)
            self.learn(bank_id, turns)

    @precondition(lambda self: self.known)
    @rule(number=picks, exact=st.booleans())
    def match(self, number: int, exact: bool) -> None:
        """A prompt that goes on from a branch finds nothing but what is there, and the longest
        of what it could go on from."""
        self.note("match")
        turns = self.branch(number)
        if turns is not None:
            self.run(self.check_match(turns, exact))

    async def check_match(self, turns: Turns, exact: bool) -> None:
        query = turns.query(exact=exact)
        leases = await self.store.match(query)
        try:
            for lease in leases:
                assert lease.bank_id in self.known, "a deleted bank is found"
                assert np.array_equal(lease.content.ids, self.known[lease.bank_id].turns.ids)
            begun = [
                bank_id
                for bank_id, known in self.known.items()
                if known.turns.records
                and np.array_equal(known.turns.ids, query.ids[: known.turns.frontier])
            ]
            # Without keys there are digests of ids every 256 tokens only: shorter banks are missed.
            if begun and not exact and len(leases) < MAX_LEASES:
                longest = max(begun, key=lambda bank_id: self.known[bank_id].turns.frontier)
                assert longest in {lease.bank_id for lease in leases}, "a stored bank is missed"
        finally:
            for lease in leases:
                lease.release()

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
        assert exact or len(leases) == MAX_LEASES or not turns.records, "a stored bank is not found"
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

    @precondition(lambda self: self.known)
    @rule(number=picks, hide=st.booleans())
    def compact(self, number: int, hide: bool) -> None:
        """A chain grows by as many turns as are worth merging; one of them may be deleted."""
        self.note("compact")
        chain = self.chain(number)
        for turns in chain:
            bank_id = self.run(self.put(self.store, turns))
            assert isinstance(bank_id, str)
            self.learn(bank_id, turns)
        if hide and not self.known[chain[1].bank_id].pinned:
            self.run(self.store.delete(chain[1].bank_id))
            del self.known[chain[1].bank_id]
        merged = self.run(self.store.compact())
        assert isinstance(merged, int)
        self.ran["compact: banks merged"] += merged
        self.run(self.check_restores(chain[-1], 100))
        self.run(self.check_restores(chain[0], 100))

    def chain(self, number: int) -> list[Turns]:
        chain = [self.grown(number)]
        while len(chain) < compact.RUN_FILES:
            chain.append(self.more(chain[-1], number))
        return chain

    @precondition(may("restart"))
    @rule()
    def restart(self) -> None:
        self.note("restart")
        self.close()
        self.store = self.open()

    @precondition(may("lose_catalog"))
    @rule()
    def lose_catalog(self) -> None:
        self.note("lose_catalog")
        self.close()
        for name in names(self.folder, "catalog.db*"):
            next(self.folder.rglob(name)).unlink()
        self.store = self.open()

    @precondition(lambda self: self.known and may("evict")(self))
    @rule(number=picks, keep=st.integers(30, 110), grows=st.booleans())
    def evict(self, number: int, keep: int, grows: bool) -> None:
        """A start with a smaller cap, and a bank more: something goes, never what is pinned or
        just written."""
        self.note("evict")
        turns = self.grown(number) if grows else None
        quota_bytes = self.store.disk_bytes * keep // 100
        self.close()
        self.store = self.open(quota_bytes=quota_bytes)
        self.forget_evicted()
        if turns is not None:
            persisted = self.runner.run(self.store.persist(turns.source()))
            if not persisted.detail:
                self.learn(persisted.bank_id, turns)
                assert persisted.bank_id in self.listed(), "the bank just written was evicted"
            self.learn_head(turns)
            self.forget_evicted()
        self.close()
        self.store = self.open()

    def forget_evicted(self) -> None:
        listed = self.listed()
        for bank_id, known in list(self.known.items()):
            if bank_id not in listed:
                assert not known.pinned, "a pinned bank was evicted"
                del self.known[bank_id]
                self.ran["evict: banks evicted"] += 1

    # Four rules for one, so that there is a crash in most lives.

    @precondition(may("crash"))
    @rule(number=picks, deadline=st.integers(1, 25))
    def crash_in_put(self, number: int, deadline: int) -> None:
        self.crash("put", number, deadline)

    @precondition(lambda self: self.known and may("crash")(self))
    @rule(number=picks, deadline=st.integers(1, 25))
    def crash_in_fork(self, number: int, deadline: int) -> None:
        self.crash("fork", number, deadline)

    @precondition(lambda self: self.known and may("crash")(self))
    @rule(number=picks, deadline=st.integers(1, 4))
    def crash_in_delete(self, number: int, deadline: int) -> None:
        self.crash("delete", number, deadline)

    @precondition(may("crash"))
    @rule(number=picks, deadline=st.integers(1, 60))
    def crash_in_compact(self, number: int, deadline: int) -> None:
        self.crash("compact", number, deadline)

    def crash(self, what: str, number: int, deadline: int) -> None:
        """Another process persists, deletes or compacts, and dies in the middle of it."""
        victim = self.pick(number) if what == "delete" else None
        if victim is not None and self.known[victim].pinned:
            what, victim = "put", None
        chain = self.chain(number) if what == "compact" else []
        branch = self.branch(number) if what == "fork" else None
        turns = branch or self.grown(number)
        self.close()

        async def work(files: DyingFiles) -> None:
            config = config_of(self.folder, self.layout)
            async with Store(config, Observed(), files) as store:
                for each in chain:
                    await self.put(store, each)
                files.arm(deadline)
                if chain:
                    await store.compact()
                elif victim is not None:
                    await store.delete(victim)
                else:
                    await self.put(store, turns)

        finished = in_child(work)
        self.store = self.open()
        listed = self.listed()
        if chain:
            for each in chain:
                assert each.bank_id in listed, "lost in compaction"
                self.learn(each.bank_id, each)
                self.learn_head(each)
        elif victim is not None:
            if finished == 0:
                assert victim not in listed
            if victim not in listed:
                del self.known[victim]
        else:
            if finished == 0:
                assert turns.bank_id in listed
            if turns.bank_id in listed:
                self.learn(turns.bank_id, turns)
            self.learn_head(turns)
        self.ran[f"crash in {what}: {'too late' if finished == 0 else 'died'}"] += 1
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
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [WINDOWED, TAILED], ids=["windowed", "tailed"])
def test_store_lives_as_the_model_says(
    layout: StateLayout,
    tmp_path: Path,
    no_blocking_calls: object,
    monkeypatch: pytest.MonkeyPatch,
    measured: Callable[[str], None],
) -> None:
    monkeypatch.setattr(compact, "RUN_FILES", 3)  # so that short lives have chains worth merging
    StoreLife.ran = Counter()
    StoreLife.layout, StoreLife.new_folder = layout, tmp_path
    asyncio.run(started_once(tmp_path, layout))
    run_state_machine_as_test(
        StoreLife,
        settings=settings(
            max_examples=1000 if LONG else 5,
            stateful_step_count=60 if LONG else 15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    ran = StoreLife.ran
    for name in sorted(ran | Counter(dict.fromkeys(RULES, 0))):
        measured(f"{ran[name]:6d}  {name}")
    if LONG:
        followed = {name: ran[f"crash -> {name}"] for name in RULES}
        rare = {name: count for name, count in followed.items() if count < MIN_FOLLOWED}
        assert not rare, f"ran less than {MIN_FOLLOWED} times right after a crash: {rare}"


async def started_once(folder: Path, layout: StateLayout) -> None:
    async with Store(config_of(folder, layout), Observed()):
        pass
