"""A scripted run moves every metric off zero, and each says what the script counted itself."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from client import Client, Reply, chat_request, connect, request_options
from process import ServerProcess, server
from texts import preamble, question, sentences

from ds4grpc.families import FAMILIES
from ds4grpc.v1 import bank_pb2
from ds4grpc.v1 import generation_pb2 as pb

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NO_END = {2: -100.0}
OPTIONS = {"max_tokens": 14, "bias": NO_END}
OPTIONS_OF_SERVER = ("--slots", "2", "--kv-cache-min-tokens", "64")


@dataclass
class Tally:
    """What the script saw, by the names that the metrics have."""

    counts: Counter[str] = field(default_factory=Counter)

    def note(self, reply: Reply) -> Reply:
        started, usage = reply.started, reply.finished.usage
        self.counts["ds4grpc_requests_started_total"] += 1
        reason = f'code="ok",finish_reason="{reply.finish_reason}"'
        self.counts[f"ds4grpc_requests_total{{{reason}}}"] += 1
        self.counts[f'ds4grpc_admissions_total{{admission="{reply.admission}"}}'] += 1
        computed = started.prompt_tokens - started.cached_tokens
        sources = {
            "computed": computed,
            "memory": started.memory_tokens,
            "disk": started.disk_tokens,
        }
        for source, tokens in sources.items():
            self.counts[f'ds4grpc_prompt_tokens_total{{source="{source}"}}'] += tokens
        self.counts["ds4grpc_prefill_tokens_total"] += started.suffix_tokens
        self.counts["ds4grpc_hidden_tokens_total"] += started.hidden_tokens
        self.counts["ds4grpc_generated_tokens_total"] += usage.generated_tokens
        self.counts["ds4grpc_queue_seconds_count"] += 1
        if started.miss_reason:
            self.counts[f'ds4grpc_cache_misses_total{{reason="{reply.miss_reason}"}}'] += 1
        if usage.generated_tokens:
            label = f'{{admission="{reply.admission}"}}'
            self.counts[f"ds4grpc_prefill_seconds_count{label}"] += 1
            self.counts[f"ds4grpc_time_to_first_token_seconds_count{label}"] += 1
            # Every token after the first, those that the server forced included.
            self.counts["ds4grpc_inter_token_seconds_count"] += (
                len(reply.token_ids) - 1 + ended_by_marker(reply)
            )
        self.counts['ds4grpc_admission_seconds_count{stage="lookup"}'] += 1
        self.counts['ds4grpc_admission_seconds_count{stage="compute"}'] += 1
        if reply.admission not in ("cold", "warm"):
            self.counts['ds4grpc_admission_seconds_count{stage="load"}'] += 1
        return reply

    def refused(self, code: str) -> None:
        self.counts["ds4grpc_requests_started_total"] += 1
        self.counts[f'ds4grpc_requests_total{{code="{code}",finish_reason="none"}}'] += 1

    def record(self, kind: str, outcome: str, *, thinking: bool) -> None:
        on = "on" if thinking else "off"
        label = f'{{kind="{kind}",outcome="{outcome}",thinking="{on}"}}'
        self.counts[f"ds4grpc_records_total{label}"] += 1

    def check(self, metrics: dict[str, float]) -> None:
        """Every counter that the script could count says the same, and nothing else moved."""
        for name, seen in self.counts.items():
            assert metrics[name] == seen, (name, metrics[name], seen)
        counted = {name.split("{")[0] for name in self.counts}
        for name, value in metrics.items():
            if name.split("{")[0] in counted and name not in self.counts:
                assert value == 0, (name, value)


def ended_by_marker(reply: Reply) -> int:
    """The end marker is a token too, but is not sent."""
    return int(reply.finish_reason == "stop" and not reply.finished.matched_stop)


def lawful(metrics: dict[str, float]) -> None:
    ended = sum(v for k, v in metrics.items() if k.startswith("ds4grpc_requests_total{"))
    live = metrics["ds4grpc_requests_running"] + metrics["ds4grpc_requests_waiting"]
    assert metrics["ds4grpc_requests_started_total"] == ended + live


async def test_every_metric_moves_and_says_what_the_script_counted(
    smollm2_path: Path, tmp_path: Path
) -> None:
    tally = Tally()
    messages: list[tuple[str, ...]] = [("system", preamble(20, seed=1))]
    moved: set[str] = set()
    with server(tmp_path, *OPTIONS_OF_SERVER) as running:
        async with connect(running.target) as client:
            await talk(client, tally, messages)
            await fork(client, tally, messages, running)
            await edges(client, tally, messages)
            await until_written(running, 2)
            metrics = running.metrics()
            lawful(metrics)
            tally.check(metrics)
            moved |= names_off_zero(metrics)
            storage = await client.banks.GetStorage(bank_pb2.GetStorageRequest())
            assert metrics["ds4grpc_disk_bytes"] == pytest.approx(storage.disk_bytes, rel=0.05)
            assert metrics["ds4grpc_disk_quota_bytes"] == storage.quota_bytes
            assert metrics["ds4grpc_disk_enabled"] == 1
            listed = await client.banks.ListBanks(bank_pb2.ListBanksRequest(page_size=100))
            stored = sum(b.location != bank_pb2.BANK_LOCATION_RESIDENT for b in listed.banks)
            assert metrics['ds4grpc_banks{trust="reusable",where="stored"}'] == stored
            files = list_files(tmp_path)
            written = metrics["ds4grpc_bank_written_bytes_total"]
            assert written == sum(file.stat().st_size for file in files)
            assert persists(metrics) == len(files)
        assert running.stop() == 0

    tally = Tally()
    with server(tmp_path, *OPTIONS_OF_SERVER) as running:
        async with connect(running.target) as client:
            messages.append(("user", question(9)))
            reply = tally.note(await client.chat(messages, **OPTIONS, thinking=True))
            assert reply.started.disk_tokens > 250
            tally.record("visible", "built", thinking=True)
            metrics = running.metrics()
            tally.check(metrics)
            assert metrics['ds4grpc_bank_restores_total{result="ok"}'] == 1
            assert metrics["ds4grpc_bank_read_bytes_total"] > 100_000
            assert metrics["ds4grpc_bank_restore_seconds_count"] == 1
            moved |= names_off_zero(metrics)
            await full_slots(client)
            moved |= names_off_zero(running.metrics())
    moved |= {"ds4grpc_requests_running", "ds4grpc_requests_waiting"}  # seen in `fork`
    # Faults are produced where they are tested, and so are chains that are long enough to merge;
    # everything else has moved. A write that its slot overtakes may fail or not.
    moved.discard("ds4grpc_bank_persist_failures_total")
    assert {family.name for family in FAMILIES} - moved == {
        "ds4grpc_bank_compacted_bytes_total",
        "ds4grpc_bank_persist_failures_total",
        "ds4grpc_catalog_errors_total",
    }


async def talk(client: Client, tally: Tally, messages: list[tuple[str, ...]]) -> None:
    """A thinking conversation and one that does not think."""
    for turn in range(2):
        messages.append(("user", f"{question(turn)} {sentences(3, turn)}"))
        reply = tally.note(
            await client.chat(messages, **OPTIONS, thinking=True, thinking_tokens=6, replay="drop")
        )
        tally.record("visible", "built", thinking=True)
        messages.append(("assistant", reply.text))
    plain = [("system", preamble(20, seed=2)), ("user", "Hello?")]
    tally.note(await client.chat(plain, **OPTIONS, thinking=False))
    tally.record("raw", "built", thinking=False)


async def fork(
    client: Client, tally: Tally, messages: list[tuple[str, ...]], running: ServerProcess
) -> None:
    """Two branches at once: gauges of running and waiting move."""
    branches = [
        asyncio.create_task(
            client.chat(
                [*messages, ("user", f"Branch {i}. {question(i)}")],
                **{**OPTIONS, "max_tokens": 40},
                thinking=False,
            )
        )
        for i in range(3)
    ]
    seen: Counter[str] = Counter()
    while not all(task.done() for task in branches):
        metrics = await asyncio.to_thread(running.metrics)
        lawful(metrics)
        for name in ("running", "waiting"):
            seen[name] = max(seen[name], int(metrics[f"ds4grpc_requests_{name}"]))
        await asyncio.sleep(0.02)
    assert seen["running"] == 2
    assert seen["waiting"] >= 1
    for task in branches:
        tally.note(task.result())
        tally.record("raw", "built", thinking=False)


async def edges(client: Client, tally: Tally, messages: list[tuple[str, ...]]) -> None:
    """Refusals, a stop string, a cut reasoning, a prefill that only stores."""
    with pytest.raises(grpc.aio.AioRpcError):
        await client.chat([])
    tally.refused("invalid_argument")
    request = request_options()
    request.prompt, request.model = "Hi", "other"
    with pytest.raises(grpc.aio.AioRpcError):
        await client.run(request)
    tally.refused("not_found")
    open_ended = {"thinking": True, "thinking_tokens": 9, "max_tokens": 3}
    cut = tally.note(await client.chat(messages[:2], **open_ended, bias=NO_END))
    assert cut.reasoning and not cut.text
    tally.record("prompt", "prompt", thinking=True)
    whole = await client.chat(messages[:2], **OPTIONS, bypass=True, thinking=False)
    tally.note(whole)
    stop = whole.text[4:8]
    tally.note(await client.chat(messages[:2], **OPTIONS, thinking=False, stop=[stop]))
    tally.record("raw", "built", thinking=False)
    call = client.generation.Generate(chat_request(messages[:2], request_id="gone", **OPTIONS))
    async for response in call:
        if response.WhichOneof("event") == "started":
            started = Reply()
            started.started = response.started
            break
    call.cancel()
    await settled(client)
    # A client that left: counted when it started, its end as cancelled.
    tally.counts["ds4grpc_requests_started_total"] += 1
    tally.counts['ds4grpc_requests_total{code="cancelled",finish_reason="none"}'] += 1
    partial = Tally()
    partial.note(started)
    for name in partial.counts:
        if "prompt_tokens" in name or "admissions" in name or "misses" in name:
            tally.counts[name] += partial.counts[name]
        if name in ("ds4grpc_hidden_tokens_total", "ds4grpc_queue_seconds_count"):
            tally.counts[name] += partial.counts[name]
    # How far it came is not for the client to know.
    for name in list(tally.counts):
        if re.match("ds4grpc_(prefill|generated|inter_token|time_to|admission_sec|records)", name):
            del tally.counts[name]


async def settled(client: Client) -> None:
    states = [pb.GENERATION_STATE_QUEUED, pb.GENERATION_STATE_RUNNING]
    request = pb.ListGenerationsRequest(states=states)
    for _ in range(1000):
        if not (await client.generation.ListGenerations(request)).generations:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a generation did not end")


async def full_slots(client: Client) -> None:
    """More conversations than slots: banks are evicted."""
    for seed in range(3):
        await client.chat([("user", sentences(16, 50 + seed))], max_tokens=2)


async def until_written(running: ServerProcess, count: int) -> None:
    for _ in range(200):
        if persists(running.metrics()) >= count:
            await asyncio.sleep(1.0)
            return
        await asyncio.sleep(0.05)
    raise AssertionError("banks were not written in ten seconds")


def persists(metrics: dict[str, float]) -> float:
    return sum(v for k, v in metrics.items() if k.startswith("ds4grpc_bank_persists_total"))


def list_files(folder: Path) -> list[Path]:
    return list(folder.glob("*/??/*.bank"))


def names_off_zero(metrics: dict[str, float]) -> set[str]:
    """Families with a sample that is not 0."""
    names = {k.split("{")[0] for k, v in metrics.items() if v}
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}
