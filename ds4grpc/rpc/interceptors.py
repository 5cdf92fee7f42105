"""Turns what a handler raises into the status that the client sees; every service goes through.

Errors of our tree get the status of `rpc.status`; anything else is a bug: logged here with its
traceback and answered INTERNAL without it. Knows no service and counts nothing. Event loop.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc

from ds4grpc.errors import Ds4grpcError, EngineFailed
from ds4grpc.logs import line
from ds4grpc.rpc.status import abort

log = logging.getLogger(__name__)

INTERNAL = EngineFailed("internal error; the server's log has the cause", reason="INTERNAL")

# Strings: these are generic in the stubs only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each handler, unary and streaming on either side.

    A handler that is an async generator is closed in the RPC's own task as soon as the RPC ends,
    however it ends: its `finally` blocks never wait for the garbage collector.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        # None is a method that nobody serves: gRPC answers UNIMPLEMENTED itself.
        return handler if handler is None else _wrap(handler, handler_call_details.method)


def _wrap(handler: Handler, method: str) -> Handler:
    """The same handler with its errors translated; plain functions (a generated base class that
    answers UNIMPLEMENTED) stay as they are."""
    kind = ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )
    behavior = getattr(handler, kind)
    if inspect.isasyncgenfunction(behavior):
        wrapped = _generator(behavior, method)
    elif inspect.iscoroutinefunction(behavior):
        wrapped = _coroutine(behavior, method)
    else:
        return handler
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    made: Handler = make(
        wrapped,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return made


def _coroutine(behavior: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> Any:
        async with _translated(context, method):
            return await behavior(request, context)

    return call


def _generator(
    behavior: Callable[..., AsyncGenerator[Any, None]], method: str
) -> Callable[..., Any]:
    # Not a generator itself: gRPC drops a cancelled one without closing it.
    async def call(request: Any, context: Context) -> None:
        async with _translated(context, method), aclosing(behavior(request, context)) as replies:
            async for reply in replies:
                await context.write(reply)

    return call


@asynccontextmanager
async def _translated(context: Context, method: str) -> AsyncIterator[None]:
    try:
        yield
    except Ds4grpcError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception(line("unexpected error", method=method))
        await abort(context, INTERNAL)
