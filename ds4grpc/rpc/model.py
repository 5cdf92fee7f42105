"""ModelService: the served model, its tokenizer and its chat template. Event loop; tokenizing and
rendering run in worker threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, TypeVar

from ds4grpc.chat.prompt import Prompt
from ds4grpc.chat.prompts import Prompts
from ds4grpc.errors import InvalidRequest, ModelNotFound
from ds4grpc.rpc import convert, validate
from ds4grpc.tokenizer import ESCAPE, Tokenizer
from ds4grpc.v1 import model_pb2, model_pb2_grpc

if TYPE_CHECKING:
    import grpc

T = TypeVar("T")

# Answers stay under 1 MiB: an id takes at most five bytes.
MAX_TEXT_BYTES = 256 * 1024
MAX_IDS = 200_000
MAX_RENDER_IDS = 100_000
MAX_TOKENIZE_BYTES = 4 * 1024 * 1024


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """GetModel, Tokenize, Detokenize, RenderPrompt."""

    def __init__(
        self,
        model: model_pb2.Model,
        tokenizer: Tokenizer,
        prompts: Prompts,
        workers: Executor,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._workers = workers

    async def GetModel(
        self, request: model_pb2.GetModelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> model_pb2.GetModelResponse:
        model = self._model
        if request.model not in ("", model.name):
            raise ModelNotFound(
                f"the model {request.model!r} is not served here; this server has {model.name!r}"
            )
        return model_pb2.GetModelResponse(model=model)

    async def Tokenize(
        self, request: model_pb2.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> model_pb2.TokenizeResponse:
        text = request.text
        validate.at_most("text", text.encode(), MAX_TOKENIZE_BYTES, "bytes")

        def encode() -> list[int]:
            if request.parse_control_tokens:
                return self._tokenizer.encode(text.replace(ESCAPE, ESCAPE * 2))
            return self._tokenizer.plain_ids(text)

        ids = await self._in_worker(encode)
        if request.add_bos and self._tokenizer.bos_id is not None and self._tokenizer.add_bos:
            ids = [self._tokenizer.bos_id, *ids]
        validate.at_most("text", ids, MAX_IDS, "token ids")
        return model_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: model_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> model_pb2.DetokenizeResponse:
        ids = list(request.token_ids)
        validate.at_most("token_ids", ids, MAX_IDS, "ids")
        size = self._tokenizer.vocabulary_size
        if ids and max(ids) >= size:
            raise InvalidRequest(
                f"token_ids holds {max(ids)}; the vocabulary has {size:,} ids, from 0",
                field="token_ids",
                reason="TOKEN_ID_OUT_OF_RANGE",
                metadata={"value": str(max(ids)), "vocabularySize": str(size)},
            )
        text = await self._in_worker(lambda: self._tokenizer.decode(ids))
        validate.at_most("token_ids", text.encode(), MAX_TEXT_BYTES * 3, "bytes of text")
        return model_pb2.DetokenizeResponse(text=text)

    async def RenderPrompt(
        self, request: model_pb2.RenderPromptRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> model_pb2.RenderPromptResponse:
        thinking = request.chat.thinking
        budget = thinking.max_tokens if thinking.HasField("max_tokens") else None

        def render() -> Prompt:
            return self._prompts.from_chat(convert.conversation(request.chat), budget)

        prompt = await self._in_worker(render)
        return model_pb2.RenderPromptResponse(
            text=last_text(self._prompts.shown(prompt)),
            prompt_tokens=len(prompt.ids),
            token_ids=prompt.ids[:MAX_RENDER_IDS].tolist(),
            reasoning_open=prompt.form.reasoning_open,
        )

    async def _in_worker(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)


def last_text(text: str) -> str:
    """The last MAX_TEXT_BYTES of a text, whole characters."""
    data = text.encode()
    return text if len(data) <= MAX_TEXT_BYTES else data[-MAX_TEXT_BYTES:].decode(errors="ignore")
