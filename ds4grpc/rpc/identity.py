"""Who calls: the tenant of an RPC.

Until callers have an identity of their own, the metadata key `ds4grpc-tenant` names it, and only
on listeners that other machines cannot reach. Event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ds4grpc.errors import InvalidRequest
from ds4grpc.rpc.validate import REQUEST_ID

if TYPE_CHECKING:
    import grpc

TENANT_KEY = "ds4grpc-tenant"


class Tenants:
    """Reads the tenant of each call on one listener."""

    def __init__(self, *, loopback: bool) -> None:
        self._loopback = loopback

    def of(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        """The caller's tenant, "" when it names none. Raises InvalidRequest."""
        names = [value for key, value in context.invocation_metadata() or () if key == TENANT_KEY]
        if not names:
            return ""
        if not self._loopback:
            raise InvalidRequest(
                f"the metadata key {TENANT_KEY} is accepted on loopback listeners only; leave it"
                " out",
                field=TENANT_KEY,
                reason="TENANT_NOT_ACCEPTED",
            )
        name = names[0]
        if len(names) > 1 or not isinstance(name, str) or REQUEST_ID.fullmatch(name) is None:
            raise InvalidRequest(
                f"the metadata key {TENANT_KEY} must be sent once, as 1 to 128 characters of"
                " A-Z a-z 0-9 . _ -",
                field=TENANT_KEY,
                reason="MALFORMED_ID",
            )
        return name
