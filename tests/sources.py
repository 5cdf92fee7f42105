"""Real vocabularies, templates and models for tests: fetched once, checked, never committed.

Everything is kept below the cache folder that ds4grpc itself uses, so that a second run needs no
network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

from ds4grpc.config import cache_folder
from ds4grpc.errors import ModelNotFound
from ds4grpc.model import registry

_PROJECT = "llama-cpp-python"
_SDIST = "llama_cpp_python-0.3.36.tar.gz"
_MODELS = "/vendor/llama.cpp/models/"  # in the sdist, below its top folder


def smollm2_file() -> Path:
    """SmolLM2's GGUF file, pulled on first use."""
    try:
        return registry.resolve("smollm2")
    except ModelNotFound:
        return registry.pull("smollm2", lambda done, total: None)


def llama_cpp_source() -> Path:
    """A folder with the sdist's `models/templates/*.jinja` and `models/ggml-vocab-*.gguf*`.

    Taken from the package index that pip is configured for. Not with `pip download`, which would
    build the package's metadata for a minute and a half.
    """
    target = cache_folder() / "tests" / _SDIST.removesuffix(".tar.gz")
    if target.is_dir():
        return target
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        archive = Path(name) / _SDIST
        _download(archive)
        unpacked = Path(name) / "unpacked"
        _unpack(archive, unpacked)
        if not target.is_dir():
            unpacked.rename(target)
    return target


def _download(archive: Path) -> None:
    page = urljoin(f"{_index_url().rstrip('/')}/", f"{_PROJECT}/")
    with _open(page) as response:
        links = _Links(response.geturl())
        links.feed(response.read().decode())
    url, fragment = urldefrag(links.urls[_SDIST])
    digest = hashlib.sha256()
    with _open(url) as response, archive.open("wb") as file:
        while block := response.read(1 << 20):
            digest.update(block)
            file.write(block)
    if fragment != f"sha256={digest.hexdigest()}":
        raise RuntimeError(f"{url} came with sha256 {digest.hexdigest()}; {page} says {fragment}")


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, path = member.name.partition(_MODELS)
            wanted = path.startswith("templates/") or ".gguf" in path
            file = tar.extractfile(member) if wanted and member.isfile() else None
            if file is not None:
                target = folder / "models" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with file, target.open("wb") as out:
                    shutil.copyfileobj(file, out)


def _index_url() -> str:
    if configured := os.environ.get("PIP_INDEX_URL"):
        return configured
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "https://pypi.org/simple"


def _open(url: str) -> Any:
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    return urllib.request.urlopen(url, timeout=60, context=context)


class _Links(HTMLParser):
    """File name to URL of the links on a page of a package index (PEP 503)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self._page = page
        self.urls: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href")
        if tag == "a" and href:
            url = urljoin(self._page, href)
            self.urls[urldefrag(url).url.rpartition("/")[2]] = url
