"""What goes wrong on a real engine hurts one request: steps, restores, deadlines, lost writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from bankkit import eventually, stored_names
from inprocess import Answer, HeldFiles, Rig, TinyModel, running
from texts import sentences

from ds4grpc.bank import Admission, MissReason, PersistReason, Trust
from ds4grpc.engine import rates
from ds4grpc.engine.request import FinishReason
from ds4grpc.errors import DeadlineExceeded, EngineFailed, InvalidRequest, Overloaded
from ds4grpc.model.interface import Chunk
from ds4grpc.store.files import Files
from ds4grpc.store.format import PREAMBLE, data_start, decode_header, decode_preamble

RULES = sentences(6, 1)  # about 90 tokens
OTHERS = sentences(6, 2)


async def stored_turn(rig: Rig) -> str:
    """A first turn whose bank is on disk; returns its reply."""
    answer = await rig.ask(rig.chat(RULES), 20)
    await rig.written()
    return answer.said()


def damage(folder: Path) -> None:
    """Flips a bit of the last row of the only bank file."""
    (path,) = folder.glob("*/??/*.bank")
    data = bytearray(path.read_bytes())
    length, value = decode_preamble(bytes(data[: PREAMBLE.size]))
    header = decode_header(bytes(data[PREAMBLE.size : PREAMBLE.size + length]), value)
    last = header.sections[-1]
    data[data_start(length) + last.offset + last.length - 1] ^= 1
    path.write_bytes(data)


async def test_restored_bank_answers_as_a_cold_start_does(tiny: TinyModel, tmp_path: Path) -> None:
    async with running(tiny, tmp_path) as rig:
        said = await stored_turn(rig)
        bank = await rig.bank()
    async with running(tiny, tmp_path) as rig:
        answer = await rig.ask(rig.chat(RULES, said, "Who?"), 20)
        started = answer.started
        assert (started.admission, started.miss_reason) == (Admission.DISK, None)
        assert started.pos_base == bank.frontier
        assert started.disk_tokens == started.prompt_tokens - started.suffix_tokens
        assert started.memory_tokens == 0
        assert answer.ids == await rig.cold(answer)
        assert rig.store is not None
        await rig.engine.ask(lambda: None)  # its note to the store is under way by now
        info = await rig.store.get(started.bank_id)
        assert Trust.PROVEN in info.trust and info.hits == 1


async def test_restore_that_fails_a_check_is_a_miss_and_a_normal_answer(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with running(tiny, tmp_path) as rig:
        said = await stored_turn(rig)
    damage(tmp_path)
    async with running(tiny, tmp_path) as rig:
        answer = await rig.ask(rig.chat(RULES, said, "Who?"), 20)
        assert answer.started.admission is Admission.COLD
        assert answer.started.miss_reason is MissReason.NO_RECORD
        assert answer.started.cached_tokens == 0
        assert answer.ids == await rig.cold(answer)
        assert rig.count("ds4grpc_bank_restores_total", "checksum") == 1
        assert rig.store is not None and rig.store.banks_by_trust["quarantined"] == 1


class SlowFiles(Files):
    """A disk that takes `pause` seconds for each read."""

    def __init__(self) -> None:
        self.pause = 0.0

    def before(self, operation: str, path: str) -> None:
        if operation == "read":
            time.sleep(self.pause)


async def test_slow_disk_is_overruled_and_tried_again(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [sentences(6, seed) for seed in range(40, 44)]
    async with running(tiny, tmp_path, slots=4) as rig:
        said = [(await rig.ask(rig.chat(text), 20)).said() for text in texts]
        await rig.written()
    files = SlowFiles()
    async with running(tiny, tmp_path, slots=4, files=files) as rig:
        await rig.ask(rig.chat(sentences(6, 50)), 20)  # how fast it prefills is known by now
        files.pause = 0.05

        async def follow(number: int) -> Answer:
            return await rig.ask(rig.chat(texts[number], said[number], "Who?"), 20)

        first = await follow(0)
        assert first.started.admission is Admission.DISK
        second = await follow(1)
        assert second.started.admission is Admission.COLD
        assert second.started.miss_reason is MissReason.LOAD_SLOWER
        assert second.ids == await rig.cold(second)
        files.pause = 0.0
        third = await follow(2)  # nobody has looked whether the disk is well again
        assert third.started.miss_reason is MissReason.LOAD_SLOWER
        monkeypatch.setattr(rates, "_BELIEF_SECONDS", 0.02)
        await asyncio.sleep(0.5)
        fourth = await follow(3)
        assert fourth.started.admission is Admission.DISK
        assert fourth.ids == await rig.cold(fourth)
        await rig.forget_all()
        monkeypatch.undo()
        again = await follow(0)  # measured as fast: no time has to pass any more
        assert again.started.admission is Admission.DISK


async def test_step_that_fails_after_a_restore_takes_its_bank_out_of_service(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with running(tiny, tmp_path) as rig:
        said = await stored_turn(rig)
    async with running(tiny, tmp_path) as rig:
        rig.model.fails = lambda chunk: True
        with pytest.raises(EngineFailed):
            await rig.ask(rig.chat(RULES, said, "Who?"))
        rig.model.fails = lambda chunk: False
        store = rig.store
        assert store is not None
        await eventually(lambda: store.banks_by_trust["quarantined"] == 1)
        rig.errors.expect("step failed")


@pytest.mark.parametrize("how", ["fails", "overflows"])
async def test_failing_step_hurts_only_its_own_request(how: str, tiny: TinyModel) -> None:
    async with running(tiny, slots=4) as rig:
        texts = (RULES, OTHERS, sentences(6, 3))
        requests = [rig.request(rig.chat(text), 30, bypass=True) for text in texts]
        wanted = [(await rig.answer(request)).ids for request in requests]
        bad = rig.chat("What is the tallest tower here?")
        setattr(rig.model, how, among(bad.ids.tolist()[-12:]))
        tasks = [asyncio.create_task(rig.answer(request)) for request in requests]
        await rig.until(lambda: rig.model.num_steps > 100)
        for bypass in (True, False):
            with pytest.raises(EngineFailed):
                await rig.ask(bad, bypass=bypass)
        assert [(await task).ids for task in tasks] == wanted
        assert await rig.banks() == [], "what failed in its first chunk left something"
        rig.errors.expect("step failed", "step failed")


def among(ids: list[int]) -> Callable[[Chunk], bool]:
    def fails(chunk: Chunk) -> bool:
        return ids == chunk.ids[-len(ids) :]

    return fails


async def test_reply_that_fails_half_way_leaves_its_prompt_alone(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        prompt = rig.chat(RULES)
        rig.model.fails = lambda chunk: chunk.start == len(prompt.ids) + 5
        received = Answer()
        with pytest.raises(EngineFailed):
            await rig.answer(rig.request(prompt, 30), received)
        assert len(received.ids) >= 5
        assert (await rig.bank()).ids.tolist() == prompt.ids.tolist()
        rig.model.fails = lambda chunk: False
        again = await rig.ask(prompt, 30)
        assert again.ids == await rig.cold(again)
        rig.errors.expect("step failed")


async def test_write_of_a_bank_that_is_cut_meanwhile_is_dropped(
    tiny: TinyModel, tmp_path: Path
) -> None:
    files = HeldFiles()
    edited = RULES.replace("6.", "7.")
    async with running(tiny, tmp_path, slots=1, files=files) as rig:
        files.hold("write")
        first = await rig.ask(rig.chat(RULES), 20)
        await eventually(files.waiting.is_set)
        second = await rig.ask(rig.chat(edited), 20)
        assert second.started.admission is Admission.PARTIAL_TRUNCATE
        files.release()
        await rig.written()
        assert rig.count("ds4grpc_bank_persist_failures_total", "moved") == 1
        # What was cut off had been copied before, to be written all the same.
        assert rig.count("ds4grpc_bank_persists_total", "evict") == 1
        assert rig.count("ds4grpc_bank_persists_total", "turn") == 1
    async with running(tiny, tmp_path) as rig:
        for text, answer in ((RULES, first), (edited, second)):
            again = await rig.ask(rig.chat(text, answer.said(), "Who?"), 20)
            assert again.started.admission is Admission.DISK
            assert again.started.bank_id == answer.finished.bank_id
            assert again.ids == await rig.cold(again)


async def test_write_that_ends_after_a_cut_says_nothing_of_the_new_bank(
    tiny: TinyModel, tmp_path: Path
) -> None:
    files = HeldFiles()
    async with running(tiny, tmp_path, slots=1, files=files) as rig:
        files.hold("rename")  # all rows are written by then
        first = await rig.ask(rig.chat("What is the tallest tower here?"), 100)
        await eventually(files.waiting.is_set)
        second = await rig.ask(rig.chat("What is the widest tower here?"), 8)
        assert second.started.admission is Admission.PARTIAL_TRUNCATE
        files.release()
        store = rig.store
        assert store is not None
        await eventually(lambda: rig.count("ds4grpc_bank_persists_total", "turn") == 1)
        await asyncio.sleep(0.05)
        written = [persisted async for _, persisted in rig.engine.flush(PersistReason.STOP)]
        assert [persisted.bank_id for persisted in written] == [second.finished.bank_id]
        listed = {info.bank_id for info in await store.list_banks()}
        assert listed == {first.finished.bank_id, second.finished.bank_id}


async def test_bank_that_loses_its_slot_is_staged_and_comes_back(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with running(tiny, tmp_path, slots=1) as rig:
        tower = "What is the tallest tower here?"  # fewer than 64 tokens: no write after the turn
        first = await rig.ask(rig.chat(tower), 10)
        assert stored_names(tmp_path) == set()
        await rig.ask(rig.chat(OTHERS), 10)
        await rig.until(lambda: rig.count("ds4grpc_bank_persists_total", "evict") == 1)
        assert rig.count("ds4grpc_bank_evictions_total", "dropped") == 0
        second = await rig.ask(rig.chat(tower, first.said(), "And the widest?"), 10)
        assert second.started.admission is Admission.DISK
        assert second.ids == await rig.cold(second)


async def test_bank_without_room_in_staging_is_dropped_and_counted(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with running(tiny, tmp_path, slots=1, staging_bytes=1) as rig:
        await rig.ask(rig.chat("What is the tallest tower here?"), 10)
        await rig.ask(rig.chat("Is it so? " + OTHERS), 10, no_store=True)
        assert rig.count("ds4grpc_bank_evictions_total", "dropped") == 1
    assert stored_names(tmp_path) == set()


async def test_deadline_and_time_limit_end_a_request_where_it_stands(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        now = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await rig.ask(rig.chat(RULES), 800, deadline=now + 0.3)
        answer = await rig.ask(rig.chat(OTHERS), 800, time_limit_seconds=0.3)
        assert answer.finished.finish_reason is FinishReason.TIME_LIMIT
        assert 0 < len(answer.ids) < 800


async def test_id_of_a_cancelled_request_serves_another_one_at_once(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        first = await rig.ask(rig.chat(RULES), 20)
        follows = rig.request(rig.chat(RULES, first.said(), "Who?"), request_id="same")
        other = rig.request(rig.chat(OTHERS), request_id="same")
        with ExitStack() as held:
            first_lookup = held.enter_context(rig.workers_held())
            task = asyncio.create_task(rig.answer(follows))
            await rig.until(lambda: rig.is_planning(("", "same")))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await rig.forgotten(("", "same"))
            held.enter_context(rig.workers_held())
            task = asyncio.create_task(rig.answer(other))
            await rig.until(lambda: rig.is_planning(("", "same")))
            first_lookup.set()  # its result comes while the other one waits for its own
            await asyncio.sleep(0.05)
        answer = await task
        assert list(answer.started.prompt_token_ids) == other.prompt.ids.tolist()
        assert answer.ids == await rig.cold(answer)


async def test_request_that_can_never_run_is_refused_with_numbers(tiny: TinyModel) -> None:
    async with running(tiny, max_context=64, slots=1, queue=1) as rig:
        with pytest.raises(InvalidRequest, match="the limit is 64"):
            await rig.ask(rig.chat(RULES))
        outside = rig.prompts.from_ids(rig.chat("Who?").ids + 49152)
        with pytest.raises(InvalidRequest, match="outside the vocabulary of 49,152"):
            await rig.ask(outside)
        with pytest.raises(InvalidRequest, match="no tokens"):
            await rig.ask(rig.prompts.from_ids(outside.ids[:0]))
        with rig.model.held():
            tasks = [asyncio.create_task(rig.ask(rig.chat("Who?"), 2))]
            await eventually(rig.model.waiting.is_set)
            tasks.append(asyncio.create_task(rig.ask(rig.chat("Who?"), 2)))
            await asyncio.sleep(0.05)
            with pytest.raises(Overloaded, match="1 requests are waiting; the limit is 1"):
                await rig.ask(rig.chat("Who?"))
        for task in tasks:
            assert len((await task).ids) == 2
