"""Bad requests get INVALID_ARGUMENT with numbers, and the next request works; clients that leave
free their slot."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from client import Client, chat_request, connect, details_of, request_options
from process import ServerProcess, server
from texts import preamble, question

from ds4grpc.v1 import generation_pb2 as pb
from ds4grpc.v1 import model_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def small_server(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    with server(tmp_path_factory.mktemp("small"), "--slots", "1", "--no-kv-disk") as running:
        yield running


def changed(**fields: object) -> pb.GenerateRequest:
    request = chat_request([("user", "Hi")], max_tokens=2)
    for name, value in fields.items():
        part, _, field = name.partition("__")
        if isinstance(value, list):
            getattr(getattr(request, part), field).extend(value)
        else:
            setattr(getattr(request, part), field, value)
    return request


def with_text(text: str) -> pb.GenerateRequest:
    request = request_options(max_tokens=2)
    request.prompt = text
    return request


def with_ids(*ids: int) -> pb.GenerateRequest:
    request = request_options(max_tokens=2)
    request.token_ids.ids.extend(ids)
    return request


def unknown_role() -> pb.GenerateRequest:
    request = chat_request([("user", "Hi")])
    request.chat.messages[0].role = 99  # type: ignore[assignment]
    return request


def unknown_mode() -> pb.GenerateRequest:
    request = chat_request([("user", "Hi")])
    request.chat.thinking.mode = 42  # type: ignore[assignment]
    return request


BAD = {
    "no input": (pb.GenerateRequest(), "NO_INPUT", "prompt, token_ids or chat"),
    "no messages": (chat_request([]), None, "message"),
    "empty prompt": (with_text(""), "EMPTY_PROMPT", "at least one"),
    "no ids": (with_ids(), "EMPTY_PROMPT", "at least one"),
    "id outside the vocabulary": (with_ids(1, 49152), "TOKEN_ID_OUT_OF_RANGE", "49,152"),
    "too long": (with_text("long " * 9000), "PROMPT_TOO_LONG", "the limit is 8,192"),
    "last is the assistant": (
        chat_request([("user", "Hi"), ("assistant", "Ho")]),
        None,
        "user",
    ),
    "unknown role": (unknown_role(), "UNKNOWN_ENUM_VALUE", "99"),
    "unknown mode": (unknown_mode(), "UNKNOWN_ENUM_VALUE", "42"),
    "negative temperature": (changed(sampling__temperature=-1.0), "OUT_OF_RANGE", "-1"),
    "top_p 0": (changed(sampling__top_p=0.0), "OUT_OF_RANGE", "top_p"),
    "min_p 2": (changed(sampling__min_p=2.0), "OUT_OF_RANGE", "2"),
    "17 stops": (changed(stopping__stop=["x"] * 17), "TOO_LONG", "16"),
    "empty stop": (changed(stopping__stop=[""]), "EMPTY_STOP", "empty"),
    "stop id outside": (
        changed(stopping__stop_token_ids=[1_000_000]),
        "OUT_OF_RANGE",
        "is 1000000; send a number from 0 to 49151",
    ),
    "logprobs 21": (changed(output__logprobs=21), "OUT_OF_RANGE", "20"),
    "bad request id": (
        pb.GenerateRequest(request_id="a b", prompt="Hi"),
        "MALFORMED_ID",
        "128",
    ),
    "pin without store": (changed(cache__pin=True, cache__no_store=True), None, "cache.pin"),
}


@pytest.mark.parametrize("what", BAD)
async def test_bad_input_is_refused_with_numbers_and_the_next_request_works(
    what: str, small_server: ServerProcess
) -> None:
    request, reason, part = BAD[what]
    async with connect(small_server.target) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.run(request)
        error = refused.value
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
        assert part in (error.details() or "")
        assert "Traceback" not in (error.details() or "")
        details = details_of(error)
        assert details["ErrorInfo"].domain == "ds4grpc"
        if reason is not None:
            assert details["ErrorInfo"].reason == reason
        assert details["BadRequest"].field_violations
        works = await client.chat([("user", "Hi")], max_tokens=1)
        assert works.finish_reason == "length"


async def test_unknown_model_and_unknown_generation_are_not_found(
    small_server: ServerProcess,
) -> None:
    async with connect(small_server.target) as client:
        for call in (
            client.run(pb.GenerateRequest(model="other", prompt="Hi")),
            client.models.GetModel(model_pb2.GetModelRequest(model="other")),
            client.generation.CancelGeneration(pb.CancelGenerationRequest(request_id="none")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_request_id_in_use_is_refused(small_server: ServerProcess) -> None:
    async with connect(small_server.target) as client:
        request = chat_request([("user", "Hi")], request_id="twice", max_tokens=300)
        call = client.generation.Generate(request)
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.run(request)
        assert details_of(refused.value)["ErrorInfo"].reason == "DUPLICATE_REQUEST_ID"
        call.cancel()


async def until_free(running: ServerProcess) -> None:
    """Waits until no slot is active and nothing waits: a chunk or a step on a busy machine."""
    busy: dict[str, float] = {}
    for _ in range(400):
        now = running.metrics()
        names = ('ds4grpc_slots{state="active"}', "ds4grpc_requests_running")
        busy = {name: now[name] for name in (*names, "ds4grpc_requests_waiting") if now[name]}
        if not busy:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still busy: {busy}")


DYING_CLIENT = """
    import os, sys
    import grpc
    from ds4grpc.v1 import generation_pb2 as pb, generation_pb2_grpc
    stub = generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(sys.argv[1]))
    request = pb.GenerateRequest(prompt="Once upon a time", sampling=pb.Sampling(temperature=0))
    for response in stub.Generate(request):
        if response.WhichOneof("event") == "delta":
            print("streaming", flush=True)
            os.kill(os.getpid(), 9)
