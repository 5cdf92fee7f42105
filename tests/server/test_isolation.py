"""Nothing of one tenant, salt or model is seen through another: real servers, real files.

The names carry the ids of the field reports.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from client import Client, chat_request, connect, details_of
from process import ServerProcess, server
from texts import preamble, question
from tiny import TinyShape, write_tiny

from ds4grpc import server as serve
from ds4grpc.config import Address, ServeConfig
from ds4grpc.v1 import bank_pb2
from ds4grpc.v1 import generation_pb2 as pb

ANY = Address("127.0.0.1", 0)
LONG = "DS4GRPC_LONG" in os.environ
NO_END = {2: -100.0}
OPTIONS = {"max_tokens": 8, "bias": NO_END}
pytestmark = pytest.mark.timeout(300)
SMALL = ("--kv-cache-min-tokens", "16", "--dtype", "float32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def running(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests whose tenants are their own."""
    folder = tmp_path_factory.mktemp("shared")
    with server(folder, *SMALL, "--slots", "4", model=str(tiny)) as started:
        yield started


async def flush(client: Client) -> list[str]:
    """Stores what is the tenant's; the ids of the banks."""
    call = client.banks.FlushBanks(bank_pb2.FlushBanksRequest(), metadata=client.metadata)
    return [item.bank_id async for item in call]


