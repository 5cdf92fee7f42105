"""Server reflection, v1alpha and v1, so that tools call the server without proto files.

grpcio-reflection serves v1alpha only. v1 has the same messages under another package name, equal
on the wire, so the same servicer answers both. The descriptors offered are those of the served
services and of the google.rpc error details, in a pool of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

V1ALPHA = "grpc.reflection.v1alpha"
V1 = "grpc.reflection.v1"
SERVICE = "ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Serves both versions on `server`; `service_names` are full names, known to the default
    descriptor pool. Both versions list themselves too."""
    names = [*service_names, f"{V1ALPHA}.{SERVICE}"]
    servicer = aio.ReflectionServicer([*names, f"{V1}.{SERVICE}"], pool=_pool(names))
    handlers = {
        "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
    }
    server.add_generic_rpc_handlers(
        tuple(
            grpc.method_handlers_generic_handler(f"{package}.{SERVICE}", handlers)
            for package in (V1ALPHA, V1)
        )
    )


def _pool(service_names: Iterable[str]) -> descriptor_pool.DescriptorPool:
    """A pool with the files of the services, of google.rpc.Status and its details, and of v1."""
    default = descriptor_pool.Default()
    files = [default.FindServiceByName(name).file for name in service_names]
    files += [error_details_pb2.DESCRIPTOR, status_pb2.DESCRIPTOR]
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()
    for file in files:
        _add(pool, file, added)
    pool.AddSerializedFile(_v1_file().SerializeToString())
    return pool


def _add(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    """Adds a file after the files that it imports."""
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add(pool, dependency, added)
    pool.AddSerializedFile(file.serialized_pb)


def _v1_file() -> descriptor_pb2.FileDescriptorProto:
    """v1's descriptor: v1alpha's under the other package name."""
    file = descriptor_pb2.FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    file.name = "grpc/reflection/v1/reflection.proto"
    file.package = V1
    fields = [field for message in file.message_type for field in message.field]
    for field in (field for field in fields if field.HasField("type_name")):
        field.type_name = field.type_name.replace(f".{V1ALPHA}.", f".{V1}.")
    for method in (method for service in file.service for method in service.method):
        method.input_type = method.input_type.replace(f".{V1ALPHA}.", f".{V1}.")
        method.output_type = method.output_type.replace(f".{V1ALPHA}.", f".{V1}.")
    return file
