"""Bank files are checked without a server and without the model, and nothing of them changes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from bankkit import FINGERPRINT, OTHER_SPACE, TAILED, Observed, Turns, config_of

from ds4grpc.errors import StoreDisabled, StoreFailed
from ds4grpc.store.offline import FileVerdict, model_folders, verify_file, verify_folder
from ds4grpc.store.store import Store

NAME = FINGERPRINT.hex()[:16]
STEM = Turns(TAILED, head=100).grow(1, 400)
LEFT, RIGHT = STEM.grow(2, 200), STEM.grow(3, 150)
ALONE = Turns(TAILED, OTHER_SPACE).grow(1, 300)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six files of one model: a head, a parent with two children, another tenant's bank, and an
    exported file beside them."""

    async def write() -> None:
        async with Store(config_of(tmp_path / "banks", TAILED), Observed()) as store:
            for turns in (STEM, LEFT, RIGHT, ALONE):
                assert (await store.persist(turns.source())).detail == ""
            async with store.transfer.send(LEFT.bank_id) as outgoing:
                chunks = []
                while chunk := await store.transfer.next_chunk(outgoing):
                    chunks.append(chunk)
            (tmp_path / "talk").write_bytes(b"".join(chunks))

    asyncio.run(write())
    return tmp_path / "banks"


def file_of(folder: Path, turns: Turns) -> Path:
    (path,) = folder.rglob(f"{turns.bank_id}.*.bank")
    return path


def bad(folder: Path, *wanted: str) -> dict[str, str]:
    """What failed, by bank; and nothing in the folder has changed."""
    before = snapshot(folder)
    verdicts = list(verify_folder(str(folder), NAME, wanted))
    assert snapshot(folder) == before
    assert [verdict.done for verdict in verdicts] == list(range(1, len(verdicts) + 1))
    assert {verdict.total for verdict in verdicts} <= {len(verdicts)}
    return {verdict.bank_id: verdict.detail for verdict in verdicts if verdict.detail}


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_good_folder_is_good(folder: Path) -> None:
    assert model_folders(str(folder)) == [NAME]
    assert bad(folder) == {}
    verdicts = list(verify_folder(str(folder), NAME))
    assert {verdict.bank_id for verdict in verdicts} == {
        turns.bank_id for turns in (STEM.head_only(), STEM, LEFT, RIGHT, ALONE)
    }
    assert all(verdict.read_bytes > 1000 and verdict.model == NAME for verdict in verdicts)
    (only,) = verify_folder(str(folder), NAME, [LEFT.bank_id[:8]])
    assert (only.bank_id, only.detail) == (LEFT.bank_id, "")


@pytest.mark.parametrize("at", [40, 4096 + 8, -4100, -1])
def test_damage_is_found_and_all_that_needs_it_is_named(folder: Path, at: int) -> None:
    path = file_of(folder, STEM)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    found = bad(folder)
    assert set(found) == {STEM.bank_id, LEFT.bank_id, RIGHT.bank_id}
    assert found[LEFT.bank_id] == f"it needs bank {STEM.bank_id}, which is damaged"


def test_chain_without_its_parent_is_bad(folder: Path) -> None:
    file_of(folder, STEM).unlink()
    assert bad(folder) == {
        turns.bank_id: f"it needs bank {STEM.bank_id}, which is not there"
        for turns in (LEFT, RIGHT)
    }
    assert set(bad(folder, RIGHT.bank_id)) == {RIGHT.bank_id}


def test_parent_of_other_tokens_or_another_tenant_is_bad(folder: Path, tmp_path: Path) -> None:
    """Every file is good by itself: only the chain is not."""
    lies = tmp_path / "lies"

    async def write(turns: Turns) -> Path:
        async with Store(config_of(lies, TAILED), Observed()) as store:
            await store.persist(turns.source())
        return file_of(lies, turns)

    other = asyncio.run(write(Turns(TAILED).grow(77, 400)))
    path = file_of(folder, STEM)
    document = file_of(folder, LEFT).read_bytes()
    renamed = document.replace(STEM.bank_id.encode(), other.name[:32].encode())
    assert renamed != document
    place = path.parent.parent / other.name[:2]
    place.mkdir(exist_ok=True)
    shutil.copy(other, place / other.name)
    file_of(folder, LEFT).write_bytes(with_header_checksum(renamed))
    assert bad(folder) == {
        LEFT.bank_id: f"bank {other.name[:32]} does not hold what it needs",
    }


def with_header_checksum(data: bytes) -> bytes:
    from ds4grpc.store.format import PREAMBLE, encode_preamble

    length = PREAMBLE.unpack(data[: PREAMBLE.size])[3]
    header = data[PREAMBLE.size : PREAMBLE.size + length]
    return encode_preamble(header) + data[PREAMBLE.size :]


def test_file_of_another_model_in_the_folder_is_bad(folder: Path) -> None:
    other = folder / "0123456789abcdef"
    shutil.copytree(folder / NAME, other)
    details = {verdict.detail for verdict in verify_folder(str(folder), other.name)}
    assert "the file belongs to another model" in details
    assert model_folders(str(folder)) == sorted([NAME, other.name])


async def test_folder_of_a_running_store_is_refused(folder: Path) -> None:
    async with Store(config_of(folder, TAILED), Observed()):
        with pytest.raises(StoreDisabled, match="stop it, or verify through it"):
            await asyncio.to_thread(lambda: list(verify_folder(str(folder), NAME)))
    assert await asyncio.to_thread(bad, folder) == {}


async def test_store_is_refused_a_folder_that_is_being_checked(folder: Path) -> None:
    verdicts = verify_folder(str(folder), NAME)
    await asyncio.to_thread(next, verdicts)
    with pytest.raises(StoreDisabled, match="another process owns"):
        async with Store(config_of(folder, TAILED), Observed()):
            pass
    verdicts.close()  # type: ignore[attr-defined]
    async with Store(config_of(folder, TAILED), Observed()):
        pass


def test_exported_file_is_checked_under_any_name(folder: Path) -> None:
    path = folder.parent / "talk"
    verdict = verify_file(str(path))
    assert (verdict.model, verdict.detail) == (NAME, "")
    part = verify_file(str(file_of(folder, LEFT)))
    assert part.detail == "it holds a part of a bank only"
    data = bytearray(path.read_bytes())
    data[-4100] ^= 1
    path.write_bytes(data)
    assert verify_file(str(path)).detail == "something lies between two sections"
    path.write_bytes(b"no bank")
    assert verify_file(str(path)) == FileVerdict(
        "", "", "the file has 7 bytes; a preamble needs 32", 0, 1, 1
    )


def test_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed):
        model_folders(str(tmp_path / "none"))
