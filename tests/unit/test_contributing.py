"""CONTRIBUTING.md: its code runs, and the files, make targets and fixtures that it names exist."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from streamadv.algorithms import registry

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
#: Names in backticks that are paths of the repository; those with <placeholders> are left out.
PATHS = sorted(
    {*re.findall(r"`((?:streamadv|tests|docs|deploy|workers)/[\w./]+)`", TEXT)}
    | {*re.findall(r"`([\w.]+\.(?:md|toml|yaml))`", TEXT)}
    | {*re.findall(r"\]\(([\w./-]+)\)", TEXT)}
)


def test_its_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", TEXT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    monkeypatch.setattr(registry, "_REGISTRY", {**registry._REGISTRY})  # its estimator goes again
    names = {"__name__": "contributing"}
    for block in blocks:
        exec(textwrap.dedent(block), names)


@pytest.mark.parametrize("path", PATHS)
def test_what_it_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_make_target_exists() -> None:
    targets = {*re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    assert {*re.findall(r"(?:^|`)make ([\w-]+)", TEXT, re.MULTILINE)} <= targets
