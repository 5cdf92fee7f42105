"""The GGUF reader against the `gguf` package's, and against files that are not what they seem."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
)
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds4grpc.errors import ModelError
from ds4grpc.model.gguf import read_gguf

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K")


def write(path: Path, *fill: Callable[[GGUFWriter], None]) -> Path:
    writer = GGUFWriter(path, "llama")
    for each in fill:
        each(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def all_values(writer: GGUFWriter) -> None:
    writer.add_uint8("v.u8", 200)
    writer.add_int8("v.i8", -100)
    writer.add_uint16("v.u16", 60000)
    writer.add_int16("v.i16", -30000)
    writer.add_uint32("v.u32", 2**32 - 1)
    writer.add_int32("v.i32", -(2**31))
    writer.add_float32("v.f32", 1.5)
    writer.add_uint64("v.u64", 2**63 + 1)
    writer.add_int64("v.i64", -(2**62))
    writer.add_float64("v.f64", 1e300)
    writer.add_bool("v.bool", True)
    writer.add_string("v.text", "größer 漢字")
    writer.add_array("v.texts", ["a", "", "ü"])
    writer.add_array("v.numbers", [1, -2, 3])
    writer.add_array("v.flags", [True, False])


def one_tensor(writer: GGUFWriter) -> None:
    writer.add_tensor("weight", np.arange(12, dtype=np.float32).reshape(3, 4))


def test_metadata_equals_the_gguf_package_s(tmp_path: Path) -> None:
    path = write(tmp_path / "values.gguf", all_values, one_tensor)
    wanted = {
        name: field.contents()
        for name, field in GGUFReader(path).fields.items()
        if not name.startswith("GGUF.")
    }
    assert dict(read_gguf(path).metadata) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_of_each_type_is_dequantized(kind: str, tmp_path: Path) -> None:
    quantization = GGMLQuantizationType[kind]
    block_values, block_bytes = GGML_QUANT_SIZES[quantization]
    # Long enough to be read in more than one piece.
    num_rows, num_columns = 4200, 1024
    random = np.random.default_rng(5)
    raw = random.integers(0, 256, (num_rows, num_columns // block_values * block_bytes), np.uint8)
    raw[:, 1::2] &= 0x3B  # no infinities among the scales, whichever bytes they are
    data = raw.view({"F32": np.float32, "F16": np.float16}.get(kind, np.uint8))

    def fill(writer: GGUFWriter) -> None:
        writer.add_tensor("a", np.ones(3, dtype=np.float32))
        writer.add_tensor("weight", data, raw_dtype=quantization)

    gguf = read_gguf(write(tmp_path / "tensor.gguf", fill))
    wanted = torch.from_numpy(dequantize(data, quantization).astype(np.float32))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(num_rows, num_columns, dtype=dtype)
        with gguf.open() as reader:
            reader.read("weight", out)
        assert torch.equal(out.nan_to_num(), wanted.to(dtype).nan_to_num())


def test_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    gguf = read_gguf(write(tmp_path / "tensor.gguf", one_tensor))
    with gguf.open() as reader:
        with pytest.raises(
            ModelError, match=r"weight has shape \[3, 4\]; the model needs \[4, 3\]"
        ):
            reader.read("weight", torch.empty(4, 3))
        with pytest.raises(ModelError, match="no tensor other"):
            reader.read("other", torch.empty(4, 3))


def test_file_changed_since_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tensor.gguf", one_tensor)
    gguf = read_gguf(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelError, match="was changed"), gguf.open():
        pass
    path.unlink()
    with pytest.raises(ModelError, match="cannot read"), gguf.open():
        pass


def test_file_cut_short_while_open_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "tensor.gguf", one_tensor)
    with read_gguf(path).open() as reader:
        os.truncate(path, path.stat().st_size - 30)
        with pytest.raises(ModelError, match="truncated"):
            reader.read("weight", torch.empty(3, 4))


def test_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", all_values, one_tensor).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(len(whole) - 16):  # the last 16 bytes pad the tensor data
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            read_gguf(path)


@given(changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_header_is_read_or_refused_and_nothing_else(
    changes: list[tuple[float, int]], tmp_path: Path
) -> None:
    source = tmp_path / "whole.gguf"
    data = bytearray(
        (source if source.exists() else write(source, all_values, one_tensor)).read_bytes()
    )
    for where, value in changes:
        data[round(where * (len(data) - 1))] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with contextlib.suppress(ModelError):
        read_gguf(path)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"", "not a GGUF file"),
        (b"<html>", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "truncated or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", GGUFValueType.ARRAY, 9, 1),
            "unknown type 9",
        ),
        (b"GGUF" + struct.pack("<IQQQ1s", 3, 0, 1, 1, b"\xff"), "not UTF-8"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 256, 10, 0) + bytes(500),
            "type Q2_K, which is not supported",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 256, 99, 0) + bytes(500),
            "type 99, which is not supported",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 8, 0) + bytes(500),
            "no multiple of the 32 values",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "9 dimensions"),
    ],
)
def test_what_is_no_supported_gguf_is_refused_by_name(
    head: bytes, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(head)
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(path)
    assert str(path) in caught.value.message


def test_missing_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="Is a directory"):
        read_gguf(tmp_path)
