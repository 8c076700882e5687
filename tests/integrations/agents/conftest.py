"""A secret that signs keys, as the tests of the gateway have it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMADV_GATEWAY_SECRET", "a-secret-of-the-tests")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
