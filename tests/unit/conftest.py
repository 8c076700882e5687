"""Tests of rooms are quick and alone: no real server."""

from __future__ import annotations

import pytest


@pytest.fixture
def server() -> None:
    pytest.fail(
        "a test in tests/unit takes `fake`; one that needs a server belongs in tests/promises or tests/servers"
    )
