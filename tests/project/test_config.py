"""ServeConfig: limits, addresses, environment, defaults that depend on the machine."""

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import pytest

from ds4grpc.config import (
    MB,
    Address,
    ServeConfig,
    cache_folder,
    check_environment,
    flag,
    memory_limit_bytes,
    num_cpus,
    spec,
    variable,
)
from ds4grpc.errors import ConfigError

# DESIGN's names are public: later versions add options, none is renamed.
PUBLIC_FLAGS = {
    *("--model", "--kv-disk-dir", "--no-kv-disk", "--kv-disk-space-mb", "--kv-cache-min-tokens"),
    *("--kv-memory-mb", "--slots", "--max-context", "--dtype", "--device", "--threads"),
    *("--listen", "--admin-listen", "--metrics-listen", "--exact-reuse"),
}


def test_public_flags_and_their_defaults_are_there() -> None:
    assert {flag(item.name) for item in dataclasses.fields(ServeConfig)} >= PUBLIC_FLAGS
    config = ServeConfig()
    assert (config.model, config.slots, config.dtype) == ("smollm2", 8, "auto")
    assert str(config.listen) == "127.0.0.1:50051"
    assert str(config.metrics_listen) == "127.0.0.1:9464"
    assert config.kv_cache_min_tokens == 512


RANGED = [item for item in dataclasses.fields(ServeConfig) if spec(item).low is not None]


def config_with(name: str, value: Any) -> ServeConfig:
    return ServeConfig(**{name: value})


@pytest.mark.parametrize("item", RANGED, ids=lambda item: item.name)
def test_number_outside_its_limits_is_refused_with_option_value_and_limit(
    item: dataclasses.Field[Any],
) -> None:
    low, high = spec(item).low, spec(item).high
    assert low is not None and high is not None
    for value, limit in ((low - 1, low), (high + 1, high)):
        with pytest.raises(ConfigError) as caught:
            config_with(item.name, value)
        assert caught.value.message.startswith(f"{flag(item.name)} is {value}; the ")
        assert caught.value.message.endswith(str(limit))
    config_with(item.name, low)
    config_with(item.name, high)


def test_value_that_is_no_number_or_no_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="--grace-seconds is nan"):
        ServeConfig(grace_seconds=math.nan)
    with pytest.raises(ConfigError, match="--dtype is 'int8'; choose from auto, float32"):
        ServeConfig(dtype="int8")


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--no-kv-disk turns the disk tier off"):
        ServeConfig(no_kv_disk=True, kv_disk_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051, True),
        ("127.9.9.9:0", "127.9.9.9", 0, True),
        ("localhost:1", "localhost", 1, True),
        ("[::1]:50051", "::1", 50051, True),
        ("[::]:50051", "::", 50051, False),
        ("0.0.0.0:50051", "0.0.0.0", 50051, False),
        ("gpu-box.lan:65535", "gpu-box.lan", 65535, False),
    ],
)
def test_address_is_read_and_written_back(text: str, host: str, port: int, loopback: bool) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.is_loopback) == (host, port, loopback)
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "50051", "host", "host:", ":1", "::1:5", "a b:1", "h:70000"])
def test_malformed_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="write host:port, such as"):
        Address.parse(text)


def test_unknown_variable_is_refused_with_near_names() -> None:
    check_environment({"DS4GRPC_SLOTS": "4", "DS4GRPC_SERVER": "x", "PATH": "", "DS4": ""})
    for item in dataclasses.fields(ServeConfig):
        check_environment({variable(item.name): ""})
    with pytest.raises(ConfigError) as caught:
        check_environment({"DS4GRPC_KV_DISK_DIRR": "", "DS4GRPC_ZZ": ""})
    assert "DS4GRPC_KV_DISK_DIRR (did you mean DS4GRPC_KV_DISK_DIR" in caught.value.message
    assert "DS4GRPC_ZZ;" in caught.value.message


def test_folders_follow_the_xdg_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ServeConfig().bank_folder == tmp_path / "ds4grpc" / "banks"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "ds4grpc"
    assert ServeConfig(kv_disk_dir=Path("~/b")).bank_folder == tmp_path / "b"


def test_byte_limits_come_from_options_or_the_machine(tmp_path: Path) -> None:
    asked = ServeConfig(kv_memory_mb=64, kv_disk_space_mb=32, threads=3)
    assert asked.kv_memory_bytes() == 64 * MB
    assert asked.kv_disk_bytes() == 32 * MB
    assert asked.num_threads() == 3
    # A folder that is not there yet lies on its parent's file system.
    unasked = ServeConfig(kv_disk_dir=tmp_path / "a" / "b")
    assert 0 < unasked.kv_disk_bytes() <= 8192 * MB
    assert unasked.kv_disk_bytes(used_bytes=2**50) == 8192 * MB
    assert unasked.kv_memory_bytes() == memory_limit_bytes() // 2
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory_limit_bytes() <= machine
    assert 1 <= unasked.num_threads() == num_cpus() <= len(os.sched_getaffinity(0))
