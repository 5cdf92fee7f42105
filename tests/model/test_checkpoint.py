"""Opening model files: what is read, what is refused, and which digests move with what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFValueType, GGUFWriter
from loaded import load_float32, smollm2_checkpoint
from tiny import TinyShape, write_tiny

from ds4grpc.errors import ConfigError, ModelError
from ds4grpc.layout import Rows, StateLayout
from ds4grpc.model import registry
from ds4grpc.model.checkpoint import GenerationDefaults, load_model, open_checkpoint
from ds4grpc.model.digest import digest_gguf
from ds4grpc.model.fingerprint import fingerprint
from ds4grpc.model.gguf import read_gguf
from ds4grpc.model.llama_config import LlamaConfig, Rope

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def header_only(path: Path, **fields: Any) -> Path:
    """A file with metadata `llama.<name>` and an embedding, to see what is refused."""
    numbers = {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    writer = GGUFWriter(path, "llama")
    for name, value in {**numbers, **fields}.items():
        if value is not None:
            writer.add_key_value(f"llama.{name}", value, GGUFValueType.get_type(value))
    writer.add_tensor("token_embd.weight", np.zeros((100, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_smollm2_opens_with_its_numbers() -> None:
    checkpoint = smollm2_checkpoint()
    assert checkpoint.name == "smollm2"
    assert checkpoint.title.startswith("Smollm2 135M")
    assert checkpoint.architecture == "llama"
    assert checkpoint.config == LlamaConfig(
        num_layers=30,
        hidden_dim=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        ffn_dim=1536,
        vocabulary_size=49152,
        max_context=8192,
        norm_eps=float(np.float32(1e-5)),
        rope=Rope(base=100000.0, dim=64, scale=1.0, has_factors=False),
        windows=(0,) * 30,
        tied_output=True,
    )
    assert checkpoint.chat_template is not None
    assert "<|im_start|>" in checkpoint.chat_template
    assert checkpoint.generation == GenerationDefaults()


def test_served_context_may_be_smaller_but_not_larger(tiny_file: Path) -> None:
    checkpoint = open_checkpoint(tiny_file)
    model = load_model(checkpoint, device=CPU, dtype=torch.float32, max_context=100)
    assert model.max_context == 100
    assert model.layout == load_float32(tiny_file).layout
    with pytest.raises(ConfigError, match="4097; tiny has 4096"):
        load_model(checkpoint, device=CPU, dtype=torch.float32, max_context=4097)


def test_sampling_defaults_come_from_the_file(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 40)

    path = write_tiny(tmp_path / "tiny.gguf", also=add)
    assert open_checkpoint(path).generation == GenerationDefaults(temperature=0.5, top_k=40)


def test_weights_digest_moves_with_weights_and_not_with_the_template(
    tiny_file: Path, tmp_path: Path
) -> None:
    plain = open_checkpoint(tiny_file)
    templated = open_checkpoint(write_tiny(tmp_path / "t.gguf", template="{{ messages }}"))
    assert templated.chat_template == "{{ messages }}"
    assert templated.weights_digest == plain.weights_digest

    data = bytearray(tiny_file.read_bytes())
    data[-100] ^= 1
    (tmp_path / "flipped.gguf").write_bytes(data)
    assert open_checkpoint(tmp_path / "flipped.gguf").weights_digest != plain.weights_digest


def test_fingerprint_moves_with_every_part_and_nothing_else(
    tiny_file: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(tiny_file)
    layout = load_float32(tiny_file).layout
    own = fingerprint(checkpoint, layout, "float32")
    assert len(own) == 32
    assert fingerprint(open_checkpoint(tiny_file), layout, "float32") == own

    def of(name: str, shape: TinyShape | None = None, **changes: Any) -> bytes:
        path = write_tiny(tmp_path / name, shape, **changes)
        return fingerprint(open_checkpoint(path), layout, "float32")

    assert of("template", template="{{ messages }}") == own
    assert of("context", TinyShape(max_context=512)) == own
    others = {
        of("rope_base", TinyShape(rope_base=5e5)),
        of("rope_scale", TinyShape(rope_scale=2.0)),
        of("window", TinyShape(window=17)),
        of("begin", also=lambda writer: writer.add_bool("tokenizer.ggml.add_bos_token", True)),
        fingerprint(checkpoint, layout, "bfloat16"),
        fingerprint(checkpoint, StateLayout("other", (Rows("k.0", 4),)), "float32"),
    }
    assert len(others | {own}) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"leave_out": "blk.2.ffn_up.weight"}, "no tensor blk.2.ffn_up.weight"),
        ({"leave_out": "output_norm.weight"}, "no tensor output_norm.weight"),
        (
            {"extra": {"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)}},
            "does not use here: blk.0.attn_q.bias",
        ),
    ],
)
def test_missing_or_unknown_tensors_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        open_checkpoint(write_tiny(tmp_path / "tiny.gguf", **changes))


def test_misshaped_tensor_is_refused_when_loaded(tmp_path: Path) -> None:
    extra = {"blk.1.attn_k.weight": np.zeros((64, 64), dtype=np.float32)}
    path = write_tiny(tmp_path / "tiny.gguf", extra=extra)
    with pytest.raises(ModelError, match=r"blk.1.attn_k.weight has shape \[64, 64\].*\[32, 64\]"):
        load_float32(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_count": None}, "no llama.block_count"),
        ({"block_count": 0}, "positive integer"),
        ({"embedding_length": "wide"}, "positive integer"),
        ({"attention.layer_norm_rms_epsilon": 0.0}, "positive number"),
        ({"attention.head_count_kv": 3}, "4 heads do not divide among 3"),
        ({"attention.value_length": 4}, "different length"),
        ({"rope.dimension_count": 7}, "cannot rotate 7"),
        ({"rope.dimension_count": 16}, "cannot rotate 16"),
        ({"rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"rope.scaling.type": "linear"}, "no llama.rope.scaling.factor"),
        ({"expert_count": 8}, "experts"),
        (
            {"attention.sliding_window": 8, "attention.sliding_window_pattern": [True]},
            "each of 2 layers",
        ),
    ],
)
def test_numbers_that_make_no_supported_model_are_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        LlamaConfig.of(read_gguf(header_only(tmp_path / "header.gguf", **fields)))


def test_every_layer_slides_where_no_pattern_is_given(tmp_path: Path) -> None:
    path = header_only(tmp_path / "header.gguf", **{"attention.sliding_window": 8})
    assert LlamaConfig.of(read_gguf(path)).windows == (8, 8)


def test_other_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba' is not supported"):
        open_checkpoint(tmp_path / "other.gguf")


def test_digests_of_big_files_are_remembered_until_they_change(
    tiny_file: Path, tmp_path: Path
) -> None:
    gguf = read_gguf(tiny_file)
    memory = tmp_path / "cache" / "digests.json"
    digests = digest_gguf(gguf, memory, remember_from=0)
    assert digests == digest_gguf(gguf, tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()

    remembered = json.loads(memory.read_text())
    (key,) = remembered
    remembered[key] = ["ab" * 32, "cd" * 32]
    memory.write_text(json.dumps(remembered))
    assert digest_gguf(gguf, memory, remember_from=0).file == b"\xab" * 32

    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_file.read_bytes())
    assert digest_gguf(read_gguf(copy), memory, remember_from=0) == digests
    assert len(json.loads(memory.read_text())) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "\x00", '{"KEY": ["zz", "zz"]}'])
def test_damaged_memory_of_digests_is_made_anew(
    content: str, tiny_file: Path, tmp_path: Path
) -> None:
    gguf = read_gguf(tiny_file)
    memory = tmp_path / "digests.json"
    digest_gguf(gguf, memory, remember_from=0)
    (key,) = json.loads(memory.read_text())
    memory.write_text(content.replace("KEY", key))
    assert digest_gguf(gguf, memory, remember_from=0) == digest_gguf(gguf, memory)


def test_pulled_file_with_other_content_is_refused(
    tiny_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = registry.models_folder() / "smollm2.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(tiny_file.read_bytes())
    with pytest.raises(ModelError, match="smollm2.gguf is damaged.*models pull smollm2"):
        open_checkpoint(path)
