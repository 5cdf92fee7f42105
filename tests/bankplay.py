"""A bank played through the turns of a conversation, by the rules of an admission.

Stands in for engine and model: it commits the prompt's and the reply's tokens, keeps the records
that are built, and finds them again. The oracle below judges what it delivers; it shares no code
with `ds4grpc.chat.keys` or `visible`.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

import numpy as np

from ds4grpc.bank import Record, Waypoint
from ds4grpc.chat.keys import BankView, BuiltRecords, build_records
from ds4grpc.chat.prompt import Channel, Prompt, Reply
from ds4grpc.chat.renderer import Renderer
from ds4grpc.chat.stream import ReplyParser
from ds4grpc.layout import Spans
from ds4grpc.tokenizer import Tokenizer, unescape


@dataclass
class Admitted:
    """How a prompt got its start: `ids` are the effective prompt's."""

    ids: list[int]
    hidden: Spans
    waypoints: tuple[Waypoint, ...]
    position: int  # reused tokens
    whole: bool


@dataclass
class Said:
    """What the client received of a reply."""

    text: str
    reasoning: str
    built: BuiltRecords
    reply: Reply


@dataclass
class Bank:
    """One resident bank and its records; nothing is ever evicted."""

    renderer: Renderer
    ids: list[int] = field(default_factory=list)
    hidden: Spans = field(default_factory=Spans)
    records: list[Record] = field(default_factory=list)
    said: Said | None = None  # the last reply

    def admit(self, prompt: Prompt) -> Admitted:
        """The best start: the whole bank, else up to a waypoint, else nothing."""
        best = Admitted(prompt.ids.tolist(), Spans(), (), 0, whole=False)
        for record in self.records:
            shared = len(os.path.commonprefix([record.key, prompt.text]))
            fitting = [w for w in record.waypoints if w.offset <= min(shared, len(prompt.text) - 1)]
            if not fitting or fitting[-1].position <= best.position:
                continue
            start = fitting[-1]
            suffix = self.renderer.codec.encode_suffix(
                prompt.text[start.offset :], prompt.open_at - start.offset
            )
            best = Admitted(
                ids=[*self.ids[: start.position], *suffix.tolist()],
                hidden=self.hidden.clip(0, start.position),
                waypoints=tuple(fitting),
                position=start.position,
                whole=start.position == len(self.ids),
            )
        return best

    def play(self, prompt: Prompt, admitted: Admitted, sampled: list[int], *, cut: int) -> Said:
        """Commits the prompt and the sampled tokens; `cut` of those are not committed."""
        parser = ReplyParser(prompt.form, self.renderer.codec.tokenizer)
        sampled = sampled[: len(sampled) - cut]
        pieces = [piece for token_id in sampled for piece in parser.feed(token_id)]
        pieces += parser.flush()
        received = parser.delivered_tokens(max(0, len(sampled) - (1 if cut else 0)))
        reply = parser.reply(received)
        end = len(admitted.ids)
        hidden = admitted.hidden
        if parser.hidden_span[1]:
            start, stop = parser.hidden_span
            hidden |= Spans.of([(end + start - prompt.open_tokens, end + min(stop, received))])
        self.ids = [*admitted.ids, *sampled[:received]]
        self.hidden = hidden
        ids = np.asarray(self.ids, dtype=np.uint32)
        view = BankView(ids, hidden, admitted.waypoints)
        built = build_records(self.renderer, prompt, reply, view)
        upto = [record.upto(admitted.position) for record in self.records]
        self.records = [*upto, *built.records]
        self.said = Said(
            text="".join(text for channel, text in pieces if channel is Channel.TEXT),
            reasoning="".join(text for channel, text in pieces if channel is Channel.REASONING),
            built=built,
            reply=reply,
        )
        return self.said


def split_encode(tokenizer: Tokenizer, text: str, draw: random.Random) -> list[int]:
    """Ids of plain `text` as a model might sample them: rarely the tokenizer's own split."""
    single = {tokenizer.token_bytes(i): i for i in range(256)}
    ids: list[int] = []
    at = 0
    while at < len(text):
        size = draw.choice((1, 2, 3, 5, 8, 40, 4000))
        piece = text[at : at + size]
        if size < 5 and draw.random() < 0.5:
            ids += [single[bytes([byte])] for byte in piece.encode()]
        else:
            ids += tokenizer.plain_ids(piece)
        at += size
    return ids


def judge(renderer: Renderer, prompt: Prompt, admitted: Admitted, reasonings: list[str]) -> None:
    """Asserts that the effective ids are the rendered prompt with nothing but hidden reasoning
    put in, white space aside, and the same structure of control tokens.

    `reasonings` are all texts of reasoning so far, each found nowhere else.
    """
    tokenizer = renderer.codec.tokenizer
    bos = renderer.codec.bos(prompt.text)
    assert admitted.ids[: len(bos)] == bos
    shown: list[str] = []
    structure: list[int] = []
    at = len(bos)
    for start, end in (*admitted.hidden.pairs, (len(admitted.ids), len(admitted.ids))):
        shown.append(tokenizer.decode(admitted.ids[at:start]))
        structure += admitted.ids[at:start]
        # The token that ends the close marker may hold the start of the answer as well.
        shown.append(tokenizer.decode(admitted.ids[start:end]).partition(renderer.markers.close)[2])
        at = end
    text = prompt.text.decode()
    got = _bare(renderer, "".join(shown), reasonings)
    assert got == _bare(renderer, unescape(text), reasonings)
    assert _structure(renderer, structure) == _structure(renderer, tokenizer.encode(text))


def doubled(renderer: Renderer, ids: list[int]) -> bool:
    """Whether two equal reasoning markers follow each other, white space aside."""
    text = "".join(renderer.codec.tokenizer.decode(ids).split())
    markers = renderer.markers.open, renderer.markers.close
    return any("".join(marker.split()) * 2 in text for marker in markers)


def _bare(renderer: Renderer, text: str, reasonings: list[str]) -> str:
    """Without white space, the reasonings and every spelling of a marker."""
    bare = "".join(text.split())
    for reasoning in sorted(reasonings, key=len, reverse=True):
        bare = bare.replace("".join(reasoning.split()), "")
    for marker in (renderer.markers.close, renderer.markers.open):
        bare = bare.replace(marker, "")
    return bare


def _structure(renderer: Renderer, ids: list[int]) -> list[int]:
    """The control tokens, those of markers aside."""
    tokenizer = renderer.codec.tokenizer
    markers = set(tokenizer.encode(renderer.markers.open + renderer.markers.close))
    return [i for i in ids if tokenizer.is_control(i) and i not in markers]
