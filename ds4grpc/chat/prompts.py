"""The chat layer's face: inputs to prompts, and finished turns to records.

Owns nothing but the choice between a conversation's renderer and the identity form of other
inputs. Immutable; worker threads, not the event loop: everything here computes.
"""

from __future__ import annotations

from dataclasses import replace

from ds4grpc.bank import BankContent, Ids, Record, Waypoint
from ds4grpc.chat.keys import BankView, build_records, check_record
from ds4grpc.chat.prompt import Conversation, Prompt, Reply
from ds4grpc.chat.renderer import Renderer
from ds4grpc.errors import InvalidRequest
from ds4grpc.tokenizer import Tokenizer, unescape


class Prompts:
    """Makes prompts for one model; `template` None when it has none."""

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        """Raises ModelError when `template` is not a template."""
        # Text and ids need no template, but are keyed by the same rules.
        self._renderer = Renderer(template or "", tokenizer)
        self._codec = self._renderer.codec
        self.has_template = template is not None

    @property
    def renderer_digest(self) -> str:
        """Hex; "" when there is no template."""
        return self._renderer.digest.hex() if self.has_template else ""

    @property
    def default_thinking(self) -> bool:
        """Whether the template thinks when a conversation says nothing."""
        return self._renderer.default_thinking

    def from_chat(self, conversation: Conversation, budget: int | None = None) -> Prompt:
        """Raises InvalidRequest: no template, a bound, or the template refuses."""
        if not self.has_template:
            raise InvalidRequest(
                "the model has no chat template; send prompt or token_ids instead of chat",
                field="chat",
                reason="NO_CHAT_TEMPLATE",
            )
        return self._renderer.prompt(conversation, budget=budget)

    def from_text(self, text: str) -> Prompt:
        """A prompt that is text; spellings of control tokens in it are control tokens."""
        return self._codec.text_prompt(text)

    def from_ids(self, ids: Ids) -> Prompt:
        return self._codec.ids_prompt(ids.tolist())

    def encode_from(self, prompt: Prompt, offset: int) -> Ids:
        """Ids of the prompt's text from a byte offset on, encoded on their own."""
        return self._codec.encode_suffix(prompt.text[offset:], prompt.open_at - offset)

    def shown(self, prompt: Prompt) -> str:
        """The prompt's text for a person: escapes taken out."""
        return unescape(prompt.text.decode())

    def build(
        self,
        prompt: Prompt,
        reply: Reply,
        content: BankContent,
        waypoints: tuple[Waypoint, ...],
    ) -> tuple[tuple[Record, ...], str]:
        """The records of a finished turn whose bank is `content`, and the outcome's name.

        `waypoints` are inherited from the match, with offsets in the prompt's text.
        """
        bank = BankView(content.ids, content.hidden, waypoints)
        built = build_records(self._renderer, prompt, reply, bank)
        return tuple(map(self._anchored, built.records)), built.outcome

    def _anchored(self, record: Record) -> Record:
        """The record with its anchor: where lookups on disk find it whatever its key ends in."""
        text = record.key.decode()
        spans = self._codec.control_spans(text)
        return replace(record, anchor=len(text[: spans[-1][0]].encode())) if spans else record

    def is_sound(self, record: Record, content: BankContent) -> bool:
        """Whether a record that came from a file fits its bank's tokens."""
        return check_record(self._renderer, record, content.ids, content.hidden)
