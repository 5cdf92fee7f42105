from ds4grpc.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "architecture", "fingerprint", "dtype", "device", "num_parameters", "vocabulary_size", "max_context_tokens", "num_slots", "kv_bytes_per_token", "renderer", "default_thinking", "default_sampling", "end_token_ids", "server_version")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RENDERER_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_THINKING_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    fingerprint: str
    dtype: str
    device: str
    num_parameters: int
    vocabulary_size: int
    max_context_tokens: int
    num_slots: int
    kv_bytes_per_token: float
    renderer: str
    default_thinking: _generation_pb2.ThinkingMode
    default_sampling: _generation_pb2.Sampling
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    server_version: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., num_parameters: _Optional[int] = ..., vocabulary_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., num_slots: _Optional[int] = ..., kv_bytes_per_token: _Optional[float] = ..., renderer: _Optional[str] = ..., default_thinking: _Optional[_Union[_generation_pb2.ThinkingMode, str]] = ..., default_sampling: _Optional[_Union[_generation_pb2.Sampling, _Mapping]] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., server_version: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "parse_control_tokens", "add_bos")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARSE_CONTROL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    text: str
    parse_control_tokens: bool
    add_bos: bool
    def __init__(self, text: _Optional[str] = ..., parse_control_tokens: _Optional[bool] = ..., add_bos: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class RenderPromptRequest(_message.Message):
    __slots__ = ("chat",)
    CHAT_FIELD_NUMBER: _ClassVar[int]
    chat: _generation_pb2.Chat
    def __init__(self, chat: _Optional[_Union[_generation_pb2.Chat, _Mapping]] = ...) -> None: ...

class RenderPromptResponse(_message.Message):
    __slots__ = ("text", "prompt_tokens", "token_ids", "reasoning_open")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REASONING_OPEN_FIELD_NUMBER: _ClassVar[int]
    text: str
    prompt_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    reasoning_open: bool
    def __init__(self, text: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., reasoning_open: _Optional[bool] = ...) -> None: ...
