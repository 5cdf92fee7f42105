"""Many streams at once: each as if alone, nobody waits long, and a full queue says so."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from client import Client, Reply, chat_request, collect, connect, details_of, request_options
from process import ServerProcess, server
from rule import Judge
from texts import preamble, question, sentences

from ds4grpc.v1 import generation_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

FLOAT32 = ("--dtype", "float32", "--no-kv-disk")


async def test_b29_eight_streams_interleave_and_each_equals_its_solo_run(
    smollm2_path: Path, tmp_path: Path
) -> None:
    prompts = [f"{sentences(1 + i, seed=i)} {question(i)}" for i in range(8)]
    options = {"max_tokens": 16, "bypass": True, "bias": {2: -100.0}}
    with server(tmp_path, *FLOAT32) as running:
        async with connect(running.target) as client:
            alone = [
                await client.chat([("user", text)], **options, logprobs=20) for text in prompts
            ]
            together = await asyncio.gather(
                *(client.chat([("user", text)], **options) for text in prompts)
            )
            judge = Judge(client)
            for i, (solo, reply) in enumerate(zip(alone, together, strict=True)):
                judge.compare(reply.token_ids, solo, f"stream {i}")
            judge.finish(at_least=110)
    times = sorted((t, i) for i, reply in enumerate(together) for t in reply.token_times)
    switches = sum(a[1] != b[1] for a, b in zip(times, times[1:], strict=False))
    assert switches > len(times) // 2, "the streams ran one after another"


async def test_seeded_sampling_is_the_same_alone_and_in_a_batch(
    smollm2_server: ServerProcess,
) -> None:
    async with connect(smollm2_server.target) as client:

        def ask(seed: int) -> object:
            return client.chat(
                [("user", question(seed))],
                **{"temperature": 1.0, "top_p": 0.95, "seed": seed, "max_tokens": 12},
                bypass=True,
            )

        alone = [await ask(seed) for seed in range(4)]  # type: ignore[misc]
        together = await asyncio.gather(*(ask(seed) for seed in range(4)))  # type: ignore[call-overload]
    assert [r.text for r in together] == [r.text for r in alone]
    assert len({r.text for r in alone}) > 1


@pytest.mark.alone
async def test_b29_short_request_and_running_streams_do_not_wait_for_a_long_prefill(
    smollm2_path: Path, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    with server(tmp_path, *FLOAT32) as running:
        async with connect(running.target) as client:
            ids = await client.encode(preamble(380, seed=3))
            short = [("user", "Say a colour.")]
            solo = [await client.chat(short, max_tokens=4, bypass=True) for _ in range(3)]
            solo_seconds = statistics.median(reply.first_token_seconds for reply in solo)

            stream = asyncio.create_task(
                client.chat([("user", "Count.")], max_tokens=60, bypass=True, bias={2: -100.0})
            )
            await asyncio.sleep(1.0)
            request = request_options(max_tokens=1, progress=True, bypass=True)
            request.token_ids.ids.extend(ids[:6000])
            call = client.generation.Generate(request)
            long = Reply()
            chunk_times: list[float] = []
            short_tasks: list[asyncio.Task[Reply]] = []
            loop = asyncio.get_running_loop()
            async for response in call:
                collect(long, response)
                if response.WhichOneof("event") == "progress":
                    chunk_times.append(loop.time())
                    if len(chunk_times) in (3, 10):
                        short_tasks.append(
                            loop.create_task(client.chat(short, max_tokens=4, bypass=True))
                        )
                if len(chunk_times) >= 18:
                    break
            call.cancel()
            shorts = await asyncio.gather(*short_tasks)
            decoded = await stream
    during = [t for t in decoded.token_times if chunk_times[0] < t < chunk_times[-1]]
    gaps = [b - a for a, b in zip(during, during[1:], strict=False)]
    chunks = [b - a for a, b in zip(chunk_times, chunk_times[1:], strict=False)]
    chunk = max(chunks)
    measured(
        f"chunk median {statistics.median(chunks) * 1e3:.0f} ms, longest {chunk * 1e3:.0f} ms;"
        f" stream's longest gap {max(gaps) * 1e3:.0f} ms; short request alone"
        f" {solo_seconds * 1e3:.0f} ms, beside the prefill"
        f" {', '.join(f'{r.first_token_seconds * 1e3:.0f}' for r in shorts)} ms"
    )
    assert len(shorts) == 2
    for reply in shorts:
        assert reply.first_token_seconds <= 3 * solo_seconds + chunk
    assert max(gaps) <= 1.5 * chunk


async def test_full_queue_is_refused_with_retry_info(smollm2_path: Path, tmp_path: Path) -> None:
    with server(tmp_path, "--slots", "1", "--queue", "2", "--no-kv-disk") as running:
        async with connect(running.target) as client:

            def start(seed: int) -> Any:
                messages = [("user", question(seed))]
                return client.generation.Generate(
                    chat_request(messages, max_tokens=400, bias={2: -100.0})
                )

            calls = [start(0)]
            first = await calls[0].read()
            assert first.WhichOneof("event") == "started"
            calls += [start(1), start(2)]
            await until_waiting(client, 2)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.chat([("user", "One too many.")])
            error = refused.value
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            details = details_of(error)
            assert details["ErrorInfo"].reason == "QUEUE_FULL"
            assert details["RetryInfo"].retry_delay.seconds > 0
            assert "--queue" in (error.details() or "")
            for call in calls:
                call.cancel()
            again = await client.chat([("user", "Now?")], max_tokens=2)
            assert again.finish_reason == "length"


async def test_b29_equal_cold_prefixes_are_not_prefilled_twice(
    smollm2_path: Path, tmp_path: Path
) -> None:
    text = preamble(40, seed=8)
    with server(tmp_path, "--no-kv-disk") as running:
        async with connect(running.target) as client:
            before = running.metrics()["ds4grpc_prefill_tokens_total"]
            replies = await asyncio.gather(
                *(
                    client.chat([("system", text), ("user", question(i))], max_tokens=2)
                    for i in range(6)
                )
            )
            spent = running.metrics()["ds4grpc_prefill_tokens_total"] - before
    longest = max(reply.started.prompt_tokens for reply in replies)
    assert spent <= 2 * longest
    assert [reply.admission for reply in replies].count("cold") == 1


async def until_waiting(client: Client, count: int) -> None:
    request = pb.ListGenerationsRequest(states=[pb.GENERATION_STATE_QUEUED])
    for _ in range(1000):
        if len((await client.generation.ListGenerations(request)).generations) == count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"there were never {count} waiting")
