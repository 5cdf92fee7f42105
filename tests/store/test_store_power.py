"""The power fails after every file operation: what was confirmed as kept is there, and whole."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from bankkit import Observed, Turns, config_of
from crashkit import Tell, check, live, merge
from powerkit import LOSSES, RecordingFiles, replay

from ds4grpc.store.files import Files
from ds4grpc.store.store import Store

LONG = bool(os.environ.get("DS4GRPC_LONG"))  # `make test-long`: every step and loss, three seeds


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("life", [live, merge])
def test_power_loss_after_any_step_leaves_a_good_folder(
    life: Callable[[Path, Files, Tell], Awaitable[None]],
    tmp_path: Path,
    no_blocking_calls: object,
    measured: Callable[[str], None],
) -> None:
    files = RecordingFiles(tmp_path / "whole" / "banks")
    files.root.parent.mkdir()
    told: list[tuple[int, str]] = []
    asyncio.run(
        _awaited(life(files.root, files, lambda line: told.append((len(files.steps), line))))
    )
    kinds = {step.operation for step in files.steps}
    assert {"make_folder", "create", "write", "sync_data", "rename", "unlink"} <= kinds
    num_steps = len(files.steps)
    cases = [
        (after, loss, seed)
        for after in range(num_steps + 1)
        for loss in LOSSES
        for seed in range(3 if loss in ("some", "torn") else 1)
    ]
    chosen = cases if LONG else cases[:: len(cases) // 24]
    for after, loss, seed in chosen:
        folder = tmp_path / f"{after}-{loss}-{seed}"
        replay(files, after, loss, seed, folder)
        due = [line for step, line in told if step <= after]
        try:
            asyncio.run(check(folder / files.root.name, due))
        except BaseException as error:
            last = files.steps[after - 1] if after else None
            name = f"{last.operation} {Path(last.path).name}" if last else "nothing"
            error.add_note(f"after step {after} ({name}), {loss} survives, seed {seed}")
            raise
    measured(f"{len(chosen)} power losses after {num_steps} steps")


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def test_a_chain_is_removed_for_good_from_its_end(tmp_path: Path) -> None:
    """Else a loss of power might take a parent and leave the child, which looks like damage."""
    files = RecordingFiles(tmp_path / "banks")
    chain = [Turns().grow(1, 40)]
    for seed in (2, 3):
        chain.append(chain[-1].grow(seed, 40))
    async with Store(config_of(files.root), Observed(), files) as store:
        for turns in chain:
            await store.persist(turns.source())
        for turns in chain:  # those that others need are hidden first
            await store.delete(turns.bank_id)
        assert await store.list_banks() == []
    renames = {
        os.path.basename(step.path).partition(".")[0]: number
        for number, step in enumerate(files.steps)
        if step.operation == "rename" and step.path.endswith(".dead")
    }
    assert list(renames) == [turns.bank_id for turns in reversed(chain)]
    syncs = [
        (number, os.path.basename(step.path))
        for number, step in enumerate(files.steps)
        if step.operation == "sync_folder"
    ]
    for child, parent in itertools.pairwise(renames):
        between = [path for number, path in syncs if renames[child] < number < renames[parent]]
        assert child[:2] in between
