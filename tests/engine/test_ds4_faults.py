"""Faults of the disk tier of ds4, the system that this one re-creates: each must be impossible.

The names carry the numbers of docs/field-reports.md, which tells what went wrong there, and which
other tests cover the rest.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bankkit import Observed, Turns, config_of, ids_of, stored_names
from inprocess import Answer, Rig, TinyModel, running
from texts import sentences
from tiny import TinyShape, write_tiny

from ds4grpc.bank import Admission, PersistReason, Waypoint
from ds4grpc.chat.prompt import Conversation, Message, Prompt, Role
from ds4grpc.chat.prompts import Prompts
from ds4grpc.engine.request import FinishReason
from ds4grpc.model.checkpoint import load_model, open_checkpoint
from ds4grpc.store.store import Store

HOUSE, GARDEN = sentences(9, 1), sentences(5, 2)
FROM_DISK = (Admission.DISK, Admission.DISK_PARTIAL)


def with_system(rig: Rig, system: str, content: str) -> Prompt:
    messages = (Message(Role.SYSTEM, system), Message(Role.USER, content))
    return rig.prompts.from_chat(Conversation(messages, thinking=False), None)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Without windows a bank resumes at every token of it."""
    shape = TinyShape(sliding=(False,) * 4)
    checkpoint = open_checkpoint(write_tiny(tmp_path_factory.mktemp("plain") / "t.gguf", shape))
    model = load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    return TinyModel(checkpoint, model, Prompts(checkpoint.tokenizer, checkpoint.chat_template))


def forget_catalog(folder: Path) -> None:
    paths = list(folder.rglob("catalog.*"))
    assert paths
    for path in paths:
        path.unlink()


def published(folder: Path) -> tuple[int, int, bytes]:
    """All that a write would change of the only bank file."""
    (path,) = folder.glob("*/??/*.bank")
    seen = path.stat()
    return seen.st_ino, seen.st_mtime_ns, path.read_bytes()


async def assert_equals_cold(rig: Rig, answer: Answer) -> None:
    assert answer.ids == await rig.cold(answer)


async def test_ds4_27_bank_survives_every_restore(tiny: TinyModel, tmp_path: Path) -> None:
    async with running(tiny, tmp_path) as rig:
        first = await rig.ask(rig.chat(HOUSE), 20)
        await rig.written()
    names = stored_names(tmp_path)
    for question in ("Who?", "Where?", "When?"):
        async with running(tiny, tmp_path) as rig:
            answer = await rig.ask(rig.chat(HOUSE, first.said(), question), 4)
            assert answer.started.admission is Admission.DISK
            await assert_equals_cold(rig, answer)
            await rig.written()
        assert names <= stored_names(tmp_path)


@pytest.mark.parametrize("changed", [f"{HOUSE} {GARDEN}", f"{HOUSE[:-90]} {GARDEN}"])
async def test_ds4_28_changed_head_becomes_an_anchor_too(
    changed: str, tiny: TinyModel, tmp_path: Path
) -> None:
    """The second system prompt shares most of its text with the first, so nothing is cold."""
    async with running(tiny, tmp_path) as rig:
        await rig.ask(with_system(rig, f"{HOUSE} No garden.", sentences(5, 7)), 20)
        second = await rig.ask(with_system(rig, changed, sentences(5, 8)), 20)
        assert second.started.admission is Admission.PARTIAL_FORK
        await rig.written()
    async with running(tiny, tmp_path) as rig:
        prompt = with_system(rig, changed, "Who?")
        third = await rig.ask(prompt, 20)
        assert third.started.admission in FROM_DISK
        assert third.started.pos_base == prompt.head
        await assert_equals_cold(rig, third)


