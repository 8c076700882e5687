"""CONTRIBUTING.md: its code runs, and the files and make targets that it names exist."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from streamadv import algorithms
from streamadv.algorithms import registry
from streamadv.algorithms.segments import moments

from .algorithms.reference import batch_of, member

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
#: Names in backticks that are paths of the repository; those with <placeholders> are left out.
PATHS = sorted(
    {*re.findall(r"`((?:streamadv|tests|docs|deploy|workers)/[\w./]+)`", TEXT)}
    | {*re.findall(r"`([\w.]+\.(?:md|toml|yaml))`", TEXT)}
    | {*re.findall(r"\]\(([\w./-]+)\)", TEXT)}
)


def test_its_estimator_works(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"^ *```python\n(.*?)^ *```$", TEXT, re.MULTILINE | re.DOTALL)
    monkeypatch.setattr(registry, "_REGISTRY", {**registry._REGISTRY})  # forgets it again
    exec(textwrap.dedent(block), {**vars(algorithms), "moments": moments})
    batch = batch_of([member(group, index, float(index)) for group in "ab" for index in range(3)])
    result = algorithms.check_estimator("centred", batch, scale=2.0)
    assert result.advantages is not None
    assert result.advantages.tolist()[:3] == [-2.0, 0.0, 2.0]


@pytest.mark.parametrize("path", PATHS)
def test_what_it_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_make_target_exists() -> None:
    targets = {*re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    assert {*re.findall(r"(?:^|`)make ([\w-]+)", TEXT, re.MULTILINE)} <= targets
