"""The one table from errors to gRPC statuses, and the google.rpc.Status that goes with each.

Knows the error tree and google.rpc's details; no service, no metrics. Event loop only where it
awaits `abort`.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from ds4grpc import errors

DOMAIN = "ds4grpc"
DETAILS_KEY = "grpc-status-details-bin"

# Chosen by "can a retry help?". A class without an entry takes its parent's.
CODES: dict[type[errors.Ds4grpcError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.PreconditionFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StoreFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StoreFailed: grpc.StatusCode.UNAVAILABLE,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.GenerationCancelled: grpc.StatusCode.CANCELLED,
    errors.BankCorrupt: grpc.StatusCode.DATA_LOSS,
    errors.EngineFailed: grpc.StatusCode.INTERNAL,
    errors.ConfigError: grpc.StatusCode.INTERNAL,
    errors.ModelError: grpc.StatusCode.INTERNAL,
}

# A status travels in HTTP/2 trailers, of which peers take 8 KiB. The message is in them up to
# three times (header, Status, one detail), percent-encoded or in base64.
MAX_MESSAGE_BYTES = 1024
MAX_METADATA_BYTES = 128


def status_code(error: errors.Ds4grpcError) -> grpc.StatusCode:
    """The gRPC status of an error: its class's, else its nearest ancestor's."""
    for kind in type(error).__mro__:
        if kind in CODES:
            return CODES[kind]
    return grpc.StatusCode.INTERNAL


def to_status(error: errors.Ds4grpcError) -> status_pb2.Status:
    """The error with exactly one ErrorInfo, and RetryInfo, BadRequest or QuotaFailure where the
    error says so."""
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason,
            domain=DOMAIN,
            metadata={
                _lower_camel(key): _cut(value, MAX_METADATA_BYTES)
                for key, value in error.metadata.items()
            },
        )
    ]
    if isinstance(error, errors.Overloaded | errors.Draining):
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if isinstance(error, errors.Overloaded) and error.quota:
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject=error.quota, description=message)
        details.append(quota)
    if isinstance(error, errors.InvalidRequest) and error.field:
        request = error_details_pb2.BadRequest()
        request.field_violations.add(field=error.field, description=message, reason=error.reason)
        details.append(request)
    status = status_pb2.Status(code=status_code(error).value[0], message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(
    context: grpc.aio.ServicerContext[Any, Any], error: errors.Ds4grpcError
) -> NoReturn:
    """Ends the RPC with the error's status. Raises grpc.aio.AbortError, always."""
    status = to_status(error)
    await context.abort(
        status_code(error),
        status.message,
        trailing_metadata=((DETAILS_KEY, status.SerializeToString()),),
    )


def _cut(text: str, limit_bytes: int) -> str:
    """Valid UTF-8 of at most `limit_bytes`; what is cut ends in an ellipsis."""
    data = text.encode("utf-8", "replace")
    if len(data) > limit_bytes:
        data = data[: limit_bytes - 3].decode("utf-8", "ignore").encode() + "…".encode()
    return data.decode()


def _lower_camel(key: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), key)