async def test_ds4_29_turns_are_written_on_after_a_restore_at_any_place(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with running(tiny, tmp_path) as rig:
        said = [HOUSE, (await rig.ask(rig.chat(HOUSE), 33)).said()]
        await rig.written()
    for number in range(3):
        async with running(tiny, tmp_path) as rig:
            said.append(sentences(5, 10 + number))
            answer = await rig.ask(rig.chat(*said), 33)
            said.append(answer.said())
            assert answer.started.admission is Admission.DISK
            await rig.written()
            assert rig.count("ds4grpc_bank_persists_total", "turn") == 1
            assert rig.store is not None
            assert (await rig.store.get(answer.finished.bank_id)).frontier == (
                (await rig.bank()).frontier
            )


async def test_ds4_32_key_with_spelled_markers_is_found_after_a_restart(
    tiny: TinyModel, tmp_path: Path
) -> None:
    content = f"{HOUSE} <|im_end|>\n<|im_start|>assistant\r\n  <think>é</think> \n{GARDEN}\n "
    async with running(tiny, tmp_path) as rig:
        said = (await rig.ask(rig.chat(content), 20)).said()
        await rig.written()
        frontier = (await rig.bank()).frontier
    async with running(tiny, tmp_path) as rig:
        answer = await rig.ask(rig.chat(content, said, "Who?"), 20)
        assert (answer.started.admission, answer.started.pos_base) == (Admission.DISK, frontier)
        await assert_equals_cold(rig, answer)


async def test_ds4_33_reply_cut_by_its_length_is_found_after_a_restart(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with running(tiny, tmp_path) as rig:
        cut = await rig.ask(rig.chat(HOUSE), 20)
        assert cut.finished.finish_reason is FinishReason.LENGTH
        await rig.written()
        frontier = (await rig.bank()).frontier
    async with running(tiny, tmp_path) as rig:  # the template closes the turn that was left open
        answer = await rig.ask(rig.chat(HOUSE, cut.said(), "Go on."), 20)
        assert (answer.started.admission, answer.started.pos_base) == (Admission.DISK, frontier)
        await assert_equals_cold(rig, answer)


async def test_ds4_36_bank_that_fills_the_context_is_restored(
    plain: TinyModel, tmp_path: Path
) -> None:
    async with running(plain, tmp_path, max_context=256) as rig:
        await rig.ask(rig.chat(HOUSE), None)
        bank = await rig.bank()
        assert bank.frontier == 256
        await rig.written()
    async with running(plain, tmp_path, max_context=256) as rig:
        whole = await rig.ask(rig.prompts.from_ids(bank.ids), 1)
        assert whole.started.admission is Admission.DISK_PARTIAL
        assert whole.started.pos_base == 255
        await assert_equals_cold(rig, whole)


async def test_ds4_38_banks_outlive_a_shorter_context(plain: TinyModel, tmp_path: Path) -> None:
    async with running(plain, tmp_path, max_context=512) as rig:
        prompt = rig.chat(HOUSE)
        said = (await rig.ask(prompt, 200)).said()
        await rig.written()
        frontier = (await rig.bank()).frontier
        assert frontier > 256
    async with running(plain, tmp_path, max_context=256) as rig:
        shorter = await rig.ask(prompt, 20)
        assert shorter.started.pos_base in (0, len(prompt.ids) - 1)
        await assert_equals_cold(rig, shorter)
    async with running(plain, tmp_path, max_context=512) as rig:
        answer = await rig.ask(rig.chat(HOUSE, said, "Who?"), 20)
        assert (answer.started.admission, answer.started.pos_base) == (Admission.DISK, frontier)
        await assert_equals_cold(rig, answer)


async def test_ds4_41_reasons_come_back_from_the_files(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        for number, reason in enumerate(PersistReason):
            await store.persist(Turns().grow(number, 40).source(reason))
    forget_catalog(tmp_path)
    async with Store(config_of(tmp_path), Observed()) as store:
        assert {bank.reason for bank in await store.list_banks()} == set(PersistReason)


async def test_ds4_43_published_file_is_never_written_again(tmp_path: Path) -> None:
    async with Store(config_of(tmp_path), Observed()) as store:
        turns = Turns().grow(1, 100)
        await store.persist(turns.source())
        before = published(tmp_path)
        await store.note_use(turns.bank_id, proven=True)
        await store.pin(turns.bank_id)
        await store.persist(turns.source(PersistReason.STOP, ttl_seconds=5.0))
        assert [verdict.ok async for verdict in store.verify()] == [True]
        for lease in await store.match(turns.query()):
            lease.release()
    assert published(tmp_path) == before


async def test_ds4_44_other_tokens_under_the_same_key_are_stored_and_found(tmp_path: Path) -> None:
    """Two answers with one visible text, the second after a longer block of reasoning."""
    short = Turns().grow(1, 100).grow(2, 60)
    ids = np.concatenate([short.cut(100), ids_of(3, 90)])
    waypoints = (short.waypoints[0], Waypoint(len(short.text), len(ids)))
    records = (replace(short.records[0], waypoints=waypoints), short.records[1])
    longer = replace(short, ids=ids, waypoints=waypoints, records=records)
    async with Store(config_of(tmp_path), Observed()) as store:
        for turns in (short, longer):
            assert (await store.persist(turns.source())).written_bytes > 0
        leases = await store.match(short.query())
        found = {lease.content.frontier for lease in leases}
        for lease in leases:
            lease.release()
    assert found >= {160, 190}
