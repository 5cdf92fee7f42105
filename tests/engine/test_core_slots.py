"""Slots on a real engine: forks, cuts in place, eviction, tenants, slow readers, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from bankkit import eventually, stored_names
from inprocess import Answer, HeldFiles, Rig, TinyModel, running
from texts import sentences

from ds4grpc.bank import Admission, MissReason, PersistReason, namespace
from ds4grpc.chat.prompt import Prompt
from ds4grpc.engine import engine as engine_module
from ds4grpc.engine.request import FinishReason, GenerationRequest
from ds4grpc.engine.sequence import Phase

RULES = sentences(6, 1)  # about 90 tokens
OTHERS = sentences(6, 2)


async def first_turn(rig: Rig, text: str = RULES, *, max_tokens: int = 20) -> Answer:
    return await rig.ask(rig.chat(text), max_tokens)


def next_turn(rig: Rig, answer: Answer, question: str, text: str = RULES) -> Prompt:
    return rig.chat(text, answer.said(), question)


async def test_fork_leaves_the_rows_of_its_source_alone(tiny: TinyModel) -> None:
    async with running(tiny, slots=3) as rig:
        first = await first_turn(rig)
        source, fork = (
            rig.request(next_turn(rig, first, question), 30) for question in ("Who?", "And why?")
        )
        with rig.model.held():
            continued = asyncio.create_task(rig.answer(source))
            await eventually(rig.model.waiting.is_set)
            forked = asyncio.create_task(rig.answer(fork))
        one, other = await asyncio.gather(continued, forked)
        assert one.started.admission is Admission.WARM
        assert other.started.admission is Admission.FORK
        assert one.started.slot != other.started.slot
        # The fork may also take what the other has computed of its own turn by then.
        assert other.started.pos_base >= one.started.pos_base > 100
        assert one.ids == await rig.cold(one)
        assert other.ids == await rig.cold(other)


async def test_partial_fork_leaves_its_source_to_be_continued(tiny: TinyModel) -> None:
    async with running(tiny, slots=3) as rig:
        first = await first_turn(rig)
        before = await rig.bank()
        edited = await rig.ask(rig.chat(RULES.replace("6.", "7.")), 20)
        assert edited.started.admission is Admission.PARTIAL_FORK
        assert edited.started.miss_reason is MissReason.KEY_DIFFERS
        assert 32 < edited.started.pos_base < before.frontier
        assert edited.ids == await rig.cold(edited)
        banks = await rig.banks()
        assert any(bank.ids.tolist() == before.ids.tolist() for bank in banks)
        second = await rig.ask(next_turn(rig, first, "Who?"), 20)
        assert second.started.admission is Admission.WARM
        assert second.ids == await rig.cold(second)


async def test_only_slot_is_cut_in_place(tiny: TinyModel) -> None:
    async with running(tiny, slots=1) as rig:
        await first_turn(rig)
        before = await rig.bank()
        edited = await rig.ask(rig.chat(RULES.replace("6.", "7.")), 20)
        assert edited.started.admission is Admission.PARTIAL_TRUNCATE
        assert 32 < edited.started.pos_base < before.frontier
        assert edited.ids == await rig.cold(edited)


async def test_pinned_bank_is_copied_and_not_continued(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        first = await rig.ask(rig.chat(RULES), 20, pin=True)
        pinned = await rig.bank()
        second = await rig.ask(next_turn(rig, first, "Who?"))
        assert second.started.admission is Admission.FORK
        assert any(bank.ids.tolist() == pinned.ids.tolist() for bank in await rig.banks())


async def test_other_namespace_reuses_nothing_and_learns_nothing(tiny: TinyModel) -> None:
    async with running(tiny) as rig:
        first = await first_turn(rig)
        theirs = namespace("somebody else", b"")
        edited = rig.chat(RULES.replace("6.", "7."))
        for prompt in (rig.chat(RULES), next_turn(rig, first, "Who?"), edited):
            answer = await rig.ask(prompt, 0, namespace=theirs)
            await rig.engine.ask(lambda: _forget(rig, theirs))
            assert answer.started.admission is Admission.COLD
            assert answer.started.miss_reason is MissReason.NO_RECORD
            assert answer.started.bank_id == ""


def _forget(rig: Rig, space: bytes) -> None:
    for slot in rig.core.slots:
        if slot.namespace == space:
            assert rig.core.forget(slot.index, slot.generation)


async def test_bypassing_request_takes_nothing_and_leaves_nothing(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with running(tiny, tmp_path) as rig:
        await first_turn(rig)
        await rig.written()
        before = await rig.bank()
        files = stored_names(tmp_path)
        answer = await rig.ask(rig.chat(RULES), 80, bypass=True)
        assert answer.started.admission is Admission.COLD
        assert answer.finished.bank_id == ""
        assert (await rig.bank()).ids.tolist() == before.ids.tolist()
        assert [want async for want in rig.engine.flush(PersistReason.STOP)] == []
        assert stored_names(tmp_path) == files
        assert rig.count("ds4grpc_records_total", "raw", "off", "built") == 1


async def test_unstored_request_is_reused_and_never_written(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with running(tiny, tmp_path, slots=1) as rig:
        first = await rig.ask(rig.chat(RULES), 20, no_store=True)
        second = await rig.ask(next_turn(rig, first, "Who?"), 20, no_store=True)
        assert second.started.admission is Admission.WARM
        assert [want async for want in rig.engine.flush(PersistReason.STOP)] == []
        await rig.ask(rig.chat(OTHERS), 2, no_store=True)  # takes its slot
        assert stored_names(tmp_path) == set()


async def test_equal_beginnings_are_computed_once(tiny: TinyModel) -> None:
    async with running(tiny, slots=3, chunk=32) as rig:
        long = sentences(30, 3)
        requests = [rig.request(rig.chat(f"{long} {end}")) for end in ("Who?", "Why?")]
        answers = await asyncio.gather(*map(rig.answer, requests))
        computed = rig.count("ds4grpc_prefill_tokens_total")
        # The second one starts when waiting would spare less than 128 tokens.
        assert computed < len(requests[0].prompt.ids) + 160
        for answer in answers:
            assert answer.ids == await rig.cold(answer)


async def test_slow_reader_pauses_its_own_row_only(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_STREAM_FULL", 16)
    monkeypatch.setattr(engine_module, "_STREAM_LOW", 4)
    async with running(tiny) as rig:
        request = rig.request(rig.chat(RULES), 200, bypass=True)
        whole = (await rig.answer(request)).ids
        events = rig.engine.generate(request)
        answer = Answer([await anext(events)])
        await rig.until(lambda: rig.is_paused(request.key))
        before = await rig.generated(request.key)
        other = await rig.ask(rig.chat(OTHERS), 20, bypass=True)
        assert len(other.ids) == 20
        assert await rig.generated(request.key) == before < 100
        async for event in events:
            answer.events.append(event)
        assert answer.ids == whole


# The prompt of a request, and the task that reads its stream.
Cancelled = tuple[Prompt, "asyncio.Task[Answer]"]


@asynccontextmanager
async def waiting(rig: Rig, request: GenerationRequest) -> AsyncIterator[Cancelled]:
    with rig.model.held():
        other = asyncio.create_task(rig.ask(rig.chat(OTHERS)))
        await eventually(rig.model.waiting.is_set)
        task = asyncio.create_task(rig.answer(request))
        await asyncio.sleep(0.05)
        yield request.prompt, task
    await other


@asynccontextmanager
async def planning(rig: Rig, request: GenerationRequest) -> AsyncIterator[Cancelled]:
    with rig.workers_held():
        task = asyncio.create_task(rig.answer(request))
        await rig.until(lambda: rig.phase(request.key) is Phase.PLANNING)
        yield request.prompt, task


@asynccontextmanager
async def loading(rig: Rig, request: GenerationRequest) -> AsyncIterator[Cancelled]:
    assert isinstance(rig.files, HeldFiles)
    request = replace(request, prompt=next_turn(rig, await first_turn(rig), "Who?"))
    await rig.written()
    await rig.forget_all()
    rig.files.hold("open_read", skip=1)  # after the lookup
    task = asyncio.create_task(rig.answer(request))
    await rig.until(lambda: rig.phase(request.key) is Phase.LOADING)
    await eventually(rig.files.waiting.is_set)
    yield request.prompt, task
    rig.files.release()


@asynccontextmanager
async def prefill(rig: Rig, request: GenerationRequest) -> AsyncIterator[Cancelled]:
    with rig.model.held():
        task = asyncio.create_task(rig.answer(request))
        await eventually(rig.model.waiting.is_set)
        yield request.prompt, task


@asynccontextmanager
async def decode(rig: Rig, request: GenerationRequest) -> AsyncIterator[Cancelled]:
    task = asyncio.create_task(rig.answer(request))
    await rig.until(lambda: rig.phase(request.key) is Phase.DECODE)
    yield request.prompt, task


@asynccontextmanager
async def retiring(rig: Rig, request: GenerationRequest) -> AsyncIterator[Cancelled]:
    request = replace(request, stopping=replace(request.stopping, max_tokens=3))
    with ExitStack() as held:
        with rig.model.held():
            task = asyncio.create_task(rig.answer(request))
            await eventually(rig.model.waiting.is_set)
            held.enter_context(rig.workers_held())
        await rig.until(lambda: rig.phase(request.key) is Phase.RETIRING)
        yield request.prompt, task


PHASES = {f.__name__: f for f in (waiting, planning, loading, prefill, decode, retiring)}


@pytest.mark.parametrize("gone", [False, True], ids=["cancelled", "gone"])
@pytest.mark.parametrize("phase", PHASES)
async def test_cancel_frees_the_slot_once(
    tiny: TinyModel, tmp_path: Path, phase: str, gone: bool
) -> None:
    async with running(tiny, tmp_path, slots=1, files=HeldFiles()) as rig:
        request = rig.request(rig.chat(RULES), 400)
        async with PHASES[phase](rig, request) as (prompt, task):
            if gone:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                rig.engine.cancel(request.request_id, "")
        if not gone:
            finished = (await task).finished
            wanted = FinishReason.LENGTH if phase == "retiring" else FinishReason.CANCELLED
            assert finished.finish_reason is wanted
        await rig.until(lambda: rig.phase(request.key) is Phase.ENDED)
        assert rig.model.num_steps < 100, "it went on"
        again = await rig.ask(prompt, 8)
        assert again.ids == await rig.cold(again)
        if phase not in ("waiting", "planning"):
            assert again.started.pos_base >= 64, "a finished chunk was lost"
