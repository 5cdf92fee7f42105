"""BankService: what a tenant may see and do of its banks, resident and stored. Event loop; file
work runs in the store's threads, slots change on the engine's."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ds4grpc.bank import PersistReason, Record, RecordKind, Trust, tenant_tag
from ds4grpc.engine.engine import ResidentInfo, TorchEngine
from ds4grpc.errors import BankInUse, BankNotFound, InvalidRequest, StoreDisabled
from ds4grpc.rpc import bank_files, bank_view, convert, listing, validate
from ds4grpc.rpc.identity import Tenants
from ds4grpc.rpc.model import last_text
from ds4grpc.store.store import BankInfo, Store
from ds4grpc.tokenizer import Tokenizer, unescape
from ds4grpc.v1 import bank_pb2, bank_pb2_grpc

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

pb = bank_pb2
T = TypeVar("T")

_ID = re.compile(r"[0-9a-f]{6,32}")
_LOCATIONS = {
    "resident": pb.BANK_LOCATION_RESIDENT,
    "stored": pb.BANK_LOCATION_STORED,
    "both": pb.BANK_LOCATION_BOTH,
}
# An answer stays under 1 MiB whatever a bank holds.
MAX_RECORDS_SHOWN = 16
MAX_WAYPOINTS_SHOWN = 2048
MAX_KEY_TEXTS_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class _Bank:
    """One bank, wherever it is."""

    bank_id: str
    resident: ResidentInfo | None
    stored: BankInfo | None
    in_use: bool = False  # a running generation is in it, or went on from it

    @property
    def location(self) -> str:
        if self.stored is None:
            return "resident"
        return "stored" if self.resident is None else "both"

    @property
    def trust(self) -> Trust:
        if self.stored is not None:
            return self.stored.trust
        assert self.resident is not None
        return Trust.COMMITTED | (Trust.KEYED if self.resident.records else Trust(0))

    def row(self) -> listing.Row:
        stored, resident = self.stored, self.resident
        frontier = stored.frontier if stored is not None else resident.frontier  # type: ignore[union-attr]
        used = [stored.last_used_at] if stored is not None else []
        used += [resident.last_use] if resident is not None else []
        return listing.Row(
            bank_id=self.bank_id,
            location=self.location,
            frontier=frontier,
            base=stored.base if stored is not None else 0,
            size_bytes=stored.size_bytes if stored is not None else 0,
            hits=stored.hits if stored is not None else 0,
            pinned=stored.pinned if stored is not None else False,
            trust=self.trust,
            create_time=stored.created_at if stored is not None else max(used),
            last_use_time=max(used),
        )


class BankService(bank_pb2_grpc.BankServiceServicer):
    """Lists, shows, keeps, checks and deletes banks of the caller's tenant."""

    def __init__(
        self,
        engine: TorchEngine,
        store: Store | None,
        off_detail: str,
        tenants: Tenants,
        kv_memory_bytes: int,
        tokenizer: Tokenizer,
        workers: Executor,
        dtype: str,
    ) -> None:
        self._engine = engine
        self._store = store
        self._off_detail = off_detail  # why there is no store
        self._tenants = tenants
        self._kv_memory_bytes = kv_memory_bytes
        self._tokenizer = tokenizer
        self._workers = workers
        self._dtype = dtype  # of the rows

    async def ListBanks(
        self, request: pb.ListBanksRequest, context: Context
    ) -> pb.ListBanksResponse:
        query = listing.parse(request.filter, request.order_by, time.time())
        banks = await self._banks(context)

        def chosen() -> listing.Page:
            rows = (bank.row() for bank in banks.values())
            return listing.page(rows, query, request.page_size, request.page_token)

        page = await self._in_worker(chosen)
        return pb.ListBanksResponse(
            banks=[_message(banks[row.bank_id]) for row in page.rows],
            next_page_token=page.next_page_token,
            total_size=page.total_size,
        )

    async def GetBank(self, request: pb.GetBankRequest, context: Context) -> pb.GetBankResponse:
        bank = await self._find(request.bank_id, context)
        message = _message(bank)
        records: tuple[Record, ...] = ()
        if bank.stored is not None:
            inspected = await self._need_store().inspect(bank.bank_id)
            message.file.CopyFrom(bank_view.file_of(inspected.header, self._dtype))
            message.chain.extend(map(bank_view.link_of, inspected.chain))
            records = inspected.content.records
        if bank.resident is not None:
            records = bank.resident.records
        with_text = bool(request.include_key_text)
        message.records.extend(
            await self._in_worker(lambda: self._records(records, include_text=with_text))
        )
        return pb.GetBankResponse(bank=message)

    async def DeleteBank(
        self, request: pb.DeleteBankRequest, context: Context
    ) -> pb.DeleteBankResponse:
        bank = await self._find(request.bank_id, context)
        if bank.in_use:
            raise BankInUse(
                f"bank {bank.bank_id} is in use by a running generation; cancel it or retry later"
            )
        freed, hidden = 0, False
        if bank.stored is not None:
            deleted = await self._need_store().delete(bank.bank_id)
            freed, hidden = deleted.freed_bytes, deleted.hidden
        if bank.resident is not None and not await self._engine.forget(bank.resident):
            raise BankInUse(f"bank {bank.bank_id} has just come into use; retry later")
        return pb.DeleteBankResponse(freed_bytes=freed, hidden=hidden)

    async def PinBank(self, request: pb.PinBankRequest, context: Context) -> pb.PinBankResponse:
        bank = await self._find_stored(request.bank_id, context)
        stored = await self._need_store().pin(bank.bank_id)
        return pb.PinBankResponse(bank=_message(_Bank(bank.bank_id, bank.resident, stored)))

    async def UnpinBank(
        self, request: pb.UnpinBankRequest, context: Context
    ) -> pb.UnpinBankResponse:
        bank = await self._find_stored(request.bank_id, context)
        stored = await self._need_store().unpin(bank.bank_id)
        return pb.UnpinBankResponse(bank=_message(_Bank(bank.bank_id, bank.resident, stored)))

    async def VerifyBanks(
        self, request: pb.VerifyBanksRequest, context: Context
    ) -> AsyncIterator[pb.VerifyBanksResponse]:
        store = self._need_store()
        validate.at_most("bank_ids", request.bank_ids, listing.MAX_PAGE, "ids")
        if request.bank_ids:
            chosen = [(await self._find_stored(i, context)).bank_id for i in request.bank_ids]
        else:
            chosen = [b.bank_id for b in (await self._banks(context)).values() if b.stored]
        if not chosen:
            return
        async for verdict in store.verify(chosen):
            yield pb.VerifyBanksResponse(
                bank_id=verdict.bank_id,
                ok=verdict.ok,
                detail=verdict.detail,
                read_bytes=verdict.read_bytes,
                done=verdict.done,
                total=verdict.total,
            )

    async def FlushBanks(
        self, request: pb.FlushBanksRequest, context: Context
    ) -> AsyncIterator[pb.FlushBanksResponse]:
        self._need_store()
        tag = tenant_tag(self._tenants.of(context))
        async for want, persisted in self._engine.flush(PersistReason.ADMIN):
            if want.source.content.namespace.startswith(tag):
                yield pb.FlushBanksResponse(
                    bank_id=persisted.bank_id,
                    frontier=want.source.content.frontier,
                    written_bytes=persisted.written_bytes,
                    detail=persisted.detail,
                )

    async def RescanBanks(
        self, request: pb.RescanBanksRequest, context: Context
    ) -> pb.RescanBanksResponse:
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await self._need_store().rescan()
        return pb.RescanBanksResponse(
            num_banks=found.num_banks,
            num_adopted=found.num_adopted,
            num_dropped=found.num_dropped,
            num_quarantined=found.num_quarantined,
            duration=convert.duration(loop.time() - began),
        )

    async def ExportBank(self, request: pb.ExportBankRequest, context: Context) -> None:
        # Not a generator: it must know how long the client takes for each message.
        bank = await self._find_stored(request.bank_id, context)
        await bank_files.export(self._need_store().transfer, bank.bank_id, context)

    async def ImportBank(
        self, requests: AsyncIterator[pb.ImportBankRequest], context: Context
    ) -> pb.ImportBankResponse:
        tenant = self._tenants.of(context)
        return await bank_files.receive(self._need_store().transfer, tenant, requests)

    async def CollectGarbage(
        self, request: pb.CollectGarbageRequest, context: Context
    ) -> pb.CollectGarbageResponse:
        pieces = await self._need_store().collect_garbage(
            quarantined=request.include_quarantined, dry_run=request.validate_only
        )
        return bank_view.collected(pieces)

    async def GetStorage(
        self, request: pb.GetStorageRequest, context: Context
    ) -> pb.GetStorageResponse:
        stats = self._engine.stats()
        response = pb.GetStorageResponse(
            num_resident=sum(stats.resident_trust.values()),
            kv_memory_bytes=stats.kv_bytes,
            kv_memory_quota_bytes=self._kv_memory_bytes,
        )
        if self._store is None:
            response.detail = self._off_detail
            return response
        storage = await self._store.storage()
        response.enabled = not self._store.trouble
        response.detail = self._store.trouble
        response.folder = storage.folder
        response.fingerprint = storage.fingerprint
        response.disk_bytes = storage.disk_bytes
        response.quota_bytes = storage.quota_bytes
        response.free_bytes = storage.free_bytes
        response.num_stored = storage.num_stored
        response.num_pinned = storage.num_pinned
        response.num_quarantined = storage.num_quarantined
        return response

    def _need_store(self) -> Store:
        if self._store is None:
            raise StoreDisabled(f"the disk tier is off: {self._off_detail}")
        return self._store

    async def _banks(self, context: Context) -> dict[str, _Bank]:
        """The tenant's banks by id."""
        tag = tenant_tag(self._tenants.of(context))
        stored = await self._store.list_banks() if self._store is not None else []
        residents = await self._engine.residents()
        return await self._in_worker(lambda: _merged(stored, residents, tag))

    async def _in_worker(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)

    async def _find(self, bank_id: str, context: Context) -> _Bank:
        """By whole id or unique beginning. Raises InvalidRequest, BankNotFound."""
        if _ID.fullmatch(bank_id) is None:
            raise InvalidRequest(
                f"bank_id {bank_id[:64]!r} is not one; send 32 hex digits, or at least the first 6",
                field="bank_id",
                reason="MALFORMED_ID",
            )
        found = [b for b in (await self._banks(context)).values() if b.bank_id.startswith(bank_id)]
        if not found:
            raise BankNotFound(f"no bank {bank_id!r}; `ds4grpc banks ls` shows which there are")
        if len(found) > 1:
            raise InvalidRequest(
                f"bank_id {bank_id!r} is the beginning of {len(found)} ids; send more digits",
                field="bank_id",
                reason="AMBIGUOUS_ID",
            )
        return found[0]

    async def _find_stored(self, bank_id: str, context: Context) -> _Bank:
        store = self._need_store()
        bank = await self._find(bank_id, context)
        if bank.stored is None:
            frontier = bank.row().frontier
            raise BankNotFound(
                f"bank {bank.bank_id} of {frontier} tokens is resident only; "
                + (
                    "`ds4grpc banks flush` stores it"
                    if frontier >= store.min_tokens
                    else f"those of fewer than {store.min_tokens} are not stored: lower"
                    " --kv-cache-min-tokens"
                )
            )
        return bank

    def _records(
        self,
        records: tuple[Record, ...],
        include_text: bool,
    ) -> list[pb.BankRecord]:
        """Records as messages; counting a key's tokens computes."""
        shown, left = [], MAX_KEY_TEXTS_BYTES
        for record in records[:MAX_RECORDS_SHOWN]:
            key = record.key.decode()
            text = last_text(unescape(key)) if include_text and left > 0 else ""
            left -= len(text.encode())
            shown.append(
                pb.BankRecord(
                    kind=convert.RECORD_KINDS[record.kind],
                    key_bytes=len(record.key),
                    key_tokens=len(self._tokenizer.encode(key)),
                    renderer=record.renderer.hex(),
                    waypoints=[
                        pb.Waypoint(key_offset_bytes=w.offset, token_position=w.position)
                        for w in record.waypoints[-MAX_WAYPOINTS_SHOWN // MAX_RECORDS_SHOWN :]
                    ],
                    key_text=text,
                )
            )
        return shown


def _merged(
    stored: Sequence[BankInfo], residents: Sequence[ResidentInfo], tag: bytes
) -> dict[str, _Bank]:
    """A tenant's banks by id, each wherever it is."""
    banks = {
        info.bank_id: _Bank(info.bank_id, None, info)
        for info in stored
        if info.namespace.startswith(tag)
    }
    for resident in residents:
        if resident.namespace.startswith(tag):
            known = banks.get(resident.bank_id)
            banks[resident.bank_id] = _Bank(
                resident.bank_id,
                resident,
                known.stored if known is not None else None,
                resident.in_use,
            )
    for resident in residents:
        if resident.in_use and resident.stored_bank in banks:
            banks[resident.stored_bank] = replace(banks[resident.stored_bank], in_use=True)
    return banks


def _message(bank: _Bank) -> pb.Bank:
    row = bank.row()
    message = pb.Bank(
        bank_id=bank.bank_id,
        location=_LOCATIONS[bank.location],
        frontier=row.frontier,
        trust=[f"TRUST_FLAG_{name}" for name in bank.trust.names()],
        base=row.base,
        size_bytes=row.size_bytes,
        pinned=row.pinned,
        hits=row.hits,
        create_time=convert.timestamp(row.create_time),
        last_use_time=convert.timestamp(row.last_use_time),
    )
    kinds: set[RecordKind] = set()
    if bank.stored is not None:
        message.parent_bank_id = bank.stored.parent_id
        message.persist_reason = bank.stored.reason.value
        message.hidden_tokens = bank.stored.hidden_tokens
        kinds.update(bank.stored.record_kinds)
        if bank.stored.verified_at is not None:
            message.verify_time.CopyFrom(convert.timestamp(bank.stored.verified_at))
    if bank.resident is not None:
        message.slot = bank.resident.slot
        message.hidden_tokens = bank.resident.hidden_tokens
        kinds.update(record.kind for record in bank.resident.records)
    names = sorted(convert.RECORD_KINDS[kind] for kind in kinds)
    message.MergeFrom(pb.Bank(record_kinds=names))
    return message
