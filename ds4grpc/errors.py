"""Every error that ds4grpc raises on purpose, as one tree.

    Ds4grpcError
    ├── InvalidRequest        the request can never succeed as sent
    ├── NotFound              what the request names does not exist
    │   ├── BankNotFound
    │   ├── GenerationNotFound
    │   └── ModelNotFound
    ├── PreconditionFailed    right request, wrong state: a retry alone does not help
    │   ├── BankPinned
    │   ├── BankInUse
    │   └── StoreDisabled
    ├── Overloaded            a bounded queue or budget is full: retry later
    ├── StoreFull             the disk budget has no room left
    ├── StoreFailed           the disk or the catalog refused; a later retry may help
    ├── Draining              the server is stopping: retry elsewhere
    ├── DeadlineExceeded      the caller's deadline passed
    ├── GenerationCancelled   the caller gave up
    ├── BankCorrupt           bytes on disk are not what was written
    ├── EngineFailed          a step failed; the server's fault
    ├── ConfigError           an option or environment variable is wrong (start-up only)
    └── ModelError            a model file is missing, damaged or not supported (start-up only)

It does not know gRPC: `rpc.status` maps each class to a status code. Anything raised that is not
in this tree is a bug.
"""

from __future__ import annotations

from collections.abc import Mapping


class Ds4grpcError(Exception):
    """Base of the tree.

    `message` says what was wrong with the value seen, the limit, and what to do. `reason` is an
    UPPER_SNAKE_CASE word for programs (google.rpc.ErrorInfo.reason), `metadata` its numbers.
    """

    reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason if reason is not None else type(self).reason
        self.metadata = dict(metadata or {})


class InvalidRequest(Ds4grpcError):
    """The request can never succeed as sent; `field` is the proto path of the culprit."""

    reason = "INVALID_REQUEST"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.field = field


class NotFound(Ds4grpcError):
    """What the request names does not exist, or not for this caller."""

    reason = "NOT_FOUND"


class BankNotFound(NotFound):
    reason = "BANK_NOT_FOUND"


class GenerationNotFound(NotFound):
    reason = "GENERATION_NOT_FOUND"


class ModelNotFound(NotFound):
    reason = "MODEL_NOT_FOUND"


class PreconditionFailed(Ds4grpcError):
    """The request is right but the state of the server is not."""

    reason = "PRECONDITION_FAILED"


class BankPinned(PreconditionFailed):
    reason = "BANK_PINNED"


class BankInUse(PreconditionFailed):
    reason = "BANK_IN_USE"


class StoreDisabled(PreconditionFailed):
    reason = "STORE_DISABLED"


class Overloaded(Ds4grpcError):
    """A bounded queue or budget is full. `retry_seconds` is when a retry may help."""

    reason = "OVERLOADED"

    def __init__(
        self,
        message: str,
        *,
        retry_seconds: float,
        quota: str = "",
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_seconds = retry_seconds
        self.quota = quota


class StoreFull(Ds4grpcError):
    reason = "STORE_FULL"


class StoreFailed(Ds4grpcError):
    reason = "STORE_FAILED"


class Draining(Ds4grpcError):
    """The server is stopping. `retry_seconds` is when another one may be up."""

    reason = "DRAINING"

    def __init__(self, message: str, *, retry_seconds: float = 5.0) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class DeadlineExceeded(Ds4grpcError):
    reason = "DEADLINE_EXCEEDED"


class GenerationCancelled(Ds4grpcError):
    reason = "CANCELLED"


class BankCorrupt(Ds4grpcError):
    """Bytes on disk are not what was written. `kind` is a closed set for metrics:
    `truncated`, `checksum`, `format`, `foreign`, `identity`, `record`, `io`."""

    reason = "BANK_CORRUPT"

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message, metadata={"kind": kind})
        self.kind = kind


class EngineFailed(Ds4grpcError):
    reason = "ENGINE_FAILED"


class ConfigError(Ds4grpcError):
    reason = "CONFIG_ERROR"


class ModelError(Ds4grpcError):
    reason = "MODEL_ERROR"
