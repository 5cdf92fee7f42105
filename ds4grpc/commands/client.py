"""The gRPC side of client commands: a channel, and a server's error in words.

Owns how a failed call is shown: what was wrong, its reason and numbers, what to do. Synchronous,
main thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import click
import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from ds4grpc.commands.options import Target


@contextmanager
def connected(target: Target) -> Iterator[grpc.Channel]:
    """A channel to the target; calls that fail inside raise `CallFailed`, a click exception."""
    # A proxy from the environment must not come between a client and its own machine.
    options = [("grpc.enable_http_proxy", 0)] if target.address.is_loopback else []
    with grpc.insecure_channel(str(target.address), options=options) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise CallFailed(error, target) from error


class CallFailed(click.ClickException):
    """A call that the server refused or that did not reach it."""

    def __init__(self, error: Any, target: Target) -> None:
        self.code: grpc.StatusCode = error.code()
        self.reason, self.metadata, self.retry_seconds, self.fields = _details(error)
        message = error.details() or self.code.name
        if self.code is grpc.StatusCode.UNAVAILABLE and not self.reason:
            message = (
                f"no server answers at {target.address}; start one with `ds4grpc serve`, or name"
                " another with --server or DS4GRPC_SERVER"
            )
        elif self.code is grpc.StatusCode.UNIMPLEMENTED and not self.reason:
            message = f"the server at {target.address} does not offer this call: {message}"
        elif self.code is grpc.StatusCode.CANCELLED and not self.reason:
            message = "cancelled"
        super().__init__(message)
        self._as_json = target.as_json

    def show(self, file: IO[Any] | None = None) -> None:
        """On stderr; with --json one object on stdout, the last line there."""
        if self._as_json:
            click.echo(json.dumps({"error": self.facts()}))
            return
        click.echo(click.style("error: ", fg="red", bold=True) + self.message, err=True)
        notes = [f"reason: {self.reason}"] if self.reason else []
        if self.fields:
            notes.append(f"field: {', '.join(self.fields)}")
        if self.retry_seconds is not None:
            notes.append(f"retry in {self.retry_seconds:g} s")
        if notes:
            click.echo(click.style("  " + " · ".join(notes), dim=True), err=True)

    def facts(self) -> dict[str, Any]:
        """For programs."""
        return {
            "code": self.code.name,
            "message": self.message,
            "reason": self.reason,
            "metadata": self.metadata,
            "fields": self.fields,
            "retry_seconds": self.retry_seconds,
        }


def _details(error: Any) -> tuple[str, dict[str, str], float | None, list[str]]:
    """(reason, metadata, seconds until a retry may help, fields at fault)."""
    reason, metadata, retry_seconds, fields = "", {}, None, []
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        status = None  # details of some other server that contradict its status
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    request = error_details_pb2.BadRequest()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_seconds = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(request):
            fields = [violation.field for violation in request.field_violations]
    return reason, metadata, retry_seconds, fields
