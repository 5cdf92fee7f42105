"""The options of `ds4grpc serve`: one frozen `ServeConfig`, checked when it is made.

Each field carries its help, limits and choices; command line, environment variables and the
README's table are made from them. Reads the machine only where a default depends on it. Imports
nothing heavy, so that `ds4grpc --help` stays instant.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds4grpc.errors import ConfigError

MB = 2**20
ENV_PREFIX = "DS4GRPC_"
# Variables that client commands read; the others are the fields of ServeConfig.
CLIENT_VARIABLES = ("DS4GRPC_SERVER", "DS4GRPC_TENANT")


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address; port 0 lets the system choose."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Address:
        """Reads `host:port`, IPv6 hosts in brackets. Raises ConfigError."""
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/]+)):([0-9]{1,5})", text)
        if match is None or int(match[3]) > 65535:
            raise ConfigError(
                f"{text!r} is not an address; write host:port, such as 127.0.0.1:50051 or"
                " [::1]:50051"
            )
        return Address(match[1] or match[2], int(match[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than localhost counts as not."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True)
class Option:
    """What the command line shows of a field, and what its value may be."""

    text: str
    metavar: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


def option(default: Any, text: str, metavar: str = "", **limits: Any) -> Any:
    """A field of ServeConfig with its `Option`."""
    return field(default=default, metadata={"option": Option(text, metavar, **limits)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Every option of `serve`. None means that the machine or the model decides.

    Raises ConfigError when a value is out of range.
    """

    model: str = option("smollm2", "Model name, or path of a GGUF file.", "NAME|PATH")
    listen: Address = option(Address("127.0.0.1", 50051), "Where gRPC clients connect.", "ADDRESS")
    admin_listen: Address | None = option(
        None,
        "Where BankService answers.  [default: the main listener, while that is loopback]",
        "ADDRESS",
    )
    metrics_listen: Address = option(
        Address("127.0.0.1", 9464), "Where Prometheus reads /metrics.", "ADDRESS"
    )
    device: str = option(
        "auto", "Where the model runs; auto takes a GPU if any.", choices=("auto", "cpu", "cuda")
    )
    dtype: str = option(
        "auto",
        "Numeric form; auto is the fastest one that is as good as float32.",
        choices=("auto", "float32", "bfloat16"),
    )
    threads: int | None = option(
        None, "CPU threads that compute.  [default: the CPUs at hand]", "N", low=1, high=1024
    )
    slots: int = option(8, "Banks that are resident at once.", "N", low=1, high=256)
    max_context: int | None = option(
        None,
        "Tokens of prompt and reply together.  [default: the model's]",
        "TOKENS",
        low=64,
        high=2**24,
    )
    prefill_chunk: int = option(
        256,
        "Prompt tokens computed in one step; fewer while other requests run.",
        "TOKENS",
        low=16,
        high=65536,
    )
    queue: int = option(
        256, "Requests that may wait for a slot; more are refused.", "N", low=1, high=65536
    )
    kv_memory_mb: int | None = option(
        None,
        "Memory for resident banks.  [default: half of what this process may use]",
        "MB",
        low=16,
        high=2**30,
    )
    kv_disk_dir: Path | None = option(
        None, "Folder of stored banks.  [default: ~/.cache/ds4grpc/banks]", "PATH"
    )
    no_kv_disk: bool = option(False, "Keep no banks on disk.")
    kv_disk_space_mb: int | None = option(
        None,
        "Disk space for stored banks.  [default: 8192, and at most half of what is free]",
        "MB",
        low=1,
        high=2**40,
    )
    kv_disk_busy: str = option(
        "refuse",
        "When another server has the model's bank folder: refuse to start, or keep none on disk.",
        choices=("refuse", "off"),
    )
    kv_disk_write_mb_per_s: float | None = option(
        None,
        "Average rate at which banks are written and compacted.  [default: no limit]",
        "MB",
        low=0.1,
        high=2**20,
    )
    kv_cache_min_tokens: int = option(
        512, "Shorter banks are not stored.", "TOKENS", low=1, high=2**24
    )
    exact_reuse: bool = option(
        False, "Reuse only what a cold run of the same prompt would compute, for every request."
    )
    grace_seconds: float = option(
        30.0, "How long running streams may go on after SIGTERM.", "SECONDS", low=0, high=86400
    )
    log_format: str = option("text", "Form of the log lines.", choices=("text", "json"))
    log_level: str = option(
        "info", "Least level that is logged.", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check(flag(item.name), getattr(self, item.name), spec(item))
        if self.no_kv_disk and (self.kv_disk_dir is not None or self.kv_disk_space_mb is not None):
            raise ConfigError(
                "--no-kv-disk turns the disk tier off; it does not go with --kv-disk-dir or"
                " --kv-disk-space-mb"
            )

    @property
    def bank_folder(self) -> Path:
        """Where bank files lie; made by the store."""
        if self.kv_disk_dir is not None:
            return self.kv_disk_dir.expanduser()
        return cache_folder() / "banks"

    def kv_memory_bytes(self) -> int:
        """Most bytes that resident banks may take."""
        if self.kv_memory_mb is not None:
            return self.kv_memory_mb * MB
        return memory_limit_bytes() // 2

    def kv_disk_bytes(self, used_bytes: int = 0) -> int:
        """Most bytes that bank files may take; the `used_bytes` they take now count as free.

        Reads the file system of the nearest existing folder.
        """
        if self.kv_disk_space_mb is not None:
            return self.kv_disk_space_mb * MB
        folder = self.bank_folder.absolute()
        while not folder.exists():
            folder = folder.parent
        free_bytes = shutil.disk_usage(folder).free + used_bytes
        return min(8192 * MB, free_bytes // 2)

    def num_threads(self) -> int:
        """CPU threads that compute."""
        return self.threads if self.threads is not None else num_cpus()


def flag(name: str) -> str:
    """The command line's name of a field."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a field."""
    return ENV_PREFIX + name.upper()


def spec(item: dataclasses.Field[Any]) -> Option:
    """The `Option` of a field of ServeConfig."""
    found = item.metadata["option"]
    assert isinstance(found, Option)
    return found


def _check(name: str, value: Any, limits: Option) -> None:
    if value is None:
        return
    if limits.choices and value not in limits.choices:
        raise ConfigError(f"{name} is {value!r}; choose from {', '.join(limits.choices)}")
    # `not (low <= value)` also refuses NaN.
    if limits.low is not None and not limits.low <= value:
        raise ConfigError(f"{name} is {value}; the least is {limits.low}")
    if limits.high is not None and not value <= limits.high:
        raise ConfigError(f"{name} is {value}; the most is {limits.high}")


def check_environment(environ: Mapping[str, str]) -> None:
    """Raises ConfigError for each `DS4GRPC_…` variable that nothing reads."""
    known = {variable(item.name) for item in dataclasses.fields(ServeConfig)}
    known.update(CLIENT_VARIABLES)
    unknown = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in known)
    if not unknown:
        return
    import difflib

    parts = []
    for name in unknown:
        # Without the prefix, which alone would make all of them alike.
        words = {other.removeprefix(ENV_PREFIX): other for other in known}
        near = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), words, n=3)
        hint = f" (did you mean {' or '.join(words[word] for word in near)}?)" if near else ""
        parts.append(name + hint)
    raise ConfigError(
        f"unknown environment variables: {', '.join(parts)}; unset them, or see"
        " `ds4grpc serve --help` for the ones that exist"
    )


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/ds4grpc`, else `~/.cache/ds4grpc`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "ds4grpc"


def memory_limit_bytes() -> int:
    """What this process may use: the tightest cgroup limit above it, else the machine's memory."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [machine]
    for folder in _cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit():
                limits.append(int(text))
    return min(limits)


def num_cpus() -> int:
    """CPUs that this process may keep busy: its affinity, cut by cgroup CPU quotas."""
    cpus = float(len(os.sched_getaffinity(0)))
    for folder in _cgroup_folders("cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not period:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            cpus = min(cpus, int(quota) / int(period))
    return max(1, int(cpus))


def _cgroup_folders(controller: str) -> list[Path]:
    """This process's cgroup and those above it, version 2 and version 1."""
    folders: list[Path] = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup")
        if controllers:
            if controller not in controllers.split(","):
                continue
            root = root / controller
        group = root / path.lstrip("/")
        # In a container the path is often the host's and does not exist; its root does.
        folders += [g for g in (group, *group.parents) if g == root or root in g.parents]
    return folders


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
