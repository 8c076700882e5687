"""Says which integrations this environment does not test."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from .conftest import TOLD_BY

PACKAGES = sorted(path.parent.name for path in Path(__file__).parent.glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_package_is_here(package: str) -> None:
    if find_spec(TOLD_BY.get(package, package)) is None:
        pytest.skip(f"{package} is not installed: `make test-integration-{package}` says what it needs")
