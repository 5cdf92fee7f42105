import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BankLocation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BANK_LOCATION_UNSPECIFIED: _ClassVar[BankLocation]
    BANK_LOCATION_RESIDENT: _ClassVar[BankLocation]
    BANK_LOCATION_STORED: _ClassVar[BankLocation]
    BANK_LOCATION_BOTH: _ClassVar[BankLocation]

class RecordKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECORD_KIND_UNSPECIFIED: _ClassVar[RecordKind]
    RECORD_KIND_RAW: _ClassVar[RecordKind]
    RECORD_KIND_VISIBLE: _ClassVar[RecordKind]
    RECORD_KIND_PROMPT: _ClassVar[RecordKind]

class TrustFlag(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRUST_FLAG_UNSPECIFIED: _ClassVar[TrustFlag]
    TRUST_FLAG_COMMITTED: _ClassVar[TrustFlag]
    TRUST_FLAG_KEYED: _ClassVar[TrustFlag]
    TRUST_FLAG_DURABLE: _ClassVar[TrustFlag]
    TRUST_FLAG_PROVEN: _ClassVar[TrustFlag]
    TRUST_FLAG_QUARANTINED: _ClassVar[TrustFlag]

class GarbageKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GARBAGE_KIND_UNSPECIFIED: _ClassVar[GarbageKind]
    GARBAGE_KIND_EXPIRED: _ClassVar[GarbageKind]
    GARBAGE_KIND_DELETED: _ClassVar[GarbageKind]
    GARBAGE_KIND_RETIRED: _ClassVar[GarbageKind]
    GARBAGE_KIND_LEFTOVER: _ClassVar[GarbageKind]
    GARBAGE_KIND_ORPHAN: _ClassVar[GarbageKind]
    GARBAGE_KIND_QUARANTINED: _ClassVar[GarbageKind]
BANK_LOCATION_UNSPECIFIED: BankLocation
BANK_LOCATION_RESIDENT: BankLocation
BANK_LOCATION_STORED: BankLocation
BANK_LOCATION_BOTH: BankLocation
RECORD_KIND_UNSPECIFIED: RecordKind
RECORD_KIND_RAW: RecordKind
RECORD_KIND_VISIBLE: RecordKind
RECORD_KIND_PROMPT: RecordKind
TRUST_FLAG_UNSPECIFIED: TrustFlag
TRUST_FLAG_COMMITTED: TrustFlag
TRUST_FLAG_KEYED: TrustFlag
TRUST_FLAG_DURABLE: TrustFlag
TRUST_FLAG_PROVEN: TrustFlag
TRUST_FLAG_QUARANTINED: TrustFlag
GARBAGE_KIND_UNSPECIFIED: GarbageKind
GARBAGE_KIND_EXPIRED: GarbageKind
GARBAGE_KIND_DELETED: GarbageKind
GARBAGE_KIND_RETIRED: GarbageKind
GARBAGE_KIND_LEFTOVER: GarbageKind
GARBAGE_KIND_ORPHAN: GarbageKind
GARBAGE_KIND_QUARANTINED: GarbageKind

class Waypoint(_message.Message):
    __slots__ = ("key_offset_bytes", "token_position")
    KEY_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_POSITION_FIELD_NUMBER: _ClassVar[int]
    key_offset_bytes: int
    token_position: int
    def __init__(self, key_offset_bytes: _Optional[int] = ..., token_position: _Optional[int] = ...) -> None: ...

class BankRecord(_message.Message):
    __slots__ = ("kind", "key_bytes", "key_tokens", "renderer", "waypoints", "key_text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RENDERER_FIELD_NUMBER: _ClassVar[int]
    WAYPOINTS_FIELD_NUMBER: _ClassVar[int]
    KEY_TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: RecordKind
    key_bytes: int
    key_tokens: int
    renderer: str
    waypoints: _containers.RepeatedCompositeFieldContainer[Waypoint]
    key_text: str
    def __init__(self, kind: _Optional[_Union[RecordKind, str]] = ..., key_bytes: _Optional[int] = ..., key_tokens: _Optional[int] = ..., renderer: _Optional[str] = ..., waypoints: _Optional[_Iterable[_Union[Waypoint, _Mapping]]] = ..., key_text: _Optional[str] = ...) -> None: ...

class Bank(_message.Message):
    __slots__ = ("bank_id", "location", "frontier", "trust", "parent_bank_id", "base", "size_bytes", "pinned", "hits", "create_time", "last_use_time", "verify_time", "persist_reason", "record_kinds", "slot", "records", "hidden_tokens", "file", "chain")
    BANK_ID_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    PARENT_BANK_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_TIME_FIELD_NUMBER: _ClassVar[int]
    VERIFY_TIME_FIELD_NUMBER: _ClassVar[int]
    PERSIST_REASON_FIELD_NUMBER: _ClassVar[int]
    RECORD_KINDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    bank_id: str
    location: BankLocation
    frontier: int
    trust: _containers.RepeatedScalarFieldContainer[TrustFlag]
    parent_bank_id: str
    base: int
    size_bytes: int
    pinned: bool
    hits: int
    create_time: _timestamp_pb2.Timestamp
    last_use_time: _timestamp_pb2.Timestamp
    verify_time: _timestamp_pb2.Timestamp
    persist_reason: str
    record_kinds: _containers.RepeatedScalarFieldContainer[RecordKind]
    slot: int
    records: _containers.RepeatedCompositeFieldContainer[BankRecord]
    hidden_tokens: int
    file: BankFile
    chain: _containers.RepeatedCompositeFieldContainer[BankLink]
    def __init__(self, bank_id: _Optional[str] = ..., location: _Optional[_Union[BankLocation, str]] = ..., frontier: _Optional[int] = ..., trust: _Optional[_Iterable[_Union[TrustFlag, str]]] = ..., parent_bank_id: _Optional[str] = ..., base: _Optional[int] = ..., size_bytes: _Optional[int] = ..., pinned: _Optional[bool] = ..., hits: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_use_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., verify_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., persist_reason: _Optional[str] = ..., record_kinds: _Optional[_Iterable[_Union[RecordKind, str]]] = ..., slot: _Optional[int] = ..., records: _Optional[_Iterable[_Union[BankRecord, _Mapping]]] = ..., hidden_tokens: _Optional[int] = ..., file: _Optional[_Union[BankFile, _Mapping]] = ..., chain: _Optional[_Iterable[_Union[BankLink, _Mapping]]] = ...) -> None: ...

class BankFile(_message.Message):
    __slots__ = ("format_version", "fingerprint", "layout_id", "dtype", "checksum", "sections", "ttl", "head")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    fingerprint: str
    layout_id: str
    dtype: str
    checksum: str
    sections: _containers.RepeatedCompositeFieldContainer[BankSection]
    ttl: _duration_pb2.Duration
    head: int
    def __init__(self, format_version: _Optional[int] = ..., fingerprint: _Optional[str] = ..., layout_id: _Optional[str] = ..., dtype: _Optional[str] = ..., checksum: _Optional[str] = ..., sections: _Optional[_Iterable[_Union[BankSection, _Mapping]]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., head: _Optional[int] = ...) -> None: ...

class BankSection(_message.Message):
    __slots__ = ("name", "size_bytes", "num_blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    num_blocks: int
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class BankLink(_message.Message):
    __slots__ = ("bank_id", "base", "frontier", "size_bytes", "hidden")
    BANK_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    bank_id: str
    base: int
    frontier: int
    size_bytes: int
    hidden: bool
    def __init__(self, bank_id: _Optional[str] = ..., base: _Optional[int] = ..., frontier: _Optional[int] = ..., size_bytes: _Optional[int] = ..., hidden: _Optional[bool] = ...) -> None: ...

class ListBanksRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "filter", "order_by")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    ORDER_BY_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    filter: str
    order_by: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., filter: _Optional[str] = ..., order_by: _Optional[str] = ...) -> None: ...

class ListBanksResponse(_message.Message):
    __slots__ = ("banks", "next_page_token", "total_size")
    BANKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SIZE_FIELD_NUMBER: _ClassVar[int]
    banks: _containers.RepeatedCompositeFieldContainer[Bank]
    next_page_token: str
    total_size: int
    def __init__(self, banks: _Optional[_Iterable[_Union[Bank, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total_size: _Optional[int] = ...) -> None: ...

class GetBankRequest(_message.Message):
    __slots__ = ("bank_id", "include_key_text")
    BANK_ID_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_KEY_TEXT_FIELD_NUMBER: _ClassVar[int]
    bank_id: str
    include_key_text: bool
    def __init__(self, bank_id: _Optional[str] = ..., include_key_text: _Optional[bool] = ...) -> None: ...

class GetBankResponse(_message.Message):
    __slots__ = ("bank",)
    BANK_FIELD_NUMBER: _ClassVar[int]
    bank: Bank
    def __init__(self, bank: _Optional[_Union[Bank, _Mapping]] = ...) -> None: ...

class DeleteBankRequest(_message.Message):
    __slots__ = ("bank_id",)
    BANK_ID_FIELD_NUMBER: _ClassVar[int]
    bank_id: str
    def __init__(self, bank_id: _Optional[str] = ...) -> None: ...

class DeleteBankResponse(_message.Message):
    __slots__ = ("freed_bytes", "hidden")
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    hidden: bool
    def __init__(self, freed_bytes: _Optional[int] = ..., hidden: _Optional[bool] = ...) -> None: ...

class PinBankRequest(_message.Message):
    __slots__ = ("bank_id",)
    BANK_ID_FIELD_NUMBER: _ClassVar[int]
    bank_id: str
    def __init__(self, bank_id: _Optional[str] = ...) -> None: ...

class PinBankResponse(_message.Message):
    __slots__ = ("bank",)
    BANK_FIELD_NUMBER: _ClassVar[int]
    bank: Bank
    def __init__(self, bank: _Optional[_Union[Bank, _Mapping]] = ...) -> None: ...

class UnpinBankRequest(_message.Message):
    __slots__ = ("bank_id",)
    BANK_ID_FIELD_NUMBER: _ClassVar[int]
    bank_id: str
    def __init__(self, bank_id: _Optional[str] = ...) -> None: ...

class UnpinBankResponse(_message.Message):
    __slots__ = ("bank",)
    BANK_FIELD_NUMBER: _ClassVar[int]
    bank: Bank
    def __init__(self, bank: _Optional[_Union[Bank, _Mapping]] = ...) -> None: ...

class VerifyBanksRequest(_message.Message):
    __slots__ = ("bank_ids",)
    BANK_IDS_FIELD_NUMBER: _ClassVar[int]
    bank_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, bank_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class VerifyBanksResponse(_message.Message):
    __slots__ = ("bank_id", "ok", "detail", "read_bytes", "done", "total")
    BANK_ID_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    bank_id: str
    ok: bool
    detail: str
    read_bytes: int
    done: int
    total: int
    def __init__(self, bank_id: _Optional[str] = ..., ok: _Optional[bool] = ..., detail: _Optional[str] = ..., read_bytes: _Optional[int] = ..., done: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class FlushBanksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushBanksResponse(_message.Message):
    __slots__ = ("bank_id", "frontier", "written_bytes", "detail")
    BANK_ID_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    bank_id: str
    frontier: int
    written_bytes: int
    detail: str
    def __init__(self, bank_id: _Optional[str] = ..., frontier: _Optional[int] = ..., written_bytes: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class RescanBanksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RescanBanksResponse(_message.Message):
    __slots__ = ("num_banks", "num_adopted", "num_dropped", "num_quarantined", "duration")
    NUM_BANKS_FIELD_NUMBER: _ClassVar[int]
    NUM_ADOPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    num_banks: int
    num_adopted: int
    num_dropped: int
    num_quarantined: int
    duration: _duration_pb2.Duration
    def __init__(self, num_banks: _Optional[int] = ..., num_adopted: _Optional[int] = ..., num_dropped: _Optional[int] = ..., num_quarantined: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ExportBankRequest(_message.Message):
    __slots__ = ("bank_id",)
    BANK_ID_FIELD_NUMBER: _ClassVar[int]
    bank_id: str
    def __init__(self, bank_id: _Optional[str] = ...) -> None: ...

class ExportBankResponse(_message.Message):
    __slots__ = ("start", "chunk", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: ExportStart
    chunk: bytes
    end: FileEnd
    def __init__(self, start: _Optional[_Union[ExportStart, _Mapping]] = ..., chunk: _Optional[bytes] = ..., end: _Optional[_Union[FileEnd, _Mapping]] = ...) -> None: ...

class ExportStart(_message.Message):
    __slots__ = ("bank_id", "frontier", "size_bytes")
    BANK_ID_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    bank_id: str
    frontier: int
    size_bytes: int
    def __init__(self, bank_id: _Optional[str] = ..., frontier: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class FileEnd(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    def __init__(self, sha256: _Optional[bytes] = ...) -> None: ...

class ImportBankRequest(_message.Message):
    __slots__ = ("options", "chunk", "end")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    options: ImportOptions
    chunk: bytes
    end: FileEnd
    def __init__(self, options: _Optional[_Union[ImportOptions, _Mapping]] = ..., chunk: _Optional[bytes] = ..., end: _Optional[_Union[FileEnd, _Mapping]] = ...) -> None: ...

class ImportOptions(_message.Message):
    __slots__ = ("size_bytes", "salt", "pin")
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    salt: str
    pin: bool
    def __init__(self, size_bytes: _Optional[int] = ..., salt: _Optional[str] = ..., pin: _Optional[bool] = ...) -> None: ...

class ImportBankResponse(_message.Message):
    __slots__ = ("bank_id", "frontier", "size_bytes", "already_stored")
    BANK_ID_FIELD_NUMBER: _ClassVar[int]
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALREADY_STORED_FIELD_NUMBER: _ClassVar[int]
    bank_id: str
    frontier: int
    size_bytes: int
    already_stored: bool
    def __init__(self, bank_id: _Optional[str] = ..., frontier: _Optional[int] = ..., size_bytes: _Optional[int] = ..., already_stored: _Optional[bool] = ...) -> None: ...

class CollectGarbageRequest(_message.Message):
    __slots__ = ("include_quarantined", "validate_only")
    INCLUDE_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    include_quarantined: bool
    validate_only: bool
    def __init__(self, include_quarantined: _Optional[bool] = ..., validate_only: _Optional[bool] = ...) -> None: ...

class CollectGarbageResponse(_message.Message):
    __slots__ = ("collected", "freed_bytes")
    COLLECTED_FIELD_NUMBER: _ClassVar[int]
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    collected: _containers.RepeatedCompositeFieldContainer[CollectedGarbage]
    freed_bytes: int
    def __init__(self, collected: _Optional[_Iterable[_Union[CollectedGarbage, _Mapping]]] = ..., freed_bytes: _Optional[int] = ...) -> None: ...

class CollectedGarbage(_message.Message):
    __slots__ = ("kind", "num_files", "size_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_FILES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: GarbageKind
    num_files: int
    size_bytes: int
    def __init__(self, kind: _Optional[_Union[GarbageKind, str]] = ..., num_files: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class GetStorageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStorageResponse(_message.Message):
    __slots__ = ("enabled", "detail", "folder", "fingerprint", "disk_bytes", "quota_bytes", "free_bytes", "num_stored", "num_pinned", "num_quarantined", "num_resident", "kv_memory_bytes", "kv_memory_quota_bytes")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STORED_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    KV_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_MEMORY_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    detail: str
    folder: str
    fingerprint: str
    disk_bytes: int
    quota_bytes: int
    free_bytes: int
    num_stored: int
    num_pinned: int
    num_quarantined: int
    num_resident: int
    kv_memory_bytes: int
    kv_memory_quota_bytes: int
    def __init__(self, enabled: _Optional[bool] = ..., detail: _Optional[str] = ..., folder: _Optional[str] = ..., fingerprint: _Optional[str] = ..., disk_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., num_stored: _Optional[int] = ..., num_pinned: _Optional[int] = ..., num_quarantined: _Optional[int] = ..., num_resident: _Optional[int] = ..., kv_memory_bytes: _Optional[int] = ..., kv_memory_quota_bytes: _Optional[int] = ...) -> None: ...
