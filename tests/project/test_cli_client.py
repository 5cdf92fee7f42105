"""Client commands against a scripted service on a real socket, piped and on a real terminal.

The service says what a server may say and a small model will not say on demand; the real server
stands behind the same commands in the system tests.
"""

import codecs
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import click.testing
import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.timestamp_pb2 import Timestamp

from ds4grpc.cli import main
from ds4grpc.errors import BankInUse, BankNotFound, Ds4grpcError, InvalidRequest, Overloaded
from ds4grpc.rpc.status import DETAILS_KEY, status_code, to_status
from ds4grpc.v1 import (
    bank_pb2,
    bank_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)

BANK_ID = "0123456789abcdef" * 2


def refuse(context: Any, error: Ds4grpcError) -> None:
    """What `rpc.status.abort` does, for a synchronous server."""
    status = to_status(error)
    context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
    context.abort(status_code(error), status.message)


class Scripted(
    generation_pb2_grpc.GenerationServiceServicer,
    bank_pb2_grpc.BankServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
):
    """Thinks, answers `fine <turn>`, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[generation_pb2.GenerateRequest] = []
        self.metadata: dict[str, str] = {}
        self.deaf = False  # whether CancelGeneration changes nothing
        self.cancel_asked = threading.Event()
        self.cancelled = threading.Event()
        self.listed: list[bank_pb2.ListBanksRequest] = []
        self.deleted: list[str] = []

    def Generate(self, request: Any, context: Any) -> Iterator[Any]:
        self.asked.append(request)
        self.metadata = dict(context.invocation_metadata())
        said = request.chat.messages[-1].content if request.HasField("chat") else request.prompt
        if said == "bad":
            refuse(
                context,
                InvalidRequest(
                    "prompt has 9,000 tokens; the limit is 8,192 (--max-context)",
                    field="chat.messages",
                    reason="CONTEXT_OVERFLOW",
                    metadata={"prompt_tokens": "9000"},
                ),
            )
        if said == "full":
            refuse(context, Overloaded("256 requests wait", retry_seconds=2, quota="waiting"))
        turn = len(self.asked)
        yield generation_pb2.GenerateResponse(
            started=generation_pb2.GenerationStarted(
                request_id=request.request_id,
                prompt_tokens=1000,
                cached_tokens=900,
                memory_tokens=900,
                admission=generation_pb2.ADMISSION_WARM,
            )
        )
        for channel, text in (
            (generation_pb2.CHANNEL_REASONING, "hmm, "),
            (generation_pb2.CHANNEL_REASONING, "well\n"),
            (generation_pb2.CHANNEL_TEXT, "\n\nfine "),
            (generation_pb2.CHANNEL_TEXT, f"{turn}\x1b[2J"),
        ):
            delta = generation_pb2.GenerationDelta(channel=channel, text=text)
            yield generation_pb2.GenerateResponse(delta=delta)
        reason = generation_pb2.FINISH_REASON_STOP
        if said == "wait":
            assert self.cancelled.wait(20)
            reason = generation_pb2.FINISH_REASON_CANCELLED
        finished = generation_pb2.GenerationFinished(
            finish_reason=reason,
            usage=generation_pb2.Usage(prompt_tokens=1000, generated_tokens=21),
            bank_id=BANK_ID,
        )
        finished.timings.decode.FromMilliseconds(500)
        yield generation_pb2.GenerateResponse(finished=finished)

    def CancelGeneration(self, request: Any, context: Any) -> Any:
        assert request.request_id == self.asked[-1].request_id
        self.cancel_asked.set()
        if not self.deaf:
            self.cancelled.set()
        return generation_pb2.CancelGenerationResponse()

    def ListGenerations(self, request: Any, context: Any) -> Any:
        reply = generation_pb2.ListGenerationsResponse()
        reply.generations.add(
            request_id="turn-1",
            state=generation_pb2.GENERATION_STATE_RUNNING,
            admission=generation_pb2.ADMISSION_PARTIAL_FORK,
            miss_reason=generation_pb2.MISS_REASON_KEY_DIFFERS,
            prompt_tokens=100,
            cached_tokens=60,
            slot=3,
            create_time=Timestamp(seconds=int(time.time()) - 120),
        )
        if not request.states:
            reply.generations.add(
                request_id="turn-0",
                state=generation_pb2.GENERATION_STATE_ENDED,
                finish_reason=generation_pb2.FINISH_REASON_LENGTH,
                code="OK",
            )
        return reply

    def ListBanks(self, request: Any, context: Any) -> Any:
        self.listed.append(request)
        first = int(request.page_token or 0)
        banks = [bank(number) for number in range(first, min(first + request.page_size, 450))]
        following = first + len(banks)
        return bank_pb2.ListBanksResponse(
            banks=banks,
            next_page_token=str(following) if following < 450 else "",
            total_size=450,
        )

    def GetBank(self, request: Any, context: Any) -> Any:
        found = bank(7)
        record = found.records.add(
            kind=bank_pb2.RECORD_KIND_VISIBLE, key_tokens=90, key_bytes=400, renderer="ab" * 16
        )
        record.waypoints.add(key_offset_bytes=400, token_position=1000)
        record.key_text = "the key" if request.include_key_text else ""
        found.file.format_version = 1
        for name, num_bytes in (("ids", 4096), ("rows/k.0", 2**20), ("rows/v.0", 2**21)):
            found.file.sections.add(name=name, size_bytes=num_bytes, num_blocks=1)
        found.chain.add(bank_id="c" * 32, frontier=600, size_bytes=2**20, hidden=True)
        found.chain.add(bank_id=found.bank_id, base=600, frontier=1000, size_bytes=5 * 2**20)
        return bank_pb2.GetBankResponse(bank=found)

    def PinBank(self, request: Any, context: Any) -> Any:
        return bank_pb2.PinBankResponse(bank=bank(7))

    def DeleteBank(self, request: Any, context: Any) -> Any:
        if int(request.bank_id, 16) == 440:
            refuse(context, BankInUse("bank 440 is in use by a generation or an export"))
        if int(request.bank_id, 16) == 441:
            refuse(context, BankNotFound("no bank 441"))
        self.deleted.append(request.bank_id)
        return bank_pb2.DeleteBankResponse(freed_bytes=3 * 2**20)

    def CollectGarbage(self, request: Any, context: Any) -> Any:
        reply = bank_pb2.CollectGarbageResponse(freed_bytes=2**20)
        kind = bank_pb2.GARBAGE_KIND_LEFTOVER
        reply.collected.add(kind=kind, num_files=2, size_bytes=2**20)
        if request.include_quarantined:
            reply.collected.add(kind=bank_pb2.GARBAGE_KIND_QUARANTINED, num_files=3)
        return reply

    def VerifyBanks(self, request: Any, context: Any) -> Iterator[Any]:
        yield bank_pb2.VerifyBanksResponse(bank_id=BANK_ID, ok=True, read_bytes=9, done=1, total=2)
        yield bank_pb2.VerifyBanksResponse(bank_id="f" * 32, detail="checksum", done=2, total=2)

    def FlushBanks(self, request: Any, context: Any) -> Iterator[Any]:
        yield bank_pb2.FlushBanksResponse(bank_id=BANK_ID, frontier=1000, written_bytes=2048)

    def RescanBanks(self, request: Any, context: Any) -> Any:
        return bank_pb2.RescanBanksResponse(num_banks=9, num_adopted=2)

    def GetStorage(self, request: Any, context: Any) -> Any:
        return bank_pb2.GetStorageResponse(enabled=True, folder="/banks", quota_bytes=2**33)

    def GetModel(self, request: Any, context: Any) -> Any:
        return model_pb2.GetModelResponse(
            model=model_pb2.Model(
                name="smollm2",
                max_context_tokens=8192,
                num_slots=8,
                default_sampling=generation_pb2.Sampling(temperature=0.5),
            )
        )


def bank(number: int) -> bank_pb2.Bank:
    return bank_pb2.Bank(
        bank_id=f"{number:032x}",
        location=bank_pb2.BANK_LOCATION_STORED,
        frontier=1000,
        trust=[bank_pb2.TRUST_FLAG_COMMITTED, bank_pb2.TRUST_FLAG_PROVEN],
        record_kinds=[bank_pb2.RECORD_KIND_VISIBLE, bank_pb2.RECORD_KIND_VISIBLE],
        size_bytes=5 * 2**20,
        base=number,
        pinned=number < 3,
    )


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    service = Scripted()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
        bank_pb2_grpc.add_BankServiceServicer_to_server(service, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield service, f"127.0.0.1:{port}"
        server.stop(0).wait()


def run(*arguments: str, stdin: str = "", code: int = 0) -> click.testing.Result:
    environ = {name: None for name in os.environ if name.startswith("DS4GRPC_")}
    result = click.testing.CliRunner().invoke(main, arguments, input=stdin, env=environ)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def json_lines(result: click.testing.Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_generate_piped_prints_the_answer_alone_and_harmless(
    scripted: tuple[Scripted, str],
) -> None:
    service, target = scripted
    result = run("generate", "hello", "--server", target)
    assert result.stdout == "\n\nfine 1\ufffd[2J\n"
    assert result.stderr == ""
    (asked,) = service.asked
    assert [m.content for m in asked.chat.messages] == ["hello"]
    assert not asked.chat.HasField("thinking")
    assert not asked.sampling.HasField("temperature")
    assert not asked.stopping.HasField("max_tokens")


def test_generate_sends_every_option(scripted: tuple[Scripted, str]) -> None:
    service, target = scripted
    options = "--max-tokens 5 --temperature 0 --top-p 0.5 --seed 7 --stop END --stop . --exact"
    run(
        *("generate", "-", "--server", target, "--tenant", "me", "--system", "Be brief."),
        *("--thinking", *options.split()),
        stdin="from stdin",
    )
    (asked,) = service.asked
    assert service.metadata["ds4grpc-tenant"] == "me"
    assert [m.content for m in asked.chat.messages] == ["Be brief.", "from stdin"]
    assert asked.chat.thinking.mode == generation_pb2.THINKING_MODE_ENABLED
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.seed) == (0, 0.5, 7)
    assert (asked.stopping.max_tokens, list(asked.stopping.stop)) == (5, ["END", "."])
    assert asked.cache.exact


def test_generate_raw_sends_a_prompt_and_refuses_chat_options(
    scripted: tuple[Scripted, str],
) -> None:
    service, target = scripted
    run("generate", "Once", "--raw", "--server", target)
    assert service.asked[0].prompt == "Once"
    refused = run("generate", "Once", "--raw", "--thinking", "--server", target, code=2)
    assert "--system and --thinking need a chat" in refused.stderr


def test_generate_json_prints_every_event_of_the_stream(scripted: tuple[Scripted, str]) -> None:
    _, target = scripted
    events = json_lines(run("generate", "hello", "--json", "--server", target))
    assert [next(iter(event)) for event in events] == ["started", *["delta"] * 4, "finished"]
    assert events[0]["started"]["admission"] == "ADMISSION_WARM"
    assert events[-1]["finished"]["usage"]["generated_tokens"] == 21


def test_refused_request_is_shown_with_reason_and_field(scripted: tuple[Scripted, str]) -> None:
    _, target = scripted
    result = run("generate", "bad", "--server", target, code=1)
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "error: prompt has 9,000 tokens; the limit is 8,192 (--max-context)",
        "  reason: CONTEXT_OVERFLOW · field: chat.messages",
    ]
    (error,) = json_lines(run("generate", "bad", "--json", "--server", target, code=1))
    assert error["error"]["code"] == "INVALID_ARGUMENT"
    assert error["error"]["metadata"] == {"promptTokens": "9000"}


def test_overload_says_when_to_retry(scripted: tuple[Scripted, str]) -> None:
    _, target = scripted
    result = run("generate", "full", "--server", target, code=1)
    assert "reason: OVERLOADED · retry in 2 s" in result.stderr


def test_absent_server_says_how_to_start_one() -> None:
    result = run("ps", "--server", "127.0.0.1:1", code=1)
    assert "no server answers at 127.0.0.1:1; start one with `ds4grpc serve`" in result.stderr


def test_unimplemented_call_names_the_server(scripted: tuple[Scripted, str]) -> None:
    _, target = scripted
    result = run("banks", "unpin", BANK_ID, "--server", target, code=1)
    assert f"the server at {target} does not offer this call" in result.stderr


def test_chat_replays_only_the_visible_answers(scripted: tuple[Scripted, str]) -> None:
    service, target = scripted
    result = run("chat", "--thinking", "--server", target, stdin="one\n\ntwo\n/quit\nthree\n")
    assert [[m.content for m in asked.chat.messages] for asked in service.asked] == [
        ["one"],
        ["one", "\n\nfine 1\x1b[2J", "two"],
    ]
    assert all(not m.reasoning for asked in service.asked for m in asked.chat.messages)
    assert result.stdout.count("warm · 900 of 1,000 prompt tokens cached · first token") == 2
    assert "21 tokens · 40.0 tokens/s" in result.stdout


def test_chat_from_a_pipe_ends_at_the_first_error(scripted: tuple[Scripted, str]) -> None:
    service, target = scripted
    run("chat", "--server", target, stdin="bad\ntwo\n", code=1)
    assert len(service.asked) == 1


def test_ps_lists_generations(scripted: tuple[Scripted, str]) -> None:
    _, target = scripted
    header, running, ended = run("ps", "--server", target).stdout.splitlines()
    assert header.split("\t")[:4] == ["REQUEST", "STATE", "SLOT", "ADMISSION"]
    assert running.split("\t") == [
        *("turn-1", "running", "3", "partial_fork", "key_differs", "60/100", "0", "2m", "-"),
    ]
    assert ended.split("\t")[-1] == "length"
    assert len(json_lines(run("ps", "--running", "--json", "--server", target))) == 1


def test_banks_ls_pages_up_to_its_limit(scripted: tuple[Scripted, str]) -> None:
    service, target = scripted
    result = run("banks", "ls", "--limit", "430", "--filter", "hits >= 1", "--server", target)
    rows = result.stdout.splitlines()
    assert len(rows) == 431
    assert [request.page_size for request in service.listed] == [200, 200, 30]
    assert {request.filter for request in service.listed} == {"hits >= 1"}
    assert rows[1].split("\t")[:9] == [
        *("000000000000", "stored", "-", "1,000", "0", "5.0 MiB", "visible"),
        *("committed,proven", "0"),
    ]
    shown = run("banks", "ls", "--limit", "9999", "--sort", "hits desc", "--server", target)
    assert len(shown.stdout.splitlines()) == 451
    assert {request.order_by for request in service.listed} == {"", "hits desc"}


def test_banks_show_has_key_kind_frontier_and_waypoints(scripted: tuple[Scripted, str]) -> None:
    _, target = scripted
    shown = run("banks", "show", "000000", "--keys", "--server", target).stdout
    assert "frontier  1,000 tokens" in shown
    assert "sections  ids 4.0 KiB, rows 3.0 MiB in 2 arrays\n" in shown
    assert f"{'c' * 32}\t0\t600\t1.0 MiB\thidden\n" in shown
    assert "the key" not in run("banks", "show", "000000", "--server", target).stdout
    assert "record 0: key kind visible, 90 tokens, 400 bytes" in shown
    assert "400→1000" in shown
    assert "the key" in shown
    (found,) = json_lines(run("banks", "show", "000000", "--json", "--server", target))
    assert found["records"][0]["kind"] == "RECORD_KIND_VISIBLE"


def test_banks_commands_report_what_was_done(scripted: tuple[Scripted, str]) -> None:
    _, target = scripted
    full_id = f"{7:032x}"
    assert run("banks", "pin", "000000", "--server", target).stdout == f"pinned {full_id}\n"
    removed = run("banks", "rm", BANK_ID, "--server", target).stdout
    assert removed == f"deleted {BANK_ID}: 3.0 MiB free again\n"
    flushed = run("banks", "flush", "--server", target).stdout
    assert flushed == f"{BANK_ID} 1,000 tokens: 2.0 KiB written\n"
    assert "9 banks: 2 adopted" in run("banks", "rescan", "--server", target).stdout


def test_banks_rm_of_many_asks_and_a_pipe_must_say_yes(scripted: tuple[Scripted, str]) -> None:
    service, target = scripted
    for how in (("--all",), ("--older-than", "2h"), ("--filter", "hits = 0")):
        refused = run("banks", "rm", *how, "--server", target, code=2)
        assert "447 banks would be deleted; there is no terminal to ask on" in refused.stderr
        assert f"  {449:032x} stored" in refused.stderr
        assert "and 397 more" in refused.stderr
    assert service.deleted == []
    assert [request.filter for request in service.listed[::3]] == ["", "idle > 2h", "hits = 0"]
    with Terminal("banks", "rm", "--all", "--server", target) as terminal:
        terminal.wait_for("Delete 447 banks, 2.2 GiB? [y/N]: ")
        terminal.type("n\n")
        assert terminal.process.wait(10) == 1
    assert service.deleted == []


def test_banks_rm_of_many_spares_pinned_ones_and_goes_on_after_a_refusal(
    scripted: tuple[Scripted, str],
) -> None:
    service, target = scripted
    done = run("banks", "rm", "--all", "--yes", "--server", target, code=1)
    assert "3 pinned banks are kept" in done.stderr
    assert "bank 440 is in use" in done.stderr
    assert "441" not in done.stderr  # it has gone by itself
    wanted = [n for n in range(449, 2, -1) if n not in (440, 441)]  # children before parents
    assert service.deleted == [f"{n:032x}" for n in wanted]
    assert "no bank 441" in run("banks", "rm", f"{441:032x}", "--server", target, code=1).stderr
    (error,) = json_lines(run("banks", "rm", f"{440:032x}", "--json", "--server", target, code=1))
    assert error["error"]["reason"] == "BANK_IN_USE"


@pytest.mark.parametrize("how", [(), (BANK_ID, "--all"), ("--older-than", "soon")])
def test_banks_rm_that_is_unclear_is_refused(
    scripted: tuple[Scripted, str], how: tuple[str, ...]
) -> None:
    service, target = scripted
    run("banks", "rm", *how, "--yes", "--server", target, code=2)
    assert (service.deleted, service.listed) == ([], [])


def test_banks_gc_reports_each_kind(scripted: tuple[Scripted, str]) -> None:
    _, target = scripted
    shown = run("banks", "gc", "--quarantined", "--dry-run", "--server", target).stdout
    assert shown.splitlines() == [
        "leftover          2 files    1.0 MiB",
        "quarantined       3 files        0 B",
        "1.0 MiB would be free again",
    ]
    assert run("banks", "gc", "--server", target).stdout.endswith("1.0 MiB free again\n")


def test_banks_verify_fails_when_a_bank_is_damaged(scripted: tuple[Scripted, str]) -> None:
    _, target = scripted
    checked = run("banks", "verify", "--server", target, code=1).stdout.splitlines()
    assert checked == [
        f"1/2 {BANK_ID} ok",
        f"2/2 {'f' * 32} quarantined: checksum",
        "2 banks, 9 B read, 1 damaged",
    ]


def test_models_show_describes_the_served_model(scripted: tuple[Scripted, str]) -> None:
    _, target = scripted
    shown = run("models", "show", "--server", target).stdout
    assert "smollm2" in shown
    assert "temperature 0.5" in shown


def test_bench_prints_a_table_and_one_json_object_last(scripted: tuple[Scripted, str]) -> None:
    service, target = scripted
    result = run("bench", "turns", "--preamble", "50", "--server", target)
    facts = json.loads(result.stdout.splitlines()[-1])
    assert facts["suite"] == "turns"
    assert [one["admission"] for one in facts["turns"]] == ["warm"] * 3
    assert len({asked.cache.salt for asked in service.asked} - {""}) == 1


def test_status_details_of_a_foreign_server_do_not_break_the_message() -> None:
    packed = AnyMessage(type_url="type.googleapis.com/unknown", value=b"\xff")
    status = to_status(InvalidRequest("no"))
    status.details.insert(0, packed)
    status.code = 13

    def behavior(request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        return b""

    handler = grpc.method_handlers_generic_handler(
        "ds4grpc.v1.GenerationService",
        {"ListGenerations": grpc.unary_unary_rpc_method_handler(behavior)},
    )
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, handlers=[handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        result = run("ps", "--server", f"127.0.0.1:{port}", code=1)
        server.stop(0).wait()
    assert result.stderr == "error: no\n"


class Terminal:
    """The program on a pseudo-terminal, ended with the block (`with`)."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("DS4GRPC_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ds4grpc", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=environ | {"TERM": "xterm", "COLUMNS": "120"},
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, text: str, seconds: float = 30) -> None:
        """Reads until `text` has come after what was waited for before."""
        end = time.monotonic() + seconds
        while text not in self._text:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} did not come, but {self._text!r}"
            self._text += self._decoder.decode(os.read(self._ours, 65536))
        self._text = self._text.split(text, 1)[1]


