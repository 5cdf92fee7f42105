"""One generation from the client's side: the request, the stream as it is printed, its summary.

Shared by `generate`, `chat` and `bench`. Synchronous, main thread; Ctrl-C during `run` asks the
server to end the reply, a second one drops the call.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import grpc

from ds4grpc.commands.options import Target, Wish
from ds4grpc.commands.output import word
from ds4grpc.v1 import generation_pb2 as pb
from ds4grpc.v1 import generation_pb2_grpc


@dataclass(slots=True)
class Turn:
    """What came back. `first_seconds`: call to first delta, 0.0 while there is none."""

    text: str = ""
    reasoning: str = ""
    first_seconds: float = 0.0
    total_seconds: float = 0.0
    started: pb.GenerationStarted = field(default_factory=pb.GenerationStarted)
    finished: pb.GenerationFinished = field(default_factory=pb.GenerationFinished)

    @property
    def admission(self) -> str:
        """In the words of docs and metrics, such as `partial_fork`."""
        return word(pb.Admission.Name(self.started.admission), "ADMISSION_")

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first; 0.0 when there are none."""
        decode = self.finished.timings.decode.ToNanoseconds() / 1e9
        after_first = self.finished.usage.generated_tokens - 1
        return after_first / decode if decode > 0 and after_first > 0 else 0.0

    def summary(self) -> str:
        """The status line."""
        usage, reason = self.finished.usage, self.finished.finish_reason
        cached, prompt = self.started.cached_tokens, self.started.prompt_tokens
        parts = [
            self.admission or "not started",
            f"{cached:,} of {prompt:,} prompt tokens cached",
        ]
        if self.first_seconds:
            parts.append(f"first token {self.first_seconds:.2f} s")
        parts.append(f"{usage.generated_tokens:,} tokens")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if reason not in (pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_STOP):
            parts.append(word(pb.FinishReason.Name(reason), "FINISH_REASON_"))
        return " · ".join(parts)


def request(wish: Wish) -> pb.GenerateRequest:
    """A request without its input, under a fresh id."""
    return pb.GenerateRequest(
        request_id=uuid.uuid4().hex,
        sampling=pb.Sampling(temperature=wish.temperature, top_p=wish.top_p, seed=wish.seed),
        stopping=pb.Stopping(max_tokens=wish.max_tokens, stop=wish.stop),
        cache=pb.Cache(exact=wish.exact),
    )


def chat_request(wish: Wish, messages: Sequence[pb.ChatMessage]) -> pb.GenerateRequest:
    """A request for the reply to `messages`, the wish's system message before them."""
    made = request(wish)
    if wish.thinking is not None:
        made.chat.thinking.mode = (
            pb.THINKING_MODE_ENABLED if wish.thinking else pb.THINKING_MODE_DISABLED
        )
    if wish.system:
        made.chat.messages.add(role=pb.ROLE_SYSTEM, content=wish.system)
    made.chat.messages.extend(messages)
    return made


def run(
    channel: grpc.Channel,
    target: Target,
    asked: pb.GenerateRequest,
    show: Callable[[pb.GenerateResponse], None],
) -> Turn:
    """Streams one reply through `show` and returns it. Raises grpc.RpcError."""
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    turn, begun = Turn(), time.monotonic()
    call = stub.Generate(asked, metadata=target.metadata)
    cancel = pb.CancelGenerationRequest(request_id=asked.request_id)
    kept: list[object] = []  # gRPC cancels a call whose future is dropped

    def ask_to_end() -> None:
        kept.append(stub.CancelGeneration.future(cancel, metadata=target.metadata))

    ways_out = iter((ask_to_end,))
    with on_interrupt(lambda: next(ways_out, call.cancel)()):
        for event in call:
            kind = event.WhichOneof("event")
            if kind == "delta":
                turn.first_seconds = turn.first_seconds or time.monotonic() - begun
                if event.delta.channel == pb.CHANNEL_REASONING:
                    turn.reasoning += event.delta.text
                elif event.delta.channel == pb.CHANNEL_TEXT:
                    turn.text += event.delta.text
            elif kind == "started":
                turn.started = event.started
            elif kind == "finished":
                turn.finished = event.finished
            show(event)
    turn.total_seconds = time.monotonic() - begun
    return turn


@contextmanager
def on_interrupt(react: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls `react` instead of raising KeyboardInterrupt."""

    def handle(signum: int, frame: FrameType | None) -> None:
        react()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
