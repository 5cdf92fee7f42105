"""`ds4grpc catalog`: the SQLite indexes beside the bank files, for a server that is not running."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ds4grpc.config import ServeConfig
from ds4grpc.errors import StoreDisabled
from ds4grpc.store.database import CatalogError, upgrade
from ds4grpc.store.files import Files
from ds4grpc.store.folder import Folder


@click.group()
def catalog() -> None:
    """Look after the catalogs of stored banks."""


@catalog.command("upgrade")
@click.option(
    "--kv-disk-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="DS4GRPC_KV_DISK_DIR",
    show_envvar=True,
    metavar="PATH",
    help="Folder of stored banks.  [default: ~/.cache/ds4grpc/banks]",
)
def upgrade_all(kv_disk_dir: Path | None) -> None:
    """Bring the catalog of each model in the folder to this version, as `serve` does at start.

    A damaged catalog is left alone and named; `serve` rebuilds it from the bank files. The exit
    code is 1 when any could not be upgraded.
    """
    root = ServeConfig(kv_disk_dir=kv_disk_dir).bank_folder
    found = sorted(
        path.parent.name
        for path in root.glob("*/catalog.db")
        if re.fullmatch(r"[0-9a-f]{16}", path.parent.name)
    )
    failures = [name for name in found if not _upgrade(root, name)]
    if not found:
        click.echo(f"no catalog in {root}")
    if failures:
        raise SystemExit(1)


def _upgrade(root: Path, name: str) -> bool:
    """Upgrades one under its folder's lock; whether it went well."""
    folder = Folder(Files(), str(root), bytes.fromhex(name))
    try:
        folder.open()
        upgrade(folder.catalog_path)
    except StoreDisabled as error:
        click.echo(f"error: {error.message}", err=True)
        return False
    except CatalogError as error:
        click.echo(f"error: {folder.catalog_path}: {error}", err=True)
        return False
    finally:
        folder.close()
    click.echo(f"{folder.catalog_path} is up to date")
    return True
