"""A small asyncio client for tests: one call collected into one value."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from ds4grpc.v1 import (
    bank_pb2,
    bank_pb2_grpc,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
)
from ds4grpc.v1 import (
    generation_pb2 as pb,
)

Messages = Sequence[tuple[str, ...] | pb.ChatMessage]
ROLES = {
    "system": pb.ROLE_SYSTEM,
    "user": pb.ROLE_USER,
    "assistant": pb.ROLE_ASSISTANT,
    "tool": pb.ROLE_TOOL,
}


@dataclass
class Reply:
    """What came of one Generate call. Times are time.monotonic() seconds."""

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    deltas: list[pb.GenerationDelta] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    sent: float = 0.0
    started: pb.GenerationStarted = field(default_factory=pb.GenerationStarted)
    finished: pb.GenerationFinished = field(default_factory=pb.GenerationFinished)
    progress: list[pb.GenerationProgress] = field(default_factory=list)

    @property
    def admission(self) -> str:
        return pb.Admission.Name(self.started.admission).removeprefix("ADMISSION_").lower()

    @property
    def miss_reason(self) -> str:
        name = pb.MissReason.Name(self.started.miss_reason)
        return name.removeprefix("MISS_REASON_").lower()

    @property
    def finish_reason(self) -> str:
        name = pb.FinishReason.Name(self.finished.finish_reason)
        return name.removeprefix("FINISH_REASON_").lower()

    @property
    def computed(self) -> int:
        """Prompt tokens that were prefilled."""
        return self.started.suffix_tokens

    @property
    def prompt_ids(self) -> list[int]:
        """The effective prompt."""
        return list(self.started.prompt_token_ids)

    @property
    def first_token_seconds(self) -> float:
        return self.token_times[0] - self.sent


def chat_request(messages: Messages, **options: Any) -> pb.GenerateRequest:
    """A chat request. Messages are (role, content) or ("assistant", content, reasoning).

    Options: thinking (True, False, None), replay ("keep", "drop"), thinking_tokens, tools, and
    those of `request_options`.
    """
    thinking = pb.Thinking()
    wanted = options.pop("thinking", None)
    if wanted is not None:
        thinking.mode = pb.THINKING_MODE_ENABLED if wanted else pb.THINKING_MODE_DISABLED
    replay = options.pop("replay", None)
    if replay is not None:
        thinking.replay = pb.REASONING_REPLAY_KEEP if replay == "keep" else pb.REASONING_REPLAY_DROP
    budget = options.pop("thinking_tokens", None)
    if budget is not None:
        thinking.max_tokens = budget
    tools = options.pop("tools", ())
    chat = pb.Chat(
        messages=[
            m
            if isinstance(m, pb.ChatMessage)
            else pb.ChatMessage(
                role=ROLES[m[0]], content=m[1], reasoning=m[2] if len(m) > 2 else ""
            )
            for m in messages
        ],
        tools=tools,
        thinking=thinking,
    )
    request = request_options(**options)
    request.chat.CopyFrom(chat)
    return request


def request_options(**options: Any) -> pb.GenerateRequest:
    """Everything but the input. Options: request_id, max_tokens, temperature (0), seed, bias, stop,
    bypass, no_store, exact, pin, salt, ids (True), prompt_ids (True), logprobs, progress."""
    sampling = pb.Sampling(temperature=options.pop("temperature", 0.0))
    for name in ("seed", "top_p", "top_k", "min_p", "repetition_penalty"):
        if name in options:
            setattr(sampling, name, options.pop(name))
    for token_id, bias in options.pop("bias", {}).items():
        sampling.logit_bias[token_id] = bias
    stopping = pb.Stopping(
        stop=options.pop("stop", ()),
        stop_token_ids=options.pop("stop_token_ids", ()),
        ignore_eos=options.pop("ignore_eos", False),
    )
    if "max_tokens" in options:
        stopping.max_tokens = options.pop("max_tokens")
    cache = pb.Cache(
        **{
            name: options.pop(name)
            for name in ("bypass", "no_store", "exact", "pin", "salt")
            if name in options
        }
    )
    output = pb.Output(
        token_ids=options.pop("ids", True),
        prompt_token_ids=options.pop("prompt_ids", True),
        logprobs=options.pop("logprobs", 0),
        progress=options.pop("progress", False),
    )
    request = pb.GenerateRequest(
        request_id=options.pop("request_id", ""),
        sampling=sampling,
        stopping=stopping,
        cache=cache,
        output=output,
    )
    if options:
        raise TypeError(f"unknown options {sorted(options)}")
    return request


class Client:
    """Stubs of one channel, as one tenant."""

    def __init__(self, channel: grpc.aio.Channel, tenant: str = "") -> None:
        self.channel = channel
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.banks = bank_pb2_grpc.BankServiceStub(channel)
        self.models = model_pb2_grpc.ModelServiceStub(channel)
        self.metadata = (("ds4grpc-tenant", tenant),) if tenant else ()

    async def chat(self, messages: Messages, **options: Any) -> Reply:
        return await self.run(chat_request(messages, **options))

    async def tokens(self, ids: Sequence[int], **options: Any) -> Reply:
        request = request_options(**options)
        request.token_ids.ids.extend(ids)
        return await self.run(request)

    async def prompt(self, text: str, **options: Any) -> Reply:
        request = request_options(**options)
        request.prompt = text
        return await self.run(request)

    async def run(self, request: pb.GenerateRequest, deadline: float | None = None) -> Reply:
        """One call to its end; `deadline` in seconds. Raises grpc.aio.AioRpcError."""
        reply = Reply(sent=time.monotonic())
        call = self.generation.Generate(request, metadata=self.metadata, timeout=deadline)
        async for response in call:
            collect(reply, response)
        return reply

    async def encode(self, text: str, *, parse_control_tokens: bool = False) -> list[int]:
        response = await self.models.Tokenize(
            model_pb2.TokenizeRequest(text=text, parse_control_tokens=parse_control_tokens)
        )
        return list(response.token_ids)

    async def bank(self, bank_id: str, *, key_text: bool = False) -> bank_pb2.Bank:
        request = bank_pb2.GetBankRequest(bank_id=bank_id, include_key_text=key_text)
        response: bank_pb2.GetBankResponse
        response = await self.banks.GetBank(request, metadata=self.metadata)
        return response.bank

    async def decode(self, ids: Sequence[int]) -> str:
        response = await self.models.Detokenize(model_pb2.DetokenizeRequest(token_ids=ids))
        return str(response.text)

    async def render(self, messages: Messages, **options: Any) -> model_pb2.RenderPromptResponse:
        request = chat_request(messages, **options)
        response: model_pb2.RenderPromptResponse
        response = await self.models.RenderPrompt(
            model_pb2.RenderPromptRequest(chat=request.chat), metadata=self.metadata
        )
        return response


def collect(reply: Reply, response: pb.GenerateResponse) -> None:
    """Adds one event to the reply."""
    match response.WhichOneof("event"):
        case "started":
            reply.started = response.started
        case "progress":
            reply.progress.append(response.progress)
        case "finished":
            reply.finished = response.finished
        case "delta":
            delta = response.delta
            reply.token_times.append(time.monotonic())
            reply.deltas.append(delta)
            reply.token_ids.extend(delta.token_ids)
            if delta.channel == pb.CHANNEL_REASONING:
                reply.reasoning += delta.text
            elif delta.channel == pb.CHANNEL_TEXT:
                reply.text += delta.text


@asynccontextmanager
async def connect(target: str, tenant: str = "") -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(target) as channel:
        yield Client(channel, tenant)


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """A refused call's google.rpc details by their short names."""
    data = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
    assert isinstance(data, bytes)
    found: dict[str, Any] = {}
    for packed in status_pb2.Status.FromString(data).details:
        name = packed.TypeName().rsplit(".", 1)[-1]
        found[name] = getattr(error_details_pb2, name)()
        packed.Unpack(found[name])
    return found
