"""Random lives of a store against a simple model: what should be there is, bit for bit.

`make test-long` runs 1,000 lives of up to 60 steps for each of two layouts, prints how often each
rule ran, each pair crash -> next rule, and at which step of which operation the crashes were; it
fails when a pair ran less than 25 times (so 50 in all) or a step was hardly hit.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from bankkit import (
    TAILED,
    WINDOWED,
    MemorySink,
    MemorySource,
    Observed,
    Turns,
    config_of,
)
from blockbuster import BlockBuster
from crashkit import catalog_of
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lifekit import InPlace, LifeFiles, run_in_place
from powerkit import LOSSES

from ds4grpc.bank import common_prefix
from ds4grpc.engine.banks import StoredBank
from ds4grpc.errors import BankPinned
from ds4grpc.layout import StateLayout
from ds4grpc.store import compact
from ds4grpc.store.keys import IDS_STRIDE
from ds4grpc.store.store import Store

T = TypeVar("T")

LONG = bool(os.environ.get("DS4GRPC_LONG"))
picks = st.integers(0, 1 << 16)
losses = st.sampled_from(LOSSES)

MAX_TOKENS = 350  # of a conversation, so that its rows are soon made
MIN_FOLLOWED = 25  # times that each rule must come right after a crash in 1,000 lives
MIN_HIT = 1  # times that a crash must come before each step of an operation
RULES = (
    *("put", "fork", "match", "restore", "pin", "unpin", "use", "delete", "evict"),
    *("compact", "rescan", "restart", "lose_catalog", "crash"),
)
NEED_BANKS = {"fork", "match", "restore", "pin", "unpin", "use", "delete", "evict"}
CRASHES = ("put", "fork", "delete", "evict", "compact", "start")
# How often in one life: what opens a store anew or puts much takes most of the time.
# Right after a crash each may run once more.
AT_MOST = {"crash": 2, "compact": 2, "evict": 1, "restart": 2, "lose_catalog": 1}
END = "its end"
PUBLISH = {"create", "allocate", "write", "sync_data", "rename", "sync_folder", END}
STEPS = {
    "put": PUBLISH,
    "fork": PUBLISH,
    "compact": PUBLISH | {"unlink"},
    "delete": {"create", "rename", "unlink", "sync_folder", END},  # a marker when it is hidden
    "evict": {"rename", "unlink", "sync_folder", END},
    "start": {"unlink", "sync_folder", END},
}


@dataclass
class Known:
    """A bank that should be there."""

    turns: Turns
    pinned: bool = False


def may(name: str) -> Callable[[StoreLife], bool]:
    return lambda life: life.can(name) and life.times[name] < AT_MOST.get(name, 1000)


class StoreLife(RuleBasedStateMachine):
    ran: Counter[str] = Counter()
    layout: StateLayout
    new_folder: Path  # as a first start leaves it
    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        self.folder = self.new_folder.with_name("life")
        self.known: dict[str, Known] = {}
        self.gone: dict[str, Turns] = {}  # deleted or evicted, and not there again
        self.times: Counter[str] = Counter()
        self.seed = 0
        self.before = ""

    @initialize()
    def start(self) -> None:
        shutil.copytree(self.new_folder, self.folder)
        self.files = LifeFiles(self.folder)
        self.store = self.open()

    def open(self, quota_bytes: int = 1 << 30) -> Store:
        config = config_of(self.folder, self.layout, quota_bytes)
        store = Store(config, Observed(), self.files)
        self.run(store.__aenter__())
        return store

    def close(self) -> None:
        self.run(self.store.__aexit__(None, None, None))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def can(self, name: str) -> bool:
        return bool(self.known) or name not in NEED_BANKS

    def act(self, name: str, number: int = 0, *, flag: bool = False) -> None:
        """Runs a rule. `number` and `flag` are its choices."""
        self.note(name)
        act: Callable[[int, bool], None] = getattr(self, f"_{name}")
        act(number, flag)

    def note(self, name: str) -> None:
        self.ran[name] += 1
        self.times[name] += 1
        if self.before == "crash":
            self.ran[f"crash -> {name}"] += 1
        self.before = name

    # What the rules choose from.

    def pick(self, number: int) -> str:
        return sorted(self.known)[number % len(self.known)]

    def grown(self, number: int) -> Turns:
        """A turn more on a known bank, a new conversation, or one that had gone."""
        if self.gone and number % 5 == 1:
            return self.gone[sorted(self.gone)[number % len(self.gone)]]
        turns = self.known[self.pick(number)].turns if self.known and number % 4 else None
        if turns is None or turns.frontier > MAX_TOKENS:
            turns = Turns(self.layout, head=18 * (number % 3))
        return self.more(turns, number)

    def branch(self, number: int) -> Turns:
        """A turn that nobody has seen after the first one of a known bank, or after nothing when
        that bank has no turns."""
        turns = self.known[self.pick(number)].turns
        if not turns.waypoints:
            return self.more(Turns(self.layout, head=turns.head), number)
        return self.more(turns.branch_at(turns.waypoints[0].position), number)

    def more(self, turns: Turns, number: int) -> Turns:
        self.seed += 1
        first = 0 if turns.frontier else turns.head  # no reply ends ahead of the head
        return turns.grow(self.seed, first + 20 + number % 50)

    def chain(self, number: int) -> list[Turns]:
        """As many turns as are worth merging."""
        chain = [self.grown(number)]
        while len(chain) < compact.RUN_FILES:
            chain.append(self.more(chain[-1], number))
        return chain

    # What the model knows.

    def listed(self) -> dict[str, bool]:
        return {info.bank_id: info.pinned for info in self.run(self.store.list_banks())}

    def put(self, turns: Turns, *, pin: bool = False) -> None:
        """Puts what there is room for."""
        persisted = self.run(self.store.persist(turns.source(pin=pin)))
        assert (persisted.detail, persisted.frontier) == ("", turns.frontier)
        if persisted.bank_id == turns.bank_id:
            self.learn(turns, pinned=pin)
        else:  # nothing is new: a longer bank has all of it
            longer = self.known[persisted.bank_id]
            assert np.array_equal(longer.turns.ids[: turns.frontier], turns.ids)
            longer.pinned |= pin

    def learn(self, turns: Turns, *, pinned: bool = False) -> None:
        """A bank is there, and so may be the stable head as a bank of its own."""
        already = self.known.get(turns.bank_id)
        self.known[turns.bank_id] = Known(turns, pinned or (already is not None and already.pinned))
        self.gone.pop(turns.bank_id, None)
        self.learn_head(turns)

    def learn_head(self, turns: Turns) -> None:
        if 16 <= turns.head < turns.frontier:
            head = turns.head_only()
            if head.bank_id not in self.known and head.bank_id in self.listed():
                self.known[head.bank_id] = Known(head)
                self.gone.pop(head.bank_id, None)

    def forget(self, bank_id: str) -> None:
        assert not self.known[bank_id].pinned, "a pinned bank has gone"
        self.gone[bank_id] = self.known.pop(bank_id).turns

    def forget_evicted(self, listed: dict[str, bool]) -> None:
        for bank_id in set(self.known) - set(listed):
            self.forget(bank_id)
            self.ran["evict: banks evicted"] += 1

    # The rules.

    def _put(self, number: int, pin: bool) -> None:
        self.put(self.grown(number), pin=pin)

    def _fork(self, number: int, pin: bool) -> None:
        self.put(self.branch(number), pin=pin)

    def _match(self, number: int, exact: bool) -> None:
        """A prompt that goes on from a branch gets the longest of what it could go on from, and
        nothing but what is there."""
        self.run(self.check_match(self.branch(number), exact))

    async def check_match(self, turns: Turns, exact: bool) -> None:
        query = turns.query(exact=exact)
        leases = await self.store.match(query)
        try:
            self.check_leases(leases)
            best = max((common_prefix(each.content.ids, query.ids) for each in leases), default=0)
        finally:
            for lease in leases:
                lease.release()
        due = max(common_prefix(known.turns.ids, query.ids) for known in self.known.values())
        if exact:  # without keys there are digests of ids at the head and every 256 tokens only
            assert best >= (due - due % IDS_STRIDE or (query.head if due >= query.head else 0))
        else:
            assert best == due

    def check_leases(self, leases: Sequence[StoredBank]) -> None:
        for lease in leases:
            assert lease.bank_id in self.known, "a deleted bank is found"
            turns = self.known[lease.bank_id].turns
            assert np.array_equal(lease.content.ids, turns.ids)
            assert set(lease.content.records) <= set(turns.records)

    def _restore(self, number: int, whole: bool) -> None:
        self.check_restores(self.pick(number), 100 if whole else number % 100 + 1)

    def check_restores(self, bank_id: str, percent: int = 100) -> None:
        self.run(self.restore_from(self.known[bank_id].turns, percent))

    async def restore_from(self, turns: Turns, percent: int) -> None:
        """What is put is what comes back, up to wherever one looks."""
        leases = await self.store.match(turns.query())
        self.check_leases(leases)
        lease = next((each for each in leases if each.bank_id == turns.bank_id), leases[0])
        content = lease.content
        assert common_prefix(content.ids, turns.ids) == turns.frontier, "a stored bank is missed"
        cut = max(1, content.frontier * percent // 100)
        position = self.layout.replay_base(cut, content.held, content.tails)
        sink = MemorySink(self.layout, content.frontier)
        await lease.load(position, sink)
        sink.assert_holds(MemorySource(self.layout, content.ids), position, content.held)
        if lease.bank_id == turns.bank_id:
            whole = self.layout.replay_base(content.frontier, content.held, content.tails)
            assert whole == turns.resumes_at
        for lease in leases:
            lease.release()

    def _pin(self, number: int, _: bool) -> None:
        bank_id = self.pick(number)
        self.run(self.store.pin(bank_id))
        self.known[bank_id].pinned = True

    def _unpin(self, number: int, _: bool) -> None:
        bank_id = self.pick(number)
        self.run(self.store.unpin(bank_id))
        self.known[bank_id].pinned = False

    def _delete(self, number: int, _: bool) -> None:
        bank_id = self.pick(number)
        try:
            self.run(self.store.delete(bank_id))
        except BankPinned:
            assert self.known[bank_id].pinned
        else:
            self.forget(bank_id)

    def _use(self, number: int, proven: bool) -> None:
        self.run(self.store.note_use(self.pick(number), proven=proven))

    def _rescan(self, _: int, __: bool) -> None:
        self.run(self.store.rescan())

    def _compact(self, number: int, hide: bool) -> None:
        """A chain grows by as many turns as are worth merging; one of them may be deleted."""
        chain = self.chain(number)
        for turns in chain:
            self.put(turns)
        if hide and chain[1].bank_id in self.known and not self.known[chain[1].bank_id].pinned:
            self.run(self.store.delete(chain[1].bank_id))
            self.forget(chain[1].bank_id)
        self.ran["compact: banks merged"] += self.run(self.store.compact())
        self.check_restores(chain[-1].bank_id)

    def _restart(self, _: int, __: bool) -> None:
        self.close()
        self.store = self.open()

    def _lose_catalog(self, _: int, __: bool) -> None:
        self.close()
        self.drop_catalog()
        self.store = self.open()

    def drop_catalog(self) -> None:
        for path in self.folder.rglob("catalog.db*"):
            path.unlink()

    def _evict(self, number: int, grows: bool) -> None:
        """A start with a smaller cap, and a bank more: something goes, never what is pinned or
        just written."""
        turns = self.grown(number) if grows else None
        quota_bytes = self.store.disk_bytes * (40 + number % 80) // 100
        self.close()
        self.store = self.open(quota_bytes)
        self.forget_evicted(self.listed())
        if turns is not None:
            persisted = self.run(self.store.persist(turns.source()))
            listed = self.listed()
            if persisted.bank_id == turns.bank_id and not persisted.detail:
                self.learn(turns)
                assert turns.bank_id in listed, "the bank just written was evicted"
            self.learn_head(turns)
            self.forget_evicted(listed)
        self.close()
        self.store = self.open()

    def _crash(self, number: int, flag: bool) -> None:
        """Right after another crash: what else to choose comes from the one number."""
        what = CRASHES[number % len(CRASHES)]
        self.crash_in(what, number, flag, 0, LOSSES[number // 8 % len(LOSSES)])

    def crash_in(self, what: str, number: int, flag: bool, at: int, loss: str) -> None:
        """The power goes after any step of an operation, or the process is killed (all that was
        written survives then). In between no model is needed: what was confirmed counts, and what
        was begun is there or not. Then any rule runs, all as often."""
        if what == "delete" and all(known.pinned for known in self.known.values()):
            what = "put"
        if what in NEED_BANKS and not self.known:
            what = "put"
        operate: Callable[[int, bool], Callable[[bool], None]] = getattr(self, f"crash_in_{what}")
        settle = operate(number, flag)
        # Hypothesis likes small numbers; these are to be evenly spread.
        chance = random.Random(f"{self.seed} {self.times['crash']} {number} {at}")
        num_steps = self.files.crash(chance, loss)
        steps = [step.operation for step in self.files.steps]
        self.close()
        self.files.put_picture()
        self.store = self.open()
        settle(num_steps == len(steps))
        self.ran[f"crash in {what} before {[*steps, END][num_steps]}"] += 1
        self.ran[f"crash: {loss} of the un-synced survives"] += 1
        self.check_all()
        if self.known:
            self.check_restores(self.pick(number))
        due = chance.choice([name for name in RULES if self.can(name)])
        self.act(due, number, flag=flag)

    # Each of these runs an operation with its steps recorded, and returns what is to be said of
    # its outcome: given whether it was confirmed.

    def crash_in_put(self, number: int, pin: bool) -> Callable[[bool], None]:
        return self.put_recorded(self.grown(number), pin=pin)

    def crash_in_fork(self, number: int, pin: bool) -> Callable[[bool], None]:
        return self.put_recorded(self.branch(number), pin=pin)

    def put_recorded(self, turns: Turns, *, pin: bool) -> Callable[[bool], None]:
        self.files.arm()
        bank_id = self.run(self.store.persist(turns.source(pin=pin))).bank_id

        def settle(confirmed: bool) -> None:
            listed = self.listed()
            assert bank_id in listed or not confirmed
            assert listed.get(bank_id) or not (confirmed and pin)
            if bank_id == turns.bank_id and bank_id in listed:
                self.learn(turns)
            if bank_id in listed:
                self.known[bank_id].pinned = listed[bank_id]  # its pin may be lost before the end
            self.learn_head(turns)

        return settle

    def crash_in_delete(self, number: int, _: bool) -> Callable[[bool], None]:
        loose = [bank_id for bank_id, known in sorted(self.known.items()) if not known.pinned]
        victim = loose[number % len(loose)]
        self.files.arm()
        self.run(self.store.delete(victim))

        def settle(confirmed: bool) -> None:
            is_there = victim in self.listed()
            assert not (confirmed and is_there), "a deleted bank is there again"
            if not is_there:
                self.forget(victim)

        return settle

    def crash_in_evict(self, number: int, _: bool) -> Callable[[bool], None]:
        turns = self.grown(number)
        quota_bytes = self.store.disk_bytes * (40 + number % 80) // 100
        self.close()
        self.files.arm()
        self.store = self.open(quota_bytes)
        self.run(self.store.persist(turns.source()))
        kept = self.listed()

        def settle(confirmed: bool) -> None:
            listed = self.listed()
            if confirmed:
                assert listed == kept, "an evicted bank is there again, or another has gone"
            new = {turns.bank_id, turns.head_only().bank_id}
            assert set(kept) - new <= set(listed), "a bank that had room has gone"
            if turns.bank_id in listed:
                self.learn(turns)
            self.learn_head(turns)
            self.forget_evicted(listed)

        return settle

    def crash_in_compact(self, number: int, _: bool) -> Callable[[bool], None]:
        chain = self.chain(number)
        for turns in chain:
            self.put(turns)
        self.files.arm()
        self.ran["compact: banks merged"] += self.run(self.store.compact())
        return lambda confirmed: self.check_restores(chain[-1].bank_id)

    def crash_in_start(self, number: int, loses_catalog: bool) -> Callable[[bool], None]:
        """A second crash, in the start after a first one."""
        settle_put = self.put_recorded(self.grown(number), pin=False)
        num_steps = self.files.crash(random.Random(number), "all")
        confirmed = num_steps == len(self.files.steps)
        self.close()
        self.files.put_picture()
        if loses_catalog:
            self.drop_catalog()
        self.files.arm()
        self.store = self.open()
        return lambda _: settle_put(confirmed)

    # What hypothesis may choose.

    @precondition(may("put"))
    @rule(number=picks, flag=st.booleans())
    def put_rule(self, number: int, flag: bool) -> None:
        self.act("put", number, flag=flag)

    @precondition(may("fork"))
    @rule(number=picks, flag=st.booleans())
    def fork_rule(self, number: int, flag: bool) -> None:
        self.act("fork", number, flag=flag)

    @precondition(may("match"))
    @rule(number=picks, flag=st.booleans())
    def match_rule(self, number: int, flag: bool) -> None:
        self.act("match", number, flag=flag)

    @precondition(may("restore"))
    @rule(number=picks, flag=st.booleans())
    def restore_rule(self, number: int, flag: bool) -> None:
        self.act("restore", number, flag=flag)

    @precondition(may("pin"))
    @rule(number=picks)
    def pin_rule(self, number: int) -> None:
        self.act("pin", number)

    @precondition(may("unpin"))
    @rule(number=picks)
    def unpin_rule(self, number: int) -> None:
        self.act("unpin", number)

    @precondition(may("use"))
    @rule(number=picks, flag=st.booleans())
    def use_rule(self, number: int, flag: bool) -> None:
        self.act("use", number, flag=flag)

    @precondition(may("delete"))
    @rule(number=picks)
    def delete_rule(self, number: int) -> None:
        self.act("delete", number)

    @precondition(may("evict"))
    @rule(number=picks, flag=st.booleans())
    def evict_rule(self, number: int, flag: bool) -> None:
        self.act("evict", number, flag=flag)

    @precondition(may("compact"))
    @rule(number=picks, flag=st.booleans())
    def compact_rule(self, number: int, flag: bool) -> None:
        self.act("compact", number, flag=flag)

    @precondition(may("rescan"))
    @rule()
    def rescan_rule(self) -> None:
        self.act("rescan")

    @precondition(may("restart"))
    @rule()
    def restart_rule(self) -> None:
        self.act("restart")

    @precondition(may("lose_catalog"))
    @rule()
    def lose_catalog_rule(self) -> None:
        self.act("lose_catalog")

    # Two rules for one, so that there is a crash in most lives.

    @precondition(may("crash"))
    @rule(what=st.sampled_from(CRASHES), number=picks, flag=st.booleans(), at=picks, loss=losses)
    def crash_rule(self, what: str, number: int, flag: bool, at: int, loss: str) -> None:
        self.note("crash")
        self.crash_in(what, number, flag, at, loss)

    @precondition(may("crash"))
    @rule(what=st.sampled_from(CRASHES), number=picks, flag=st.booleans(), at=picks)
    def kill_rule(self, what: str, number: int, flag: bool, at: int) -> None:
        self.note("crash")
        self.crash_in(what, number, flag, at, "all")

    # What holds after each step.

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "store"):
            self.check_all(whole=self.before in ("crash", "compact"))

    def check_all(self, *, whole: bool = True) -> None:
        """`whole`: each block of each file is read."""
        pinned = {bank_id: known.pinned for bank_id, known in self.known.items()}
        assert self.listed() == pinned
        assert self.store.num_leased == 0
        if self.before in ("match", "restore", "use"):
            return  # which change no file
        found = {name: path for path, _, files in os.walk(self.folder) for name in files}
        rows = self.rows()
        files = {name for name in found if name.endswith(".bank")}
        assert set(rows) == files, "a row without a file, or a file without a row"
        assert not [name for name, path in found.items() if path.endswith("quarantine")]
        assert not [name for name in found if name.endswith((".tmp", ".dead"))]
        for name, size_bytes in rows.items():
            assert os.path.getsize(os.path.join(found[name], name)) == size_bytes
        markers = {name for name in found if name.endswith(".pin")}
        assert markers == {f"{bank_id}.pin" for bank_id in pinned if pinned[bank_id]}
        hidden = {name.partition(".")[0] for name in rows} - set(pinned)
        assert {name for name in found if name.endswith(".hidden")} == {
            f"{bank_id}.hidden" for bank_id in hidden
        }
        if whole:
            self.run(self.check_blocks())

    def rows(self) -> dict[str, int]:
        with closing(sqlite3.connect(catalog_of(self.folder))) as catalog:
            found = catalog.execute("select bank_id, base, size_bytes from banks").fetchall()
        return {f"{bank_id}.{base}.bank": size_bytes for bank_id, base, size_bytes in found}

    async def check_blocks(self) -> None:
        verdicts = [verdict async for verdict in self.store.verify()]
        assert [verdict.detail for verdict in verdicts if not verdict.ok] == []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", [WINDOWED, TAILED], ids=["windowed", "tailed"])
def test_store_lives_as_the_model_says(
    layout: StateLayout,
    tmp_path: Path,
    no_blocking_calls: BlockBuster,
    monkeypatch: pytest.MonkeyPatch,
    measured: Callable[[str], None],
) -> None:
    no_blocking_calls.deactivate()  # everything blocks: the store has no threads here
    run_in_place(monkeypatch)
    monkeypatch.setattr(compact, "RUN_FILES", 3)  # so that short lives have chains worth merging
    StoreLife.ran = Counter()
    StoreLife.layout, StoreLife.new_folder = layout, tmp_path / "new"
    with asyncio.Runner() as StoreLife.runner:
        StoreLife.runner.get_loop().set_default_executor(InPlace())
        StoreLife.runner.run(started_once(StoreLife.new_folder, layout))
        run_state_machine_as_test(
            StoreLife,
            settings=settings(
                max_examples=1000 if LONG else 10,
                stateful_step_count=60 if LONG else 20,
                deadline=None,
                derandomize=not LONG,  # a few lives that are always the same, or new ones
                phases=[Phase.generate, Phase.shrink] if LONG else [Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    ran = StoreLife.ran
    followed = {f"crash -> {name}": ran[f"crash -> {name}"] for name in RULES}
    hit = {
        name: ran[name]
        for what, steps in STEPS.items()
        for name in (f"crash in {what} before {step}" for step in steps)
    }
    for name in sorted({*ran, *RULES, *followed, *hit}):
        measured(f"{ran[name]:6d}  {name}")
    if LONG:
        rare = {name: count for name, count in followed.items() if count < MIN_FOLLOWED}
        rare |= {name: count for name, count in hit.items() if count < MIN_HIT}
        assert not rare, f"ran too rarely: {rare}"


async def started_once(folder: Path, layout: StateLayout) -> None:
    async with Store(config_of(folder, layout), Observed()):
        pass
