"""The table from errors to statuses: complete, and readable by any google.rpc client."""

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from ds4grpc import errors
from ds4grpc.families import CODES as METRIC_CODES
from ds4grpc.rpc.status import CODES, DOMAIN, status_code, to_status

DETAILS = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.RetryInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.QuotaFailure,
)


def tree(root: type[errors.Ds4grpcError]) -> Iterator[type[errors.Ds4grpcError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from tree(kind)


def make(kind: type[errors.Ds4grpcError], message: str = "what happened") -> errors.Ds4grpcError:
    if issubclass(kind, errors.Overloaded):
        return kind(message, retry_seconds=1.5, quota="requests waiting")
    if issubclass(kind, errors.BankCorrupt):
        return kind(message, kind="checksum")
    return kind(message)


def details(status: status_pb2.Status) -> list[Message]:
    found: list[Message] = []
    for packed in status.details:
        (kind,) = (kind for kind in DETAILS if packed.Is(kind.DESCRIPTOR))
        message = kind()
        packed.Unpack(message)
        found.append(message)
    return found


def test_table_has_an_entry_for_each_branch_of_the_tree() -> None:
    assert set(CODES) == set(errors.Ds4grpcError.__subclasses__())


@pytest.mark.parametrize("kind", list(tree(errors.Ds4grpcError)), ids=lambda kind: kind.__name__)
def test_every_error_gets_its_branch_status_and_one_error_info(
    kind: type[errors.Ds4grpcError],
) -> None:
    error = make(kind)
    status = to_status(error)
    branch = next(b for b in errors.Ds4grpcError.__subclasses__() if issubclass(kind, b))
    assert status_code(error) is CODES[branch]
    assert status.code == CODES[branch].value[0]
    assert status.message == "what happened"
    infos = [d for d in details(status) if isinstance(d, error_details_pb2.ErrorInfo)]
    assert [(info.domain, info.reason) for info in infos] == [(DOMAIN, error.reason)]
    assert error.reason == error.reason.upper() != "INTERNAL"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.InvalidRequest, "INVALID_ARGUMENT"),
        (errors.BankNotFound, "NOT_FOUND"),
        (errors.GenerationNotFound, "NOT_FOUND"),
        (errors.BankPinned, "FAILED_PRECONDITION"),
        (errors.Overloaded, "RESOURCE_EXHAUSTED"),
        (errors.StoreFull, "RESOURCE_EXHAUSTED"),
        (errors.Draining, "UNAVAILABLE"),
        (errors.DeadlineExceeded, "DEADLINE_EXCEEDED"),
        (errors.EngineFailed, "INTERNAL"),
    ],
)
def test_clients_can_rely_on_the_status_of_what_they_may_meet(
    kind: type[errors.Ds4grpcError], code: str
) -> None:
    assert status_code(make(kind)).name == code


def test_every_status_of_the_table_is_a_metric_code() -> None:
    named = {code.name.lower() for code in CODES.values()} | {"ok"}
    assert named == set(METRIC_CODES)


def test_invalid_request_names_the_field_and_its_numbers() -> None:
    status = to_status(
        errors.InvalidRequest(
            "prompt has 9,000 tokens; the limit is 8,192 (--max-context)",
            field="chat.messages",
            reason="CONTEXT_OVERFLOW",
            metadata={"prompt_tokens": "9000", "limit": "8192"},
        )
    )
    info, request = details(status)
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert dict(info.metadata) == {"promptTokens": "9000", "limit": "8192"}
    assert isinstance(request, error_details_pb2.BadRequest)
    (violation,) = request.field_violations
    assert violation.field == "chat.messages"
    assert violation.description == status.message


def test_overload_says_when_to_retry_and_which_quota() -> None:
    error = errors.Overloaded("256 requests wait", retry_seconds=2.25, quota="requests_waiting")
    _, retry, quota = details(to_status(error))
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 2.25
    assert isinstance(quota, error_details_pb2.QuotaFailure)
    assert quota.violations[0].subject == "requests_waiting"


def test_draining_says_when_to_retry() -> None:
    _, retry = details(to_status(errors.Draining("the server is stopping", retry_seconds=5)))
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.seconds == 5


@pytest.mark.parametrize("text", ["é" * 5000, "x" * 5000, "🙂" * 3000, "\udc80" * 3000])
def test_long_text_is_cut_to_what_trailers_can_carry(text: str) -> None:
    error = errors.InvalidRequest(text, field="prompt", metadata={"value": text})
    status = to_status(error)
    assert len(status.message.encode()) <= 1024
    assert status.message.endswith("…")
    # 8 KiB of trailers: the percent-encoded message and the details in base64.
    assert len(status.message.encode()) * 3 + len(status.SerializeToString()) * 4 / 3 < 8192 - 512


def test_ordinary_errors_outside_the_tree_have_no_status() -> None:
    assert grpc.StatusCode.UNKNOWN not in CODES.values()
    assert status_code(errors.Ds4grpcError("a bug")) is grpc.StatusCode.INTERNAL
