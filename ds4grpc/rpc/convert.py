"""Between proto messages and the values of the layers below; every check of a request's fields.

Pure functions. Raises InvalidRequest with the field's proto path, the value and the limit.
"""

from __future__ import annotations

import json
import math
import secrets
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ds4grpc.bank import Admission, MissReason, RecordKind, namespace
from ds4grpc.chat.prompt import Channel, Conversation, Message, Role, Tool, ToolCall
from ds4grpc.engine.request import (
    CacheOptions,
    Delta,
    Finished,
    FinishReason,
    OutputOptions,
    Progress,
    Sampling,
    Started,
    StepLogprobs,
    Stopping,
    Timings,
    TokenLogprob,
)
from ds4grpc.errors import InvalidRequest
from ds4grpc.rpc import validate
from ds4grpc.v1 import generation_pb2

pb = generation_pb2

ROLES = {
    pb.ROLE_SYSTEM: Role.SYSTEM,
    pb.ROLE_USER: Role.USER,
    pb.ROLE_ASSISTANT: Role.ASSISTANT,
    pb.ROLE_TOOL: Role.TOOL,
}
# Names of proto enum values: constructors of messages take them as well as numbers.
ADMISSIONS = {kind: f"ADMISSION_{kind.name}" for kind in Admission}
MISS_REASONS = {kind: f"MISS_REASON_{kind.name}" for kind in MissReason}
CHANNELS = {kind: f"CHANNEL_{kind.name}" for kind in Channel}
FINISH_REASONS = {kind: f"FINISH_REASON_{kind.name}" for kind in FinishReason}
RECORD_KINDS = {kind: f"RECORD_KIND_{kind.name}" for kind in RecordKind}

MAX_STOPS, MAX_STOP_BYTES, MAX_STOP_IDS = 16, 256, 64
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_SALT_BYTES = 1024
MAX_TOOLS = 512


def sampling(message: pb.Sampling, defaults: Sampling, vocabulary_size: int) -> Sampling:
    """The request's sampling over the model's defaults; an unset seed is drawn here."""

    def number(name: str, low: float, high: float) -> Any:
        if not message.HasField(name):
            return getattr(defaults, name)
        value = getattr(message, name)
        validate.in_range(f"sampling.{name}", value, low, high)
        return value

    top_p = number("top_p", 0.0, 1.0)
    if top_p <= 0:
        raise InvalidRequest(
            "sampling.top_p is 0; send a number above 0 and at most 1",
            field="sampling.top_p",
            reason="OUT_OF_RANGE",
        )
    penalty = number("repetition_penalty", 0.0, 100.0)
    if penalty <= 0:
        raise InvalidRequest(
            "sampling.repetition_penalty is 0; send a number above 0, 1 is off",
            field="sampling.repetition_penalty",
            reason="OUT_OF_RANGE",
        )
    validate.at_most("sampling.logit_bias", message.logit_bias, MAX_BIASES, "entries")
    for token_id, bias in message.logit_bias.items():
        validate.in_range("sampling.logit_bias key", token_id, 0, vocabulary_size - 1)
        validate.in_range("sampling.logit_bias", bias, -100, 100)
    return Sampling(
        temperature=number("temperature", 0.0, 100.0),
        top_p=top_p,
        top_k=number("top_k", 0, 2**32 - 1),
        min_p=number("min_p", 0.0, 1.0),
        seed=message.seed if message.HasField("seed") else secrets.randbits(64),
        frequency_penalty=number("frequency_penalty", -2.0, 2.0),
        presence_penalty=number("presence_penalty", -2.0, 2.0),
        repetition_penalty=penalty,
        logit_bias=dict(message.logit_bias),
    )


def stopping(message: pb.Stopping, vocabulary_size: int) -> Stopping:
    validate.at_most("stopping.stop", message.stop, MAX_STOPS, "strings")
    for stop in message.stop:
        validate.at_most("stopping.stop", stop.encode(), MAX_STOP_BYTES, "bytes")
        if not stop:
            raise InvalidRequest(
                "stopping.stop holds an empty string; leave it out",
                field="stopping.stop",
                reason="EMPTY_STOP",
            )
    validate.at_most("stopping.stop_token_ids", message.stop_token_ids, MAX_STOP_IDS, "ids")
    for token_id in message.stop_token_ids:
        validate.in_range("stopping.stop_token_ids", token_id, 0, vocabulary_size - 1)
    limit = None
    if message.HasField("time_limit"):
        limit = validate.positive_seconds("stopping.time_limit", message.time_limit)
    return Stopping(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop=tuple(message.stop),
        stop_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        time_limit_seconds=limit,
    )


def cache_options(message: pb.Cache, tenant: str, *, exact: bool) -> CacheOptions:
    """`exact` is the server's `--exact-reuse`."""
    salt = message.salt.encode()
    validate.at_most("cache.salt", salt, MAX_SALT_BYTES, "bytes")
    ttl = None
    if message.HasField("ttl"):
        ttl = validate.positive_seconds("cache.ttl", message.ttl)
    if message.pin and (message.bypass or message.no_store):
        raise InvalidRequest(
            "cache.pin keeps a bank that cache.bypass and cache.no_store do not; send one of them",
            field="cache.pin",
            reason="CONFLICTING_FIELDS",
        )
    return CacheOptions(
        namespace=namespace(tenant, salt),
        bypass=message.bypass,
        no_store=message.no_store,
        exact=message.exact or exact,
        pin=message.pin,
        ttl_seconds=ttl,
    )


