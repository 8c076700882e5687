"""These tests need the packages of the extra `deploy`; `make test-deploy` makes an environment that has them."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = f"{Path(__file__).parent}{os.sep}"
PACKAGES = ("cloudcoil", "compose_lint", "helm_python", "kubernetes_validate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if not missing:
        return
    skip = pytest.mark.skip(reason=f"{', '.join(missing)} missing: make test-deploy installs them")
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(skip)
