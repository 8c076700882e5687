"""Tests of the gateway need what its extra brings."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("aiohttp") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMADV_GATEWAY_SECRET", "a-secret-of-the-tests")
