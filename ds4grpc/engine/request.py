"""What a client asks of the engine, and what it gets back.

Frozen values without tensors: they cross threads, and could cross processes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds4grpc.bank import Admission, MissReason
from ds4grpc.chat.prompt import Channel, Prompt


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; every field is set. temperature 0 is greedy, top_k 0 keeps all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a generation ends. `max_tokens` None: what the context has room for; 0: prefill and
    keep only. `time_limit_seconds` counts from arrival."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    time_limit_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class CacheOptions:
    namespace: bytes  # 32 bytes, from the caller's tenant and salt
    bypass: bool = False
    no_store: bool = False
    exact: bool = False
    pin: bool = False
    ttl_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class OutputOptions:
    token_ids: bool = False
    prompt_token_ids: bool = False
    logprobs: int = 0
    progress: bool = False


RequestKey = tuple[str, str]
"""(tenant, request id): ids are each tenant's own, and say nothing to another."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One checked request. `arrival` and `deadline` are time.monotonic() seconds."""

    request_id: str
    tenant: str
    prompt: Prompt
    sampling: Sampling
    stopping: Stopping
    cache: CacheOptions
    output: OutputOptions
    arrival: float
    deadline: float | None = None

    @property
    def key(self) -> RequestKey:
        return (self.tenant, self.request_id)


@dataclass(frozen=True, slots=True)
class Usage:
    """In the client's frame; `generated_tokens` counts sampled tokens."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds."""

    queue: float = 0.0
    lookup: float = 0.0
    load: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True, slots=True)
class Started:
    prompt_tokens: int
    memory_tokens: int
    disk_tokens: int
    hidden_tokens: int
    admission: Admission
    bank_id: str
    miss_reason: MissReason | None
    queue_seconds: float
    pos_base: int
    suffix_tokens: int
    seed: int
    slot: int
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def cached_tokens(self) -> int:
        return self.memory_tokens + self.disk_tokens


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token was sampled; seconds since the slot was given and since arrival."""

    since_slot: float
    since_arrival: float


@dataclass(frozen=True, slots=True)
class Progress:
    prefilled_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    channel: Channel
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[StepLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    finish_reason: FinishReason
    matched_stop: str
    usage: Usage
    timings: Timings
    bank_id: str


Event = Started | FirstToken | Progress | Delta | Finished