def test_chat_on_a_terminal_dims_reasoning_and_ctrl_c_ends_the_reply_only(
    scripted: tuple[Scripted, str],
) -> None:
    service, target = scripted
    with Terminal("chat", "--server", target) as terminal:
        terminal.wait_for("› ")
        terminal.type("wait\n")
        terminal.wait_for("\x1b[2mhmm, \x1b[0m\x1b[2mwell\r\n\x1b[0mfine ")
        terminal.interrupt()
        terminal.wait_for("40.0 tokens/s · cancelled")
        assert service.cancelled.is_set()
        terminal.wait_for("› ")
        terminal.type("bad\n")
        terminal.wait_for("prompt has 9,000 tokens")
        terminal.wait_for("› ")
        terminal.type("again\n")
        terminal.wait_for("fine ")
        terminal.wait_for("› ")
        said = [m.content for m in service.asked[-1].chat.messages]
        assert (said[0], said[-1], len(said)) == ("wait", "again", 3)
        terminal.type("/quit\n")
        assert terminal.process.wait(10) == 0


def test_second_ctrl_c_drops_the_call(scripted: tuple[Scripted, str]) -> None:
    service, target = scripted
    service.deaf = True
    with Terminal("generate", "wait", "--server", target) as terminal:
        terminal.wait_for("fine ")
        terminal.interrupt()
        assert service.cancel_asked.wait(10)
        terminal.interrupt()
        terminal.wait_for("cancelled")
        assert terminal.process.wait(10) == 1
    service.cancelled.set()