async def refusal(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value


def config(model: Path, **options: Any) -> ServeConfig:
    small: dict[str, Any] = {"kv_cache_min_tokens": 16, "slots": 4, "threads": 1}
    small["dtype"] = "float32"
    return ServeConfig(model=str(model), listen=ANY, metrics_listen=ANY, **small, **options)


async def test_two_models_share_the_default_folder_and_both_hit(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape = TinyShape(num_layers=2, sliding=(True, False))
    other = write_tiny(tmp_path / "other.gguf", shape)
    messages = [("system", preamble(8, seed=1)), ("user", question(1))]
    for expected in ("cold", "disk"):
        async with serve._start(config(tiny)) as one, serve._start(config(other)) as two:
            for each in (one, two):
                async with connect(str(each.address)) as client:
                    reply = await client.chat(messages, **OPTIONS)
                    assert reply.admission.startswith(expected)
                    assert reply.started.disk_tokens > 100 or expected == "cold"
            await asyncio.gather(one.drain(1), two.drain(1))
    folders = (tmp_path / "ds4grpc" / "banks").glob("*/catalog.db")
    assert len(list(folders)) == 2


async def test_bank_of_another_tenant_is_not_found_exactly_as_one_that_never_was(
    running: ServerProcess,
) -> None:
    async with connect(running.target, "anna") as anna, connect(running.target, "bert") as bert:
        reply = await anna.chat([("user", question(1))], **OPTIONS)
        await anna.chat([("user", question(2))], **OPTIONS)  # resident, not stored yet
        assert reply.finished.bank_id in await flush(anna)
        theirs = reply.finished.bank_id
        listed = await bert.banks.ListBanks(bank_pb2.ListBanksRequest(), metadata=bert.metadata)
        assert (list(listed.banks), listed.total_size) == ([], 0)
        assert await flush(bert) == []
        verified = bert.banks.VerifyBanks(bank_pb2.VerifyBanksRequest(), metadata=bert.metadata)
        assert [verdict async for verdict in verified] == []

        async def verify(bank_id: str) -> None:
            request = bank_pb2.VerifyBanksRequest(bank_ids=[bank_id])
            async for _ in bert.banks.VerifyBanks(request, metadata=bert.metadata):
                pass

        calls: dict[str, Callable[[str], Awaitable[Any]]] = {
            "get": lambda i: bert.banks.GetBank(
                bank_pb2.GetBankRequest(bank_id=i), metadata=bert.metadata
            ),
            "delete": lambda i: bert.banks.DeleteBank(
                bank_pb2.DeleteBankRequest(bank_id=i), metadata=bert.metadata
            ),
            "pin": lambda i: bert.banks.PinBank(
                bank_pb2.PinBankRequest(bank_id=i), metadata=bert.metadata
            ),
            "unpin": lambda i: bert.banks.UnpinBank(
                bank_pb2.UnpinBankRequest(bank_id=i), metadata=bert.metadata
            ),
            "verify": verify,
        }
        for name, call in calls.items():
            for wanted in (theirs, theirs[:8]):
                unknown = "".join(random.Random(name).choices("0123456789abcdef", k=len(wanted)))
                told = {bank_id: await refusal(call(bank_id)) for bank_id in (wanted, unknown)}
                shapes = [
                    (
                        error.code(),
                        (error.details() or "").replace(bank_id, "…"),
                        sorted(map(str, details_of(error).values())),
                    )
                    for bank_id, error in told.items()
                ]
                assert shapes[0] == shapes[1], name
                assert shapes[0][0] is grpc.StatusCode.NOT_FOUND, name
        shown = await anna.bank(theirs)
        assert (shown.pinned, shown.location) == (False, bank_pb2.BANK_LOCATION_BOTH)


async def test_generation_of_another_tenant_can_neither_be_seen_nor_cancelled_nor_collided_with(
    running: ServerProcess,
) -> None:
    async with connect(running.target, "carl") as carl, connect(running.target, "dora") as dora:
        request = chat_request(
            [("user", question(3))], max_tokens=3000, bias=NO_END, request_id="mine"
        )
        call = carl.generation.Generate(request, metadata=carl.metadata)
        await call.read()
        listing = pb.ListGenerationsRequest()
        listed = await dora.generation.ListGenerations(listing, metadata=dora.metadata)
        assert list(listed.generations) == []
        told = [
            await refusal(
                dora.generation.CancelGeneration(
                    pb.CancelGenerationRequest(request_id=name), metadata=dora.metadata
                )
            )
            for name in ("mine", "none")
        ]
        assert [error.code() for error in told] == [grpc.StatusCode.NOT_FOUND] * 2
        assert (told[0].details() or "").replace("mine", "none") == told[1].details()
        # Names of requests are each tenant's own: the same one is no clash, and tells nothing.
        same = await dora.chat([("user", question(4))], request_id="mine", **OPTIONS)
        assert same.started.request_id == "mine"
        assert same.finish_reason == "length"
        listed = await carl.generation.ListGenerations(listing, metadata=carl.metadata)
        assert [item.state for item in listed.generations] == [pb.GENERATION_STATE_RUNNING]
        assert call.cancel()


async def test_salts_of_one_tenant_share_nothing_in_any_tier(tiny: Path, tmp_path: Path) -> None:
    messages = [("system", preamble(8, seed=5)), ("user", question(5))]
    async with serve._start(config(tiny, kv_disk_dir=tmp_path)) as running:
        async with connect(str(running.address), "anna") as anna:
            await anna.chat(messages, salt="blue", **OPTIONS)
            for salt in ("green", "", "blu", "blue "):
                assert (await anna.chat(messages, salt=salt, **OPTIONS)).started.pos_base == 0
            again = await anna.chat(messages, salt="blue", **OPTIONS)
            assert again.started.cached_tokens > 100
        await running.drain(1)
    async with serve._start(config(tiny, kv_disk_dir=tmp_path)) as running:
        address = str(running.address)
        async with connect(address, "anna") as anna, connect(address) as nobody:
            assert (await anna.chat(messages, salt="red", **OPTIONS)).started.pos_base == 0
            # The tenant's name as a salt, and the salt as a name, are neither of them.
            for salt in ("anna", "blue", "annablue"):
                assert (await nobody.chat(messages, salt=salt, **OPTIONS)).started.pos_base == 0
            blue = await anna.chat(messages, salt="blue", **OPTIONS)
            assert blue.started.disk_tokens > 100


@pytest.mark.slow
async def test_marker_sentence_is_in_no_log_metric_error_or_catalog(
    tiny: Path, tmp_path: Path
) -> None:
    """What a tenant writes is in bank files, by design, and nowhere else; its salt nowhere."""
    marker, salt = "The walrus sings at seven.", "salt-of-the-walrus"
    options = (*SMALL, "--log-level", "debug", "--slots", "2")
    messages: list[tuple[str, ...]] = [("system", f"{marker} {preamble(8, seed=6)}")]
    errors: list[grpc.aio.AioRpcError] = []
    seen = b""
    with server(tmp_path, *options, model=str(tiny)) as running:
        async with connect(running.target, "anna") as anna, connect(running.target, "bert") as bert:
            for turn in range(3):
                messages.append(("user", f"{marker} {question(turn)}"))
                reply = await anna.chat(messages, salt=salt, max_tokens=70, bias=NO_END)
                messages.append(("assistant", reply.text))
            await flush(anna)
            bad = chat_request(messages, salt=salt, top_p=7.0)
            errors.append(await refusal(anna.run(bad)))
            errors.append(await refusal(anna.prompt(f"{marker} " * 4000, salt=salt)))
            errors.append(await refusal(anna.chat([*messages, ("user", marker)], salt=marker * 99)))
            errors.append(await refusal(bert.bank(reply.finished.bank_id)))
            bad = pb.GenerateRequest(model=marker)
            errors.append(await refusal(bert.run(bad)))
            seen += repr(await asyncio.to_thread(running.metrics)).encode()
            for client in (anna, bert):
                listed = await client.generation.ListGenerations(
                    pb.ListGenerationsRequest(), metadata=client.metadata
                )
                seen += listed.SerializeToString()
        await asyncio.to_thread(running.wait_for_log, "bank persisted")
        kept = raw(tmp_path, banks=False)  # with the write-ahead log that a kill leaves
        assert any(name.endswith("-wal") for name in kept)
        running.kill()
    with server(tmp_path, *options, model=str(tiny)) as restarted:  # reads the files, and the rows
        async with connect(restarted.target, "anna") as anna:
            messages.append(("user", f"{marker} {question(9)}"))
            again = await anna.chat(messages, salt=salt, **OPTIONS)
            assert again.started.disk_tokens > 100
        assert restarted.stop() == 0
    told = [f"{error.details()} {error.trailing_metadata()!r}" for error in errors[:-1]]
    places = {
        "log": (running.log + restarted.log).encode(),
        "metrics and listings": seen,
        "errors": "".join(told).encode(),
        **{f"before the kill: {name}": data for name, data in kept.items()},
        **raw(tmp_path, banks=False),
    }
    for place, data in places.items():
        assert data or place.endswith(("-wal", "lock")), place
        for secret in (marker, marker[:10], "walrus"):
            assert spelled(secret, data) is None, f"{place} holds {spelled(secret, data)!r}"
    for place, data in raw(tmp_path, banks=True).items():
        assert spelled(salt, data) is None, f"{place} holds the salt"
    assert any(marker.encode() in data for data in raw(tmp_path, banks=True).values())


def raw(folder: Path, *, banks: bool) -> dict[str, bytes]:
    """All files below a folder: those of banks, or all others."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and (path.suffix == ".bank") == banks
    }


def spelled(secret: str, data: bytes) -> bytes | None:
    """The bytes of a text, in any of the ways that it might have got there."""
    spellings = (secret.encode(), secret.encode("utf-16-le"), secret.encode().hex().encode())
    return next((spelling for spelling in spellings if spelling in data), None)


@pytest.mark.alone
@pytest.mark.slow
async def test_b32_time_to_first_token_tells_nothing_about_other_tenants(
    tiny: Path, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    """A prober who knows a's prompts and its salt cannot tell them from prompts of nobody."""
    count = 50 if LONG else 20
    prompts = [[("user", f"{preamble(40, seed=s)} {question(s)}")] for s in range(2 * count)]
    options = {"max_tokens": 1, "salt": "copied", "bias": NO_END}
    probes: list[float] = []
    fresh: list[float] = []
    own: list[float] = []
    with server(tmp_path, *SMALL, "--slots", "4", model=str(tiny)) as running:
        async with connect(running.target, "anna") as anna, connect(running.target, "bert") as bert:
            for number in range(count):
                known, unknown = prompts[number], prompts[count + number]
                await anna.chat(known, **options)  # resident when it is probed
                pair = ((known, probes), (unknown, fresh))
                for messages, times in pair if number % 2 else reversed(pair):
                    reply = await bert.chat(messages, no_store=True, **options)
                    assert reply.started.cached_tokens < 60  # the template's own beginning
                    times.append(reply.first_token_seconds)
                repeat = await anna.chat(known, no_store=True, **options)
                assert repeat.started.cached_tokens > 500
                own.append(repeat.first_token_seconds)
    share, own_share = faster(probes, fresh), faster(own, fresh)
    measured(
        f"{count} probes each: known is faster than unknown in {share:.0%} of pairs,"
        f" a's own repeat in {own_share:.0%}"
    )
    # Of n and n equal samples the share scatters around one half by 1 / sqrt(6 n): 4 deviations.
    assert abs(share - 0.5) < 4 / (6 * count) ** 0.5
    assert own_share > 0.9, "the measurement sees no difference at all"


def faster(left: list[float], right: list[float]) -> float:
    """How often one of `left` is less than one of `right`."""
    return sum(a < b for a in left for b in right) / (len(left) * len(right))


@pytest.mark.slow
async def test_b17_new_chat_takes_the_empty_slot_and_both_go_on_warm(
    tiny: Path, tmp_path: Path
) -> None:
    shared = ("system", preamble(60, seed=8))
    chats: list[list[tuple[str, ...]]] = [[shared], [shared]]
    previous = [0, 0]
    admissions = []
    with server(tmp_path, *SMALL, "--slots", "2", model=str(tiny)) as running:
        async with connect(running.target) as client:
            for turn in range(3):
                for number, messages in enumerate(chats):
                    messages.append(("user", question(10 * number + turn)))
                    reply = await client.chat(messages, **OPTIONS)
                    messages.append(("assistant", reply.text))
                    admissions.append(reply.admission)
                    assert reply.started.disk_tokens == 0
                    if turn:
                        assert reply.started.cached_tokens >= previous[number]
                    elif number:
                        assert reply.started.cached_tokens >= 800
                    previous[number] = reply.started.prompt_tokens
        metrics = running.metrics()
    assert admissions == ["cold", "partial_fork", *["warm"] * 4]
    assert metrics['ds4grpc_slots{state="idle"}'] == 2
    assert metrics['ds4grpc_admissions_total{admission="disk"}'] == 0
