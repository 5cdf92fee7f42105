"""The wheel, installed beside its dependencies and away from the sources: whole and working."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# Nothing of this environment may help the other one.
ENVIRON = {n: v for n, v in os.environ.items() if not n.startswith(("DS4GRPC_", "PYTHON"))}


def run(*arguments: str | Path, folder: Path) -> str:
    done = subprocess.run(arguments, cwd=folder, env=ENVIRON, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel; it sees this one's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = run("git", "ls-files", "-z", "-co", "--exclude-standard", folder=ROOT)
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / "source" / name, follow_symlinks=False)
    wheel = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet")
    run(*wheel, "--wheel-dir", folder / "dist", folder / "source", folder=folder)
    venv.create(folder / "env", symlinks=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder / "env")})
    # Not a second pip install of everything: only the packages, without this one's editable link.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    install = (sys.executable, "-m", "pip", "--quiet", "--python", folder / "env")
    run(*install, "install", "--no-deps", *(folder / "dist").glob("*.whl"), folder=folder)
    shutil.rmtree(folder / "source")
    return folder / "env" / "bin" / "python"


@pytest.mark.slow
def test_wheel_has_its_data_migrates_and_runs_as_a_program(python: Path) -> None:
    program = (
        "import ds4grpc, sys\n"
        "from importlib.resources import files\n"
        "from ds4grpc.store.database import upgrade\n"
        "assert str(sys.prefix) in ds4grpc.__file__, ds4grpc.__file__\n"
        "for name in ('grafana/ds4grpc.json', 'migrations/script.py.mako', 'py.typed',\n"
        "             'v1/generation_pb2.pyi'):\n"
        "    assert files('ds4grpc').joinpath(name).is_file(), name\n"
        "upgrade('catalog.db')\n"
    )
    run(python, "-c", program, folder=python.parent)
    assert (python.parent / "catalog.db").stat().st_size > 0
    assert "serve" in run(python.with_name("ds4grpc"), "--help", folder=python.parent)


@pytest.mark.system
@pytest.mark.slow
def test_wheel_serves_the_default_model_until_sigterm(
    python: Path, smollm2_path: Path, tmp_path: Path
) -> None:
    ports = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    with subprocess.Popen(
        [python, "-m", "ds4grpc", "serve", *ports, "--kv-disk-dir", tmp_path, "--slots", "1"],
        cwd=tmp_path,
        env=ENVIRON,
        stdout=subprocess.PIPE,
        text=True,
    ) as served:
        assert served.stdout is not None
        first = served.stdout.readline()
        served.send_signal(signal.SIGTERM)
        rest = served.stdout.read()
    assert first.startswith("ready in "), first + rest
    assert served.returncode == 0
    assert list(tmp_path.glob("*/catalog.db"))
