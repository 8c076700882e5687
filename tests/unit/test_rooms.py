"""The folders of the package are rooms in the order of the data: a room imports only earlier ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

#: Earlier rooms first. ARCHITECTURE.md says what is in each.
ROOMS = (
    "version", "errors", "clock", "messages", "logs", "doors", "launcher", "extras", "tracing",
    "plugins", "program", "weights", "trajectory", "metrics", "store", "settings", "run", "prompts", "producer",
    "grouping", "algorithms", "losses", "padded", "batch", "advantage", "status", "trainer", "archive", "view",
    "processes", "integrations", "gateway", "demo", "cli", "testing",
)  # fmt: skip
#: Rooms and modules that only run where an extra is installed; all others are imported without.
WITH_EXTRAS = (
    "integrations",
    *("losses", "padded", "advantage", "trainer", "demo", "testing"),
    *("archive.rewind", "archive.compare", "archive.table"),
    "algorithms.arguments",
    *(
        f"gateway.{name}"
        for name in (
            "asking",
            "dialects",
            "engines",
            "http",
            "joining",
            "live",
            "loading",
            "server",
            "tokens",
        )
    ),
    *("view.app", "view.pages", "view.serve"),
)
#: The package's face may be used by what stands beside the pipeline, as any user would.
USERS = ("processes", "demo", "cli")
PACKAGE = Path(str(resources.files("streamadv")))
#: Files that `streamadv up --example` writes: programs of users.
PROJECTS = PACKAGE / "projects"


def imports_of(file: Path) -> Iterator[tuple[str, ...]]:
    """Full names of what a module imports from the package, without "streamadv"; () is the package's face."""
    package = file.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - (node.level - 1)]
            module = (*above, *(node.module.split(".") if node.module else ()))
            yield from (module or (name.name,) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "streamadv":
            yield tuple((node.module or "").split(".")[1:])


def room_of(name: tuple[str, ...]) -> str | None:
    return name[0] if name and name[0] in ROOMS else None


def modules(room: str) -> list[Path]:
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]


def all_modules() -> list[Path]:
    return [file for file in PACKAGE.rglob("*.py") if PROJECTS not in file.parents]


def test_every_module_has_a_room() -> None:
    names = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in all_modules()}
    assert names - {"__init__", "__main__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_earlier_ones(room: str) -> None:
    allowed = {*ROOMS[: ROOMS.index(room) + 1], *([None] if room in USERS else [])}
    for file in modules(room):
        for name in imports_of(file):
            assert room_of(name) in allowed, f"{file.relative_to(PACKAGE)} imports {'.'.join(name)}"


def test_the_docstring_of_a_package_names_its_modules() -> None:
    """But for the face, and for the commands, which are all there is to list."""
    missing = []
    for file in all_modules():
        if file.parent == PACKAGE or file.name.startswith("__"):
            continue
        text = ast.get_docstring(ast.parse((file.parent / "__init__.py").read_text())) or ""
        is_command = file.parent.name == "cli" and "def add_parser(" in file.read_text()
        if not (is_command or f"`{file.name}`" in text or f"`{file.stem}`" in text):
            missing.append(str(file.relative_to(PACKAGE)))
    assert not missing


@pytest.mark.processes
def test_the_maths_load_nothing_of_the_pipeline() -> None:
    code = "import sys, streamadv.algorithms, streamadv.padded, streamadv.losses; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"redis", "streamadv.store", "streamadv.run", "streamadv.grouping"} & set(loaded.split())


@pytest.mark.processes
def test_a_base_installation_imports_all_that_does_not_compute() -> None:
    """Without the extras' packages; where they are installed, the same modules do not import them."""
    names = [".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in all_modules()]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    base = [name for name in names if not f"{name}.".startswith(tuple(f"{room}." for room in WITH_EXTRAS))]
    assert {
        "producer.producer",
        "cli.worker",
        "cli.gateway",
        "gateway.access",
        "algorithms.chain",
        "algorithms.estimators.tokens",
    } < set(base)
    code = f"""
import importlib, sys
from importlib.machinery import PathFinder

class Forbid(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in ("torch", "numba", "aiohttp", "orjson"):
            raise ModuleNotFoundError(f"{{name}} was imported", name=name)

sys.meta_path.insert(0, Forbid)
for name in {base}:
    importlib.import_module("streamadv" if name == "__init__" else f"streamadv.{{name}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
