"""These tests need the packages of the extra `deploy`; `make test-deploy` makes an environment that has them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = ("cloudcoil", "compose_lint", "helm_python", "kubernetes_validate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if not missing:
        return
    skip = pytest.mark.skip(reason=f"{', '.join(missing)} missing: make test-deploy installs them")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)
