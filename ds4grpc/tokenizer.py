"""Text to token ids and back, from a model file's own vocabulary and merges.

Owns the escaped form of text and the incremental detokenizer. Knows no template, no file and no
model. Everything but `Detokenizer` is immutable once built; any thread. Encoding computes, so it
stays off the event loop; the merges run without the GIL.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import tokenizers
from tokenizers import models, pre_tokenizers

from ds4grpc.errors import ModelError
from ds4grpc.pretokenize import PRETOKENIZERS, Pretokenizer

ESCAPE: Final = "\ufdd0"
"""A noncharacter that breaks a control token's spelling: `<\\ufdd0|im_end|>` is plain text.

In escaped text two in a row stand for a literal one, and any other one for nothing.
"""

_ESCAPED = re.compile(f"{ESCAPE}({ESCAPE}?)")

# Values of tokenizer.ggml.token_type.
_CONTROL = 3
_USER_DEFINED = 4

# Control tokens that end a reply in every family that has them.
_END_SPELLINGS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "</s>",
)


def unescape(text: str) -> str:
    """The text that escaped `text` stands for."""
    return _ESCAPED.sub(r"\1", text)


class Tokenizer:
    """A byte-level BPE tokenizer built from the `tokenizer.ggml.*` metadata of a GGUF file.

    Raises ModelError: another kind of tokenizer, an unknown pre-tokenizer, damaged metadata.
    """

    vocabulary_size: int
    bos_id: int | None
    add_bos: bool
    """Whether text input gets `bos_id` in front; `encode` itself never adds it."""
    bos_text: str
    eos_text: str
    """Spellings for templates; "" where the model has no such token."""
    end_ids: frozenset[int]
    """Control tokens that end a reply."""
    controls: Mapping[str, int]
    """Spelling to id of the control tokens."""
    specials: Mapping[str, int]
    """`controls` and the user-defined tokens: whatever `encode` takes whole."""
    digest: bytes
    """SHA-256 of all that decides which ids a text gets."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        fields = _Fields(metadata)
        pre = fields.pretokenizer()
        spellings = fields.strings("tokens")
        merges = fields.strings("merges")
        types = fields.types(len(spellings))

        self.vocabulary_size = len(spellings)
        self.bos_id = fields.token_id("bos_token_id", self.vocabulary_size)
        self.add_bos = self.bos_id is not None and fields.flag("add_bos_token", default=pre.add_bos)
        eos_id = fields.token_id("eos_token_id", self.vocabulary_size)
        self.bos_text = "" if self.bos_id is None else spellings[self.bos_id]
        self.eos_text = "" if eos_id is None else spellings[eos_id]

        ends = {
            token_id
            for name in ("eos_token_id", "eot_token_id", "eom_token_id")
            if (token_id := fields.token_id(name, self.vocabulary_size)) is not None
        }
        # A file may mark its end tokens as ordinary ones; they must never reach a client as text.
        self._control_ids = ends.union(i for i, kind in enumerate(types) if kind == _CONTROL)
        self._special_ids = self._control_ids.union(
            i for i, kind in enumerate(types) if kind == _USER_DEFINED
        )
        self.controls = MappingProxyType({spellings[i]: i for i in sorted(self._control_ids)})
        self.specials = MappingProxyType({spellings[i]: i for i in sorted(self._special_ids)})
        self.end_ids = frozenset(ends).union(
            self.controls[spelling] for spelling in _END_SPELLINGS if spelling in self.controls
        )
        self._bytes = tuple(
            _bytes_of(spelling, special=i in self._special_ids)
            for i, spelling in enumerate(spellings)
        )
        longest_first = sorted(filter(None, self.specials), key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._bpe = _byte_pair_encoder(
            {s: i for i, s in enumerate(spellings) if i not in self._special_ids}, merges, pre
        )
        flags = f"{fields.text('pre')} {self.bos_id} {self.add_bos} {sorted(self.end_ids)}"
        self.digest = _digest((_join(spellings), bytes(types), _join(merges), flags.encode()))

    def encode(self, text: str) -> list[int]:
        """Ids of escaped `text`: spellings of special tokens as their ids, the rest as plain text.

        A byte that the vocabulary has no token for vanishes, as it does in the model's training
        (SmolLM2 has none for U+0004, for instance). `text` must not hold lone surrogates.
        """
        return self.encode_many((text,))[0]

    def encode_many(self, texts: Iterable[str]) -> list[list[int]]:
        """`encode` of each text; the cores share the work and the GIL is free meanwhile."""
        # Splitting with one group alternates: plain, special, plain, …, plain.
        split = [self._splitter.split(text) for text in texts]
        runs = [unescape(run) for parts in split for run in parts[::2] if run]
        encoded = iter(self._encode_plain(runs))
        many: list[list[int]] = []
        for parts in split:
            ids: list[int] = []
            for i, part in enumerate(parts):
                if i % 2:
                    ids.append(self.specials[part])
                elif part:
                    ids += next(encoded)
            many.append(ids)
        return many

    def plain_ids(self, text: str) -> list[int]:
        """Ids of `text` as it is: no escapes, no special tokens."""
        return self._encode_plain([text])[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; for a special token its spelling's."""
        return self._bytes[token_id]

    def is_control(self, token_id: int) -> bool:
        return token_id in self._control_ids

    def decode(self, ids: Iterable[int], *, controls: bool = True) -> str:
        """The text of `ids`, with control tokens' spellings or without; bad UTF-8 as U+FFFD."""
        return b"".join(
            self._bytes[i] for i in ids if controls or i not in self._control_ids
        ).decode(errors="replace")

    def bank_text(self, ids: Iterable[int], escape: Callable[[str], str]) -> str:
        """The escaped form of `ids`: `encode` finds the same special tokens in it again.

        `escape` turns each run of plain text between special tokens into escaped text.
        """
        parts: list[str] = []
        run = bytearray()
        for token_id in ids:
            if token_id not in self._special_ids:
                run += self._bytes[token_id]
                continue
            if run:
                parts.append(escape(run.decode(errors="replace")))
                run.clear()
            parts.append(self._bytes[token_id].decode())
        if run:
            parts.append(escape(run.decode(errors="replace")))
        return "".join(parts)

    def _encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        # Unlike `encode`, the batch form releases the GIL, also for one text.
        batch = self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in batch]


class Detokenizer:
    """Turns ids into text as they come and never splits a character. One owner at a time.

    All pieces and the flush joined equal `Tokenizer.decode(ids, controls=False)`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character are held back."""
        return bool(self._decoder.getstate()[0])

    def feed(self, token_id: int) -> str:
        """The text that `token_id` completes; "" for a control token."""
        if self._tokenizer.is_control(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is held back, as U+FFFD; the detokenizer is then as new."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _Fields:
    """Checked access to the tokenizer's part of a GGUF file's metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        kind = self.text("model")
        if kind != "gpt2":
            raise ModelError(
                f"tokenizer model {kind!r} is not supported; byte-level BPE ('gpt2') is"
            )

    def text(self, name: str) -> str:
        value = self._required(name)
        if not isinstance(value, str):
            raise ModelError(f"tokenizer.ggml.{name} is {value!r}, not text")
        return value

    def pretokenizer(self) -> Pretokenizer:
        name = self.text("pre")
        if name not in PRETOKENIZERS:
            raise ModelError(
                f"pre-tokenizer {name!r} is not supported; these are: {', '.join(PRETOKENIZERS)}"
            )
        return PRETOKENIZERS[name]

    def strings(self, name: str) -> list[str]:
        value = self._required(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelError(f"tokenizer.ggml.{name} is not a list of texts")
        return value

    def types(self, length: int) -> list[int]:
        value = self._required("token_type")
        if not isinstance(value, list) or len(value) != length:
            raise ModelError(f"tokenizer.ggml.token_type does not list a type for {length} tokens")
        if not all(isinstance(item, int) and 0 <= item < 256 for item in value):
            raise ModelError("tokenizer.ggml.token_type holds values that are no token types")
        return value

    def token_id(self, name: str, limit: int) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < limit:
            raise ModelError(f"tokenizer.ggml.{name} is {value!r}; the vocabulary ends at {limit}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        return default if value is None else bool(value)

    def _required(self, name: str) -> Any:
        key = f"tokenizer.ggml.{name}"
        if key not in self._metadata:
            raise ModelError(f"the model file has no {key}")
        return self._metadata[key]


def _byte_pair_encoder(
    vocabulary: dict[str, int], merges: Sequence[str], pre: Pretokenizer
) -> tokenizers.Tokenizer:
    # Special tokens are left out of `vocabulary`: no text can then spell one by its merges.
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the package raises bare Exception for all that it refuses
        raise ModelError(f"tokenizer.ggml.merges does not fit the vocabulary: {error}") from error
    encoder = tokenizers.Tokenizer(model)
    splits: list[Any] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return encoder


def _byte_of_character() -> dict[int, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {0x100 + i: b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
_BYTE_CHARACTERS = frozenset(map(chr, _BYTE_OF_CHARACTER))


def _bytes_of(spelling: str, *, special: bool) -> bytes:
    if special or not _BYTE_CHARACTERS.issuperset(spelling):
        return spelling.encode()
    return spelling.translate(_BYTE_OF_CHARACTER).encode("latin-1")


def _join(parts: Iterable[str]) -> bytes:
    """Length-prefixed, so that different lists never join to the same bytes."""
    joined = bytearray()
    for part in parts:
        data = part.encode()
        joined += len(data).to_bytes(4, "little")
        joined += data
    return bytes(joined)


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256(b"ds4grpc/tokenizer/1")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
