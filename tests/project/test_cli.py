"""The program without a server: help, options, environment, models, catalogs."""

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from ds4grpc import __version__
from ds4grpc.cli import COMMANDS, main
from ds4grpc.config import Option, ServeConfig, flag, spec, variable
from ds4grpc.store.database import upgrade
from ds4grpc.store.files import Files
from ds4grpc.store.folder import Folder

README = Path(__file__).parents[2] / "README.md"


def run(*arguments: str, **environ: str) -> Result:
    clean: dict[str, str | None] = {n: None for n in os.environ if n.startswith("DS4GRPC_")}
    result = CliRunner().invoke(main, arguments, env=clean | environ)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def commands(group: click.Group = main, path: str = "ds4grpc") -> list[tuple[str, click.Command]]:
    """Every command of the program with its full name."""
    found: list[tuple[str, click.Command]] = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found.append((f"{path} {name}", command))
        if isinstance(command, click.Group):
            found += commands(command, f"{path} {name}")
    return found


def test_program_has_the_public_commands() -> None:
    assert {name.removeprefix("ds4grpc ") for name, _ in commands()} >= {
        *("serve", "generate", "chat", "ps", "bench"),
        *("banks ls", "banks show", "banks pin", "banks unpin", "banks rm", "banks verify"),
        *("banks flush", "banks rescan", "models ls", "models pull", "models rm", "models show"),
        "catalog upgrade",
    }


@pytest.mark.parametrize(("name", "command"), commands(), ids=[name for name, _ in commands()])
def test_every_command_and_option_has_help(name: str, command: click.Command) -> None:
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts}"
    assert run(*name.split()[1:], "--help").exit_code == 0


def test_every_command_is_in_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if line.startswith("| `ds4grpc ")]
    for name, command in commands():
        if isinstance(command, click.Group):
            continue
        *group, last = name.split()[1:]
        words = f"ds4grpc {group[0]}" if group else name
        assert any(words in line and f"{last}" in line for line in table), name


def readme_row(item: dataclasses.Field[Any]) -> str:
    """The line of README.md for an option of serve."""
    limits = spec(item)
    noted = re.fullmatch(r"(?P<text>.*?)  \[default: (?P<default>.*)\]", limits.text)
    default = noted["default"] if noted else "off" if item.default is False else str(item.default)
    values = "|".join(limits.choices) or limits.metavar
    shown = f"{flag(item.name)} {values}".strip().replace("|", "\\|")
    return f"| `{shown}` | {default} | {noted['text'] if noted else limits.text} |"


def test_readme_lists_every_option_of_serve() -> None:
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if "| `--" in line]
    assert rows == [readme_row(item) for item in dataclasses.fields(ServeConfig)]


def test_options_without_a_default_say_what_happens() -> None:
    for item in dataclasses.fields(ServeConfig):
        limits = spec(item)
        assert isinstance(limits, Option)
        assert (item.default is None) == ("  [default: " in limits.text), item.name


def test_help_is_instant_and_loads_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from ds4grpc.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'grpc', 'numpy', 'sqlalchemy', 'rich', 'google'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    seconds = time.monotonic() - begun
    assert done.returncode == 0, done.stderr
    # A start takes 0.15 s; the bound leaves room for a machine that is busy.
    assert seconds < 3
    for name in COMMANDS:
        assert f"  {name} " in done.stdout


def test_version_is_shown() -> None:
    assert run("--version").stdout == f"ds4grpc {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slots", "0"], "error: --slots is 0; the least is 1"),
        (["--slots", "many"], "'many' is not a valid integer"),
        (["--dtype", "int8"], "'int8' is not one of 'auto', 'float32', 'bfloat16'"),
        (["--listen", "50051"], "'50051' is not an address; write host:port"),
        (["--slot", "3"], "Did you mean '--slots'?"),
        (["--no-kv-disk", "--kv-disk-dir", "x"], "--no-kv-disk turns the disk tier off"),
    ],
)
def test_wrong_option_is_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    result = run("serve", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_variables_set_options_and_the_command_line_wins() -> None:
    result = run("serve", DS4GRPC_SLOTS="0")
    assert (result.exit_code, result.stderr) == (2, "error: --slots is 0; the least is 1\n")
    result = run("serve", "--slots", "-5", DS4GRPC_SLOTS="3")
    assert result.stderr == "error: --slots is -5; the least is 1\n"
    result = run("serve", DS4GRPC_THREADS="x")
    assert "(env var: 'DS4GRPC_THREADS')" in result.stderr


def test_unknown_variable_stops_every_command() -> None:
    result = run("models", "ls", DS4GRPC_SLOT="3")
    assert result.exit_code == 2
    assert "DS4GRPC_SLOT (did you mean DS4GRPC_SLOTS" in result.stderr


def test_every_option_of_serve_has_its_variable() -> None:
    (serve,) = (command for name, command in commands() if name == "ds4grpc serve")
    found = {p.envvar for p in serve.params if isinstance(p, click.Option)}
    assert found == {variable(item.name) for item in dataclasses.fields(ServeConfig)}


def test_models_ls_and_rm_follow_the_cache_folder(tmp_path: Path) -> None:
    listed = run("models", "ls", XDG_CACHE_HOME=str(tmp_path))
    assert "smollm2\t" in listed.stdout
    assert "\tnot here" in listed.stdout
    removed = run("models", "rm", "smollm2", XDG_CACHE_HOME=str(tmp_path))
    assert removed.exit_code == 1
    assert removed.stderr.startswith("error: model smollm2 is not pulled")
    unknown = run("models", "pull", "nothing", XDG_CACHE_HOME=str(tmp_path))
    assert unknown.exit_code == 1
    assert "smollm2" in unknown.stderr


def test_catalog_upgrade_migrates_each_and_names_what_it_cannot(tmp_path: Path) -> None:
    def made(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name / "catalog.db"

    assert run("catalog", "upgrade", "--kv-disk-dir", str(tmp_path)).stdout.startswith("no catalog")
    made("a" * 16).touch()
    upgrade(str(made("b" * 16)))
    made("c" * 16).write_bytes(b"not a database" * 400)
    made("not-a-model").touch()
    done = run("catalog", "upgrade", DS4GRPC_KV_DISK_DIR=str(tmp_path))
    assert done.exit_code == 1
    assert [line.split("/")[-2] for line in done.stdout.splitlines()] == ["a" * 16, "b" * 16]
    (error,) = done.stderr.splitlines()
    assert "c" * 16 in error
    assert (tmp_path / ("c" * 16) / "catalog.db").read_bytes().startswith(b"not a database")


def test_catalog_upgrade_leaves_a_running_servers_folder_alone(tmp_path: Path) -> None:
    name = "a" * 16
    (tmp_path / name).mkdir()
    (tmp_path / name / "catalog.db").touch()
    owner = Folder(Files(), str(tmp_path), bytes.fromhex(name))
    owner.open()
    try:
        done = run("catalog", "upgrade", "--kv-disk-dir", str(tmp_path))
    finally:
        owner.close()
    assert done.exit_code == 1
    assert "another process owns the bank folder" in done.stderr
