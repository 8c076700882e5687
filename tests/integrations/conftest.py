"""Tests against packages that have environments of their own: `make test-integrations`. Elsewhere they are skipped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: By which package the environment of an integration is known, where it is not that of its name.
TOLD_BY = {"trackers": "trackio", "slime": "miles" if find_spec("miles") else "slime"}
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it warns at import


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Modules of an integration whose package is missing are not imported; `test_missing.py` says so."""
    package = collection_path.relative_to(HERE).parts[:-1]
    return True if package and find_spec(TOLD_BY.get(package[0], package[0])) is None else None


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """What these packages warn of is theirs."""
    for item in items:
        if str(item.path).startswith(f"{HERE}{os.sep}"):
            item.add_marker(pytest.mark.filterwarnings("default"))
