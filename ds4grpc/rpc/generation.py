"""GenerationService: checks a request, renders it off the loop, streams the engine's events.

Counts each call's way through the metrics (waiting, running, ended), refused ones too. Event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ds4grpc.chat.prompt import Prompt
from ds4grpc.chat.prompts import Prompts
from ds4grpc.engine.engine import GenerationInfo, TorchEngine
from ds4grpc.engine.request import (
    Delta,
    Finished,
    FirstToken,
    GenerationRequest,
    Progress,
    Sampling,
    Started,
)
from ds4grpc.errors import Ds4grpcError, InvalidRequest, ModelNotFound
from ds4grpc.metrics import Metrics, RequestCount
from ds4grpc.rpc import convert, validate
from ds4grpc.rpc.identity import Tenants
from ds4grpc.rpc.status import status_code
from ds4grpc.v1 import generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    import grpc

pb = generation_pb2
T = TypeVar("T")

STATES = {
    "queued": pb.GENERATION_STATE_QUEUED,
    "running": pb.GENERATION_STATE_RUNNING,
    "ended": pb.GENERATION_STATE_ENDED,
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request is checked against. Sizes in tokens."""

    name: str
    vocabulary_size: int
    max_context: int
    sampling: Sampling
    exact_reuse: bool


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Generate, CancelGeneration, ListGenerations."""

    def __init__(
        self,
        engine: TorchEngine,
        prompts: Prompts,
        model: ServedModel,
        metrics: Metrics,
        tenants: Tenants,
        workers: Executor,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._model = model
        self._metrics = metrics
        self._tenants = tenants
        self._workers = workers

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        count = self._metrics.request_started()
        code, reason = "internal", "none"
        try:
            checked = await self._checked(request, context)
            code = "cancelled"  # what it is when the client closes the stream
            async with aclosing(self._engine.generate(checked)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        # Before the client hears of it: a scrape after that agrees with it.
                        code, reason = "ok", event.finish_reason.value
                        count.ended(code, reason)
                    message = _message(event, checked, count)
                    if message is not None:
                        yield message
        except Ds4grpcError as error:
            code = status_code(error).name.lower()
            raise
        except Exception:
            code = "internal"
            raise
        finally:
            count.ended(code, reason)

    async def CancelGeneration(
        self,
        request: pb.CancelGenerationRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.CancelGenerationResponse:
        if not request.request_id:
            raise InvalidRequest(
                "request_id is empty; send the id of a generation",
                field="request_id",
                reason="MALFORMED_ID",
            )
        self._engine.cancel(request.request_id, self._tenants.of(context))
        return pb.CancelGenerationResponse()

    async def ListGenerations(
        self,
        request: pb.ListGenerationsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> pb.ListGenerationsResponse:
        for state in request.states:
            validate.known_enum("states", state, pb.GenerationState)
        listed = self._engine.generations(self._tenants.of(context))
        return pb.ListGenerationsResponse(
            generations=[
                _generation(info)
                for info in listed
                if not request.states or STATES[info.state] in request.states
            ]
        )

    async def _checked(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> GenerationRequest:
        """The request as the engine takes it. Raises InvalidRequest, ModelNotFound."""
        arrival = time.monotonic()
        tenant = self._tenants.of(context)
        if request.request_id:
            validate.request_id("request_id", request.request_id)
        if request.model not in ("", self._model.name):
            raise ModelNotFound(
                f"the model {request.model!r} is not served here; this server has"
                f" {self._model.name!r}"
            )
        prompt_of = self._prompt_of(request)
        remaining = context.time_remaining()
        return GenerationRequest(
            request_id=request.request_id or secrets.token_hex(8),
            tenant=tenant,
            sampling=convert.sampling(
                request.sampling, self._model.sampling, self._model.vocabulary_size
            ),
            stopping=convert.stopping(request.stopping, self._model.vocabulary_size),
            cache=convert.cache_options(request.cache, tenant, exact=self._model.exact_reuse),
            output=convert.output_options(request.output),
            prompt=await asyncio.get_running_loop().run_in_executor(self._workers, prompt_of),
            arrival=arrival,
            deadline=arrival + remaining if remaining is not None else None,
        )

    def _prompt_of(self, request: pb.GenerateRequest) -> Callable[[], Prompt]:
        """What renders and encodes the input; it runs in a worker thread."""
        match request.WhichOneof("input"):
            case "chat":
                return lambda: self._chat_prompt(request.chat)
            case "prompt":
                return lambda: self._prompts.from_text(request.prompt)
            case "token_ids":
                return lambda: self._ids_prompt(request.token_ids)
            case _:
                raise InvalidRequest(
                    "the request has no input; send prompt, token_ids or chat",
                    field="input",
                    reason="NO_INPUT",
                )

    def _chat_prompt(self, chat: pb.Chat) -> Prompt:
        budget = chat.thinking.max_tokens if chat.thinking.HasField("max_tokens") else None
        return self._prompts.from_chat(convert.conversation(chat), budget)

    def _ids_prompt(self, message: pb.TokenIds) -> Prompt:
        ids = np.fromiter(message.ids, dtype=np.uint32)
        highest, size = int(ids.max(initial=0)), self._model.vocabulary_size
        if highest >= size:
            raise InvalidRequest(
                f"token_ids holds {highest}; the vocabulary has {size:,} ids, from 0",
                field="token_ids",
                reason="TOKEN_ID_OUT_OF_RANGE",
                metadata={"value": str(highest), "vocabularySize": str(size)},
            )
        return self._prompts.from_ids(ids)


def _message(
    event: object, request: GenerationRequest, count: RequestCount
) -> pb.GenerateResponse | None:
    """The event for the client, None when it did not ask for it; counts what it says."""
    match event:
        case Started():
            count.admitted(event)
            return pb.GenerateResponse(started=convert.started(event, request.request_id))
        case FirstToken(since_slot=since_slot, since_arrival=since_arrival):
            count.first_token(since_slot=since_slot, since_arrival=since_arrival)
            return None
        case Progress():
            if not request.output.progress:
                return None
            return pb.GenerateResponse(progress=convert.progress(event))
        case Delta():
            return pb.GenerateResponse(delta=convert.delta(event))
        case Finished():
            return pb.GenerateResponse(finished=convert.finished(event))
    raise TypeError(f"unknown event {type(event).__name__}")


def _generation(info: GenerationInfo) -> pb.Generation:
    made = pb.Generation(
        request_id=info.request_id,
        state=STATES[info.state],
        create_time=convert.timestamp(info.created),
        generated_tokens=info.generated_tokens,
        prefilled_tokens=info.prefilled_tokens,
        code=info.code,
    )
    if (started := info.started) is not None:
        miss = started.miss_reason
        made.MergeFrom(
            pb.Generation(
                admission=convert.ADMISSIONS[started.admission],
                miss_reason=convert.MISS_REASONS[miss] if miss is not None else None,
                prompt_tokens=started.prompt_tokens,
                cached_tokens=started.cached_tokens,
                slot=started.slot,
            )
        )
    if (finished := info.finished) is not None:
        made.generated_tokens = finished.usage.generated_tokens
        made.MergeFrom(
            pb.Generation(
                finish_reason=convert.FINISH_REASONS[finished.finish_reason],
                timings=convert.timings(finished.timings),
            )
        )
    return made
