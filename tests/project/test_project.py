"""What holds for the repository as a whole: layers, links, packaging, version, proto comments."""

import ast
import os
import re
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from ds4grpc import __version__, errors
from ds4grpc.rpc.status import CODES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ds4grpc"

# Each module belongs to the first entry that it starts with; it may import its own layer and the
# ones above it here.
LAYERS = (
    *(("errors", 0), ("config", 0), ("metrics", 0), ("logs", 0), ("layout", 0), ("bank", 0)),
    *(("v1", 0), ("families", 0)),
    *(("kernels", 1), ("store.format", 1), ("tokenizer", 1), ("pretokenize", 1)),
    *(("chat", 2), ("model", 3), ("engine", 4), ("store", 4), ("migrations", 4)),
    *(
        ("rpc", 5),
        ("loading", 5),
        ("tier", 5),
        ("server", 6),
        ("commands", 6),
        ("cli", 6),
        ("__main__", 6),
    ),
)
# Protocols and frozen values with which the store and the engine know each other.
SHARED = ("ds4grpc.engine.banks",)


def sources() -> Iterator[Path]:
    for folder, folders, names in os.walk(PACKAGE, followlinks=True):
        folders[:] = sorted(name for name in folders if name not in ("__pycache__", "v1"))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def layer(module: str) -> int:
    name = module.removeprefix("ds4grpc.")
    for prefix, level in LAYERS:
        if name == prefix or name.startswith(f"{prefix}."):
            return level
    raise AssertionError(f"{module} is in no layer")


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports from ds4grpc."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("ds4grpc."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds4grpc"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                path_of = ROOT / name.replace(".", "/")
                is_module = path_of.with_suffix(".py").exists() or path_of.is_dir()
                module = name if is_module else str(node.module)
                if module != "ds4grpc":
                    yield module


def test_imports_go_one_way() -> None:
    wrong = []
    for path in sources():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if module == "ds4grpc":
            continue
        for imported in imports(path):
            if imported in SHARED and layer(module) >= layer("ds4grpc.store"):
                continue
            own, other = layer(module), layer(imported)
            parts = (module.split(".")[1], imported.split(".")[1])
            if other > own or (own == other == 4 and set(parts) == {"engine", "store"}):
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_store_imports_no_torch() -> None:
    for path in (PACKAGE / "store").glob("*.py"):
        assert not re.search(r"^\s*(import|from) torch\b", path.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", ["kernels", "migrations", "grafana"])
def test_linked_folder_is_a_link_without_init(name: str) -> None:
    link = PACKAGE / name
    assert stat.S_ISLNK(link.lstat().st_mode)
    assert Path(os.readlink(link)) == Path("..", name)
    assert not (ROOT / name / "__init__.py").exists()


def test_test_folders_have_no_init_and_test_files_have_unique_names() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


def test_dashboards_are_package_data() -> None:
    assert (files("ds4grpc") / "grafana" / "ds4grpc.json").is_file()
    assert (files("ds4grpc") / "migrations" / "script.py.mako").is_file()
    assert (files("ds4grpc") / "py.typed").is_file()


def test_changelog_has_the_version_and_a_place_for_changes() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert versions[1] == __version__


def test_makefile_targets_are_all_in_contributing_or_readme() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    assert targets >= {
        *("setup", "serve", "check", "lint", "types", "check-protos", "fmt", "test", "test-fast"),
        *("test-long", "test-gpu", "mutants", "protos", "migration", "bench", "dist", "clean"),
    }
    declared = re.search(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert declared is not None
    assert targets == set(declared[1].replace("\\\n", " ").split())


def test_ruff_rules_are_written_in_full() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rules = "E F W I B ASYNC C4 G ISC PERF PGH RUF100 T201 UP"
    assert project["tool"]["ruff"]["lint"]["select"] == rules.split()
    assert project["tool"]["mypy"]["strict"] is True
    assert project["tool"]["pytest"]["ini_options"]["filterwarnings"] == ["error"]


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    pattern = re.compile(rb"/(?:home|root|Users|work)/[a-z]")
    named = []
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and not path.is_symlink() and pattern.search(path.read_bytes()):
            named.append(name)
    assert named == []


def test_proto_comments_list_only_statuses_that_the_table_has() -> None:
    codes = {code.name for code in CODES.values()}
    for path in (ROOT / "protos").rglob("*.proto"):
        named = re.findall(r"^\s*// \* ([A-Z_]+):", path.read_text("utf-8"), re.MULTILINE)
        assert set(named) <= codes, path


def test_error_tree_in_the_docstring_names_every_class() -> None:
    def walk(kind: type[errors.Ds4grpcError]) -> Iterator[str]:
        yield kind.__name__
        for child in kind.__subclasses__():
            yield from walk(child)

    drawn = re.findall(r"^    (?:[│├└─ ]+ )?([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE)
    assert sorted(drawn) == sorted(set(walk(errors.Ds4grpcError)))


def test_every_test_that_the_docs_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "field-reports.md").read_text()))
    assert len(named) > 40
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name in named if f"def {name}(" not in sources} == set()