def output_options(message: pb.Output) -> OutputOptions:
    validate.in_range("output.logprobs", message.logprobs, 0, MAX_LOGPROBS)
    return OutputOptions(
        token_ids=message.token_ids,
        prompt_token_ids=message.prompt_token_ids,
        logprobs=message.logprobs,
        progress=message.progress,
    )


def conversation(chat: pb.Chat) -> Conversation:
    """A conversation with known enums and parsed schemas; the chat layer checks the rest."""
    validate.known_enum("chat.thinking.mode", chat.thinking.mode, pb.ThinkingMode)
    validate.known_enum("chat.thinking.replay", chat.thinking.replay, pb.ReasoningReplay)
    validate.known_enum("chat.tool_choice.mode", chat.tool_choice.mode, pb.ToolChoiceMode)
    if chat.tool_choice.mode in (pb.TOOL_CHOICE_MODE_REQUIRED, pb.TOOL_CHOICE_MODE_NAMED):
        raise InvalidRequest(
            "chat.tool_choice.mode REQUIRED and NAMED need constrained output, which this server"
            " does not have; send AUTO or NONE",
            field="chat.tool_choice.mode",
            reason="NOT_SUPPORTED",
        )
    validate.at_most("chat.tools", chat.tools, MAX_TOOLS, "tools")
    tools = tuple(
        Tool(tool.name, tool.description, _schema(f"chat.tools[{i}].parameters_json", tool))
        for i, tool in enumerate(chat.tools)
    )
    if chat.tool_choice.mode == pb.TOOL_CHOICE_MODE_NONE:
        tools = ()
    thinking: bool | None = {
        pb.THINKING_MODE_ENABLED: True,
        pb.THINKING_MODE_DISABLED: False,
    }.get(chat.thinking.mode)
    if thinking and chat.thinking.HasField("max_tokens") and chat.thinking.max_tokens == 0:
        thinking = False
    keep: bool | None = {
        pb.REASONING_REPLAY_KEEP: True,
        pb.REASONING_REPLAY_DROP: False,
    }.get(chat.thinking.replay)
    return Conversation(
        messages=tuple(_message(i, message) for i, message in enumerate(chat.messages)),
        tools=tools,
        thinking=thinking,
        effort=chat.thinking.effort,
        keep_reasoning=keep,
    )


def _message(index: int, message: pb.ChatMessage) -> Message:
    field = f"chat.messages[{index}].role"
    validate.known_enum(field, message.role, pb.Role)
    if message.role not in ROLES:
        raise InvalidRequest(
            f"{field} is ROLE_UNSPECIFIED; send who wrote the message",
            field=field,
            reason="UNKNOWN_ENUM_VALUE",
        )
    return Message(
        role=ROLES[message.role],
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=tuple(
            ToolCall(call.id, call.name, call.arguments_json) for call in message.tool_calls
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _schema(field: str, tool: pb.Tool) -> Any:
    if not tool.parameters_json:
        return {"type": "object", "properties": {}}
    try:
        schema = json.loads(tool.parameters_json)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"{field} is not JSON: {str(error)[:200]}", field=field, reason="MALFORMED_JSON"
        ) from error
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"{field} is a JSON {type(schema).__name__}; send an object",
            field=field,
            reason="MALFORMED_JSON",
        )
    return schema


def started(event: Started, request_id: str) -> pb.GenerationStarted:
    return pb.GenerationStarted(
        request_id=request_id,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        memory_tokens=event.memory_tokens,
        disk_tokens=event.disk_tokens,
        hidden_tokens=event.hidden_tokens,
        admission=ADMISSIONS[event.admission],
        bank_id=event.bank_id,
        miss_reason=MISS_REASONS[event.miss_reason] if event.miss_reason else None,
        queue_time=duration(event.queue_seconds),
        prompt_token_ids=event.prompt_token_ids,
        pos_base=event.pos_base,
        suffix_tokens=event.suffix_tokens,
        seed=event.seed,
    )


def progress(event: Progress) -> pb.GenerationProgress:
    return pb.GenerationProgress(
        prefilled_tokens=event.prefilled_tokens, total_tokens=event.total_tokens
    )


def delta(event: Delta) -> pb.GenerationDelta:
    return pb.GenerationDelta(
        channel=CHANNELS[event.channel],
        text=event.text,
        token_ids=event.token_ids,
        logprobs=[_step(step) for step in event.logprobs],
    )


def finished(event: Finished) -> pb.GenerationFinished:
    usage = event.usage
    return pb.GenerationFinished(
        finish_reason=FINISH_REASONS[event.finish_reason],
        matched_stop=event.matched_stop,
        usage=pb.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated_tokens=usage.generated_tokens,
            reasoning_tokens=usage.reasoning_tokens,
        ),
        timings=timings(event.timings),
        bank_id=event.bank_id,
    )


def timings(value: Timings) -> pb.Timings:
    return pb.Timings(
        queue=duration(value.queue),
        lookup=duration(value.lookup),
        load=duration(value.load),
        prefill=duration(value.prefill),
        decode=duration(value.decode),
    )


def duration(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def timestamp(unix_seconds: float) -> Timestamp:
    made = Timestamp()
    if math.isfinite(unix_seconds):
        made.FromNanoseconds(round(unix_seconds * 1e9))
    return made


def _step(step: StepLogprobs) -> pb.StepLogprobs:
    return pb.StepLogprobs(sampled=_logprob(step.sampled), top=[_logprob(t) for t in step.top])


def _logprob(value: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=value.token_id, token=value.token, logprob=value.logprob)
