"""The metrics by name: type, meaning, labels and their closed sets of values.

Owns `FAMILIES`, from which `metrics` makes every series, and against which docs and dashboards are
tested. Plain values; knows no Prometheus client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ds4grpc.bank import Admission, MissReason, PersistReason, RecordKind

# From a token out of a small model or a lookup (1 ms) to the prefill of a whole book (an hour).
BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0),
)

# The statuses that `rpc.status` can give, in lower case.
CODES = (
    *("ok", "cancelled", "invalid_argument", "deadline_exceeded", "not_found"),
    *("resource_exhausted", "failed_precondition", "internal", "unavailable", "data_loss"),
)
FINISH_REASONS = ("none", "stop", "length", "tool_calls", "time_limit", "cancelled")
ADMISSIONS = tuple(Admission)
MISS_REASONS = tuple(MissReason)
SOURCES = ("computed", "memory", "disk")
STAGES = ("lookup", "load", "compute")
RECORD_OUTCOMES = ("built", "prompt", "unsound", "failed")
# BankCorrupt.kind, and what foreign errors become.
RESTORE_FAULTS = ("truncated", "checksum", "format", "foreign", "identity", "record", "io", "other")
RESTORE_RESULTS = ("ok", *MISS_REASONS, *RESTORE_FAULTS)
PERSIST_FAULTS = ("quota", "no_space", "io", "moved", "staging_full", "catalog", "other")
EVICTION_REASONS = ("expired", "superseded", "lru", "no_value", "dropped")
SLOT_STATES = ("free", "loading", "active", "idle")
WHERE = ("resident", "stored")
TRUST = ("reusable", "untrusted", "quarantined")
CATALOG_OPS = ("lookup", "publish", "update", "delete", "list", "rescan")
CATALOG_FAULTS = ("locked", "slow", "full", "corrupt", "io", "other")

Labels = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: `labels` maps each label to its closed set; build_info's values are open."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: Labels = field(default_factory=dict)


FAMILIES = (
    Family("ds4grpc_requests_started_total", "counter", "Generate calls that arrived."),
    Family(
        "ds4grpc_requests_total",
        "counter",
        "Generate calls that ended, by status and, when it is ok, by finish reason.",
        {"code": CODES, "finish_reason": FINISH_REASONS},
    ),
    Family("ds4grpc_requests_running", "gauge", "Generate calls that hold a slot."),
    Family("ds4grpc_requests_waiting", "gauge", "Generate calls that wait for a slot."),
    Family("ds4grpc_queue_seconds", "histogram", "Arrival to slot given."),
    Family(
        "ds4grpc_admissions_total",
        "counter",
        "Admissions by the way they got their start.",
        {"admission": ADMISSIONS},
    ),
    Family(
        "ds4grpc_prompt_tokens_total",
        "counter",
        "Prompt tokens as clients sent them, by where their state came from.",
        {"source": SOURCES},
    ),
    Family("ds4grpc_prefill_tokens_total", "counter", "Tokens that prefill really computed."),
    Family(
        "ds4grpc_hidden_tokens_total",
        "counter",
        "Reused tokens of hidden reasoning, which prompts as sent do not have.",
    ),
    Family(
        "ds4grpc_generated_tokens_total",
        "counter",
        "Sampled tokens, reasoning and end markers included.",
    ),
    Family(
        "ds4grpc_cache_misses_total",
        "counter",
        "Admissions that were not a full reuse, by reason.",
        {"reason": MISS_REASONS},
    ),
    Family(
        "ds4grpc_prefill_seconds",
        "histogram",
        "Slot given to first token.",
        {"admission": ADMISSIONS},
    ),
    Family(
        "ds4grpc_admission_seconds",
        "histogram",
        "Time in each stage of an admission: finding banks, loading one, prefilling the rest.",
        {"stage": STAGES},
    ),
    Family(
        "ds4grpc_time_to_first_token_seconds",
        "histogram",
        "Arrival to first token.",
        {"admission": ADMISSIONS},
    ),
    Family("ds4grpc_inter_token_seconds", "histogram", "Token to next token of one reply."),
    Family(
        "ds4grpc_records_total",
        "counter",
        "Finished turns by the record that they built. Outcome built: the next turn finds it;"
        " prompt: the reply cannot be replayed; unsound: no sound key; failed: an error.",
        {"kind": tuple(RecordKind), "thinking": ("on", "off"), "outcome": RECORD_OUTCOMES},
    ),
    Family(
        "ds4grpc_bank_persists_total",
        "counter",
        "Bank files written, by why.",
        {"reason": tuple(PersistReason)},
    ),
    Family(
        "ds4grpc_bank_persist_failures_total",
        "counter",
        "Banks that were to be written and were not.",
        {"kind": PERSIST_FAULTS},
    ),
    Family(
        "ds4grpc_bank_restores_total",
        "counter",
        "Loads of stored banks: ok, or why the load was a miss after all.",
        {"result": RESTORE_RESULTS},
    ),
    Family("ds4grpc_bank_persist_seconds", "histogram", "Time to write one bank."),
    Family("ds4grpc_bank_restore_seconds", "histogram", "Time to load one bank."),
    Family("ds4grpc_bank_read_bytes_total", "counter", "Bytes read from bank files."),
    Family("ds4grpc_bank_written_bytes_total", "counter", "Bytes written to bank files."),
    Family(
        "ds4grpc_bank_compacted_bytes_total",
        "counter",
        "Bytes written to merge the small files of long chains; not among those written.",
    ),
    Family(
        "ds4grpc_banks",
        "gauge",
        "Banks at hand, by place and by what they may be used for.",
        {"where": WHERE, "trust": TRUST},
    ),
    Family("ds4grpc_disk_bytes", "gauge", "Bytes that the disk tier takes."),
    Family("ds4grpc_disk_quota_bytes", "gauge", "Bytes that the disk tier may take."),
    Family("ds4grpc_disk_enabled", "gauge", "1 while banks are written to disk, else 0."),
    Family(
        "ds4grpc_bank_evictions_total",
        "counter",
        "Banks given up: stored ones that expired, that another one holds whole or that were"
        " least recently used, and resident ones too short to keep or dropped unwritten.",
        {"reason": EVICTION_REASONS},
    ),
    Family("ds4grpc_slots", "gauge", "Slots by state.", {"state": SLOT_STATES}),
    Family("ds4grpc_kv_memory_bytes", "gauge", "Bytes that resident banks take."),
    Family(
        "ds4grpc_catalog_seconds",
        "histogram",
        "Time of catalog operations.",
        {"op": CATALOG_OPS},
    ),
    Family(
        "ds4grpc_catalog_errors_total",
        "counter",
        "Catalog operations that failed.",
        {"kind": CATALOG_FAULTS},
    ),
    Family(
        "ds4grpc_engine_last_step_timestamp_seconds",
        "gauge",
        "Unix time of the engine's last step; 0 before the first.",
    ),
    Family(
        "ds4grpc_build_info",
        "gauge",
        "Always 1; the labels say what runs.",
        {"version": (), "model": (), "fingerprint": (), "dtype": (), "device": ()},
    ),
)


def families_by_sample(families: Iterable[Family] = FAMILIES) -> dict[str, Family]:
    """Each sample name that a scrape may show, such as `…_bucket`, with its family."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    return {
        family.name + suffix: family
        for family in families
        for suffix in suffixes.get(family.kind, ("",))
    }