"""


async def test_client_that_dies_mid_stream_frees_its_slot(small_server: ServerProcess) -> None:
    died = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", textwrap.dedent(DYING_CLIENT), small_server.target],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert died.returncode == -9
    assert "streaming" in died.stdout
    await until_free(small_server)
    async with connect(small_server.target) as client:
        assert (await client.chat([("user", "Hi")], max_tokens=1)).finish_reason == "length"


async def test_cancel_in_prefill_stops_within_a_chunk_and_keeps_what_was_computed(
    small_server: ServerProcess,
) -> None:
    async with connect(small_server.target) as client:
        ids = (await client.encode(preamble(130, seed=77)))[:2000]
        request = request_options(max_tokens=4, progress=True)
        request.token_ids.ids.extend(ids)
        call = client.generation.Generate(request)
        async for response in call:
            if response.WhichOneof("event") == "progress":
                break
        call.cancel()
        await until_free(small_server)
        spent = small_server.metrics()["ds4grpc_prefill_tokens_total"]
        await asyncio.sleep(0.5)
        assert small_server.metrics()["ds4grpc_prefill_tokens_total"] == spent
        again = await client.tokens(ids, max_tokens=1)
        assert again.admission == "warm"
        assert again.started.pos_base >= 256


async def test_deadline_ends_a_request_with_its_own_status(small_server: ServerProcess) -> None:
    async with connect(small_server.target) as client:
        ids = (await client.encode(preamble(130, seed=78)))[:1500]
        request = request_options(max_tokens=400)
        request.token_ids.ids.extend(ids)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await client.run(request, deadline=0.4)
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_free(small_server)


async def test_cancelled_generation_finishes_its_stream_and_can_be_continued(
    small_server: ServerProcess,
) -> None:
    async with connect(small_server.target) as client:
        messages = [("user", question(3))]
        request = chat_request(messages, request_id="to-cancel", max_tokens=300, bias={2: -100.0})
        task = asyncio.create_task(client.run(request))
        await asyncio.sleep(1.0)
        await client.generation.CancelGeneration(pb.CancelGenerationRequest(request_id="to-cancel"))
        reply = await task
        assert reply.finish_reason == "cancelled"
        following = [*messages, ("assistant", reply.text), ("user", "Go on.")]
        assert (await client.chat(following, max_tokens=1)).admission == "warm"


async def test_time_limit_is_a_graceful_end(small_server: ServerProcess) -> None:
    async with connect(small_server.target) as client:
        request = chat_request([("user", question(4))], bias={2: -100.0})
        request.stopping.time_limit.FromMilliseconds(700)
        reply = await client.run(request)
        assert reply.finish_reason == "time_limit"
        assert reply.text


async def test_stop_string_across_tokens_is_cut_and_the_turn_is_still_reused(
    small_server: ServerProcess,
) -> None:
    async with connect(small_server.target) as client:
        messages = [("user", question(5))]
        whole = await client.chat(messages, max_tokens=16, bypass=True, bias={2: -100.0})
        stop = whole.text[7:12]
        cut = await client.chat(messages, max_tokens=16, stop=[stop], bias={2: -100.0})
        assert cut.finish_reason == "stop"
        assert cut.finished.matched_stop == stop
        assert cut.text == whole.text[: whole.text.index(stop)]
        following = [*messages, ("assistant", cut.text), ("user", "Go on.")]
        again = await client.chat(following, max_tokens=1)
        assert again.admission == "warm"
        assert again.computed < 30


async def test_stop_id_and_logprobs_and_progress_are_reported(
    small_server: ServerProcess,
) -> None:
    async with connect(small_server.target) as client:
        messages = [("user", question(6))]
        whole = await client.chat(messages, max_tokens=8, bypass=True, logprobs=3, progress=True)
        steps = [step for delta in whole.deltas for step in delta.logprobs]
        assert [step.sampled.token_id for step in steps] == whole.token_ids
        assert all(step.top[0].logprob >= step.sampled.logprob for step in steps)
        assert whole.progress[-1].prefilled_tokens == whole.progress[-1].total_tokens
        stop_id = whole.token_ids[4]
        cut = await client.chat(messages, max_tokens=8, stop_token_ids=[stop_id], bypass=True)
        assert cut.finished.matched_stop == str(stop_id)
        assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop_id)]


async def test_zero_tokens_prefills_and_stores_only(small_server: ServerProcess) -> None:
    async with connect(small_server.target) as client:
        messages = [("system", preamble(20, seed=80)), ("user", question(7))]
        stored = await client.chat(messages, max_tokens=0)
        assert (stored.text, stored.finish_reason) == ("", "length")
        reply = await client.chat(messages, max_tokens=2)
        assert reply.computed == 1


async def test_message_over_the_size_limit_names_a_status_a_client_can_act_on(
    small_server: ServerProcess,
) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(small_server.target, options=options) as channel:
        client = Client(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.run(pb.GenerateRequest(prompt="x" * (65 << 20)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
