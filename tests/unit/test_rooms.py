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
    *("version", "errors", "messages", "units", "clock", "plugins", "program"),
    *("trajectory", "metrics", "store", "settings", "run", "producer", "grouping"),
    *("algorithms", "losses", "padded", "batch", "advantage", "status", "trainer", "integrations"),
    *("processes", "demo", "bench", "cli"),
)
#: Rooms of base installations: nothing in them needs torch, also not by what they import.
WITHOUT_TORCH = ROOMS[: ROOMS.index("algorithms")]
#: The package's face may be used by what stands beside the pipeline, as any user would.
USERS = ("processes", "demo", "bench", "cli")
PACKAGE = Path(str(resources.files("streamadv")))


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


def test_every_module_has_a_room() -> None:
    names = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in PACKAGE.rglob("*.py")}
    assert names - {"__init__", "__main__"} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_earlier_ones(room: str) -> None:
    allowed = {*ROOMS[: ROOMS.index(room) + 1], *([None] if room in USERS else [])}
    for file in modules(room):
        for name in imports_of(file):
            assert room_of(name) in allowed, f"{file.relative_to(PACKAGE)} imports {'.'.join(name)}"


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_the_rooms_before_the_maths_do_not_need_torch(room: str) -> None:
    for file in modules(room):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {"torch", "numba"} & {name.split(".")[0] for name in names}, file.relative_to(PACKAGE)


@pytest.mark.processes
def test_the_maths_load_nothing_of_the_pipeline() -> None:
    code = "import sys, streamadv.algorithms, streamadv.padded, streamadv.losses; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"redis", "streamadv.store", "streamadv.run", "streamadv.grouping"} & set(loaded.split())
