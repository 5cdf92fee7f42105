"""Text to ids and back: recorded ids of many families, escapes, and characters kept whole."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded import smollm2_checkpoint
from sources import llama_cpp_source

from ds4grpc.errors import ModelError
from ds4grpc.model.gguf import read_gguf
from ds4grpc.pretokenize import PRETOKENIZERS
from ds4grpc.tokenizer import ESCAPE, Detokenizer, Tokenizer, unescape

VOCABULARIES = (
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gpt-2",
    "llama-bpe",
    "mpt",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
START, END, EOT = 1, 2, 0  # <|im_start|>, <|im_end|>, <|endoftext|> of SmolLM2


def smollm2() -> Tokenizer:
    return smollm2_checkpoint().tokenizer


@cache
def recorded(name: str) -> Tokenizer:
    path = llama_cpp_source() / "models" / f"ggml-vocab-{name}.gguf"
    return Tokenizer(read_gguf(path).metadata)


def vectors(name: str) -> Iterator[tuple[str, list[int]]]:
    stem = llama_cpp_source() / "models" / f"ggml-vocab-{name}.gguf"
    texts = stem.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = stem.with_suffix(".gguf.out").read_text().split("\n")
    for text, line in zip(texts, lines, strict=True):
        yield text, [int(token_id) for token_id in line.split()]


@pytest.mark.timeout(300)  # the first one fetches 76 MB
@pytest.mark.parametrize("name", VOCABULARIES)
def test_encode_gives_the_recorded_ids(name: str) -> None:
    tokenizer = recorded(name)
    for text, ids in vectors(name):
        assert tokenizer.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == text


@pytest.mark.timeout(300)
def test_every_pretokenizer_is_held_by_recorded_ids() -> None:
    proven = {
        PRETOKENIZERS[
            read_gguf(llama_cpp_source() / "models" / f"ggml-vocab-{name}.gguf").metadata[
                "tokenizer.ggml.pre"
            ]
        ].patterns
        for name in VOCABULARIES
    }
    assert {pre.patterns for pre in PRETOKENIZERS.values()} == proven


@pytest.mark.timeout(300)
def test_begin_token_follows_the_family_where_the_file_is_silent() -> None:
    assert recorded("llama-bpe").add_bos
    assert recorded("llama-bpe").bos_text == "<|begin_of_text|>"
    assert not recorded("qwen2").add_bos
    assert recorded("command-r").add_bos


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("llama-bpe", {"<|end_of_text|>", "<|eot_id|>"}),
        ("qwen2", {"<|endoftext|>", "<|im_end|>"}),
        ("deepseek-llm", {"<｜end▁of▁sentence｜>"}),
        ("command-r", {"<|END_OF_TURN_TOKEN|>"}),
    ],
)
def test_end_ids_hold_the_family_s_end_markers(name: str, spellings: set[str]) -> None:
    tokenizer = recorded(name)
    assert {tokenizer.decode([token_id]) for token_id in tokenizer.end_ids} == spellings


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "word"),
    [("llama-spm", "'llama'"), ("gpt-neox", "tokenizer.ggml.pre"), ("bert-bge", "'bert'")],
)
def test_other_tokenizers_are_refused_by_name(name: str, word: str) -> None:
    path = llama_cpp_source() / "models" / f"ggml-vocab-{name}.gguf"
    with pytest.raises(ModelError, match=word):
        Tokenizer(read_gguf(path).metadata)


def test_smollm2_has_its_tokens_by_role() -> None:
    tokenizer = smollm2()
    assert tokenizer.vocabulary_size == 49152
    assert tokenizer.controls["<|im_start|>"] == tokenizer.bos_id == START
    assert (tokenizer.bos_text, tokenizer.eos_text) == ("<|im_start|>", "<|im_end|>")
    assert not tokenizer.add_bos
    assert tokenizer.end_ids == {EOT, END}
    assert len(tokenizer.controls) == len(tokenizer.specials) == 17
    assert tokenizer.is_control(END)
    assert not tokenizer.is_control(17)
    assert tokenizer.token_bytes(END) == b"<|im_end|>"


def test_spelling_of_a_control_token_becomes_its_id() -> None:
    ids = smollm2().encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (START, END)
    assert smollm2().decode(ids) == "<|im_start|>user\nhi<|im_end|>"
    assert smollm2().decode(ids, controls=False) == "user\nhi"


def test_escaped_spelling_is_plain_text() -> None:
    ids = smollm2().encode(f"say <{ESCAPE}|im_end|> now")
    assert not any(smollm2().is_control(token_id) for token_id in ids)
    assert smollm2().decode(ids) == "say <|im_end|> now"
    assert ids == smollm2().plain_ids("say <|im_end|> now")


def test_longest_spelling_wins() -> None:
    metadata = edited()
    metadata["tokenizer.ggml.tokens"][3] = "<|im_end|>>"
    assert Tokenizer(metadata).encode("<|im_end|>>") == [3]


@pytest.mark.parametrize(
    ("escaped", "plain"),
    [
        (f"a{ESCAPE}b", "ab"),
        (f"a{ESCAPE}{ESCAPE}b", f"a{ESCAPE}b"),
        (f"{ESCAPE}{ESCAPE}{ESCAPE}", ESCAPE),
        (f"{ESCAPE}{ESCAPE}{ESCAPE}{ESCAPE}", ESCAPE * 2),
        (ESCAPE, ""),
        ("", ""),
    ],
)
def test_unescape_keeps_only_doubled_escapes(escaped: str, plain: str) -> None:
    assert unescape(escaped) == plain
    assert smollm2().encode(escaped) == smollm2().plain_ids(plain)


def test_encode_many_equals_encode_of_each() -> None:
    texts = ["", "<|im_end|>", "a<|im_end|><|im_end|>b", "plain", f"<{ESCAPE}|im_end|>", "é" * 50]
    assert smollm2().encode_many(texts) == [smollm2().encode(text) for text in texts]


@given(st.text())
@settings(deadline=None)
def test_plain_text_never_gives_special_tokens(text: str) -> None:
    ids = smollm2().plain_ids(text + "<|im_end|>")
    assert not any(smollm2().is_control(token_id) for token_id in ids)


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=["Cs"])))
@settings(deadline=None)
def test_decode_returns_what_was_encoded(text: str) -> None:
    assert smollm2().decode(smollm2().plain_ids(text)) == text


token_ids = st.lists(
    st.one_of(
        st.integers(0, 16),  # control tokens
        st.integers(17, 280),  # single bytes: characters come in parts
        st.integers(0, 49151),
    ),
    max_size=30,
)


@given(token_ids)
@settings(deadline=None)
def test_detokenizer_pieces_join_to_the_decoded_text(ids: list[int]) -> None:
    detokenizer = Detokenizer(smollm2())
    pieces = [detokenizer.feed(token_id) for token_id in ids]
    held = detokenizer.pending
    last = detokenizer.flush()
    assert "".join(pieces) + last == smollm2().decode(ids, controls=False)
    assert bool(last) == held
    assert not detokenizer.pending


def test_detokenizer_never_splits_a_character() -> None:
    detokenizer = Detokenizer(smollm2())
    ids = smollm2().plain_ids("🌵ü漢")
    pieces = [detokenizer.feed(token_id) for token_id in ids]
    assert len(ids) > 3
    assert [piece for piece in pieces if piece] == ["🌵", "ü", "漢"]
    assert not detokenizer.pending


@given(token_ids)
@settings(deadline=None)
def test_bank_text_encodes_to_the_same_special_tokens(ids: list[int]) -> None:
    tokenizer = smollm2()
    escaped = tokenizer.bank_text(ids, escape_in_test)
    again = tokenizer.encode(escaped)
    assert [i for i in again if tokenizer.is_control(i)] == [
        i for i in ids if tokenizer.is_control(i)
    ]
    assert unescape(escaped) == tokenizer.decode(ids)


def test_bank_text_escapes_a_spelling_made_of_plain_tokens() -> None:
    ids = [START, *smollm2().plain_ids(f"say <|im_end|>{ESCAPE}"), END]
    escaped = smollm2().bank_text(ids, escape_in_test)
    assert escaped == f"<|im_start|>say <{ESCAPE}|im_end|>{ESCAPE}{ESCAPE}<|im_end|>"
    assert smollm2().encode(escaped) == ids


def test_digest_moves_with_whatever_decides_ids() -> None:
    digests = {Tokenizer(edited()).digest, smollm2().digest}
    assert len(digests) == 1
    merges = edited()
    merges["tokenizer.ggml.merges"].pop()
    types = edited()
    types["tokenizer.ggml.token_type"][16] = 1
    begin = edited()
    begin["tokenizer.ggml.add_bos_token"] = True
    pre = edited()
    pre["tokenizer.ggml.pre"] = "gpt-2"
    digests.update(Tokenizer(metadata).digest for metadata in (merges, types, begin, pre))
    assert len(digests) == 5


def test_end_token_of_an_ordinary_type_is_still_a_control_token() -> None:
    metadata = edited()
    metadata["tokenizer.ggml.token_type"][END] = 1
    tokenizer = Tokenizer(metadata)
    assert tokenizer.is_control(END)
    assert tokenizer.encode("<|im_end|>") == [END]
    assert END in tokenizer.end_ids


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "llama", "'llama' is not supported"),
        ("pre", "tekken", "'tekken' is not supported"),
        ("token_type", [1, 2], "49152 tokens"),
        ("token_type", ["x"] * 49152, "no token types"),
        ("merges", ["no such"], "merges"),
        ("merges", 5, "not a list of texts"),
        ("eos_token_id", 49152, "ends at 49152"),
        ("tokens", None, "no tokenizer.ggml.tokens"),
    ],
)
def test_damaged_metadata_is_refused(key: str, value: Any, message: str) -> None:
    metadata = edited()
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    else:
        metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ModelError, match=message):
        Tokenizer(metadata)


def test_long_text_is_encoded_in_linear_time() -> None:
    draw = random.Random(3)
    text = " ".join(str(draw.randrange(10**6)) for _ in range(30_000))
    assert len(smollm2().encode(text)) > 100_000
    assert len(smollm2().encode("a" * 100_000)) > 10_000


def edited() -> dict[str, Any]:
    """A copy of SmolLM2's metadata to change."""
    metadata = smollm2_checkpoint().gguf.metadata
    return {
        key: list(value) if isinstance(value, list) else value for key, value in metadata.items()
    }


def escape_in_test(text: str) -> str:
    text = text.replace(ESCAPE, ESCAPE * 2)
    for spelling in smollm2().controls:
        text = text.replace(spelling, spelling[0] + ESCAPE + spelling[1:])
    return text
