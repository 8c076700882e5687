"""One vLLM for all tests: it takes about a minute to start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from .serving import make_model, vllm
from .tap import Tap, tapping


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMADV_GATEWAY_SECRET", "a-secret-of-the-tests")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "model"
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_url(model: Path) -> Iterator[str]:
    with vllm(model, model.parent / "vllm.log") as url:
        yield url


@pytest.fixture
async def tap(vllm_url: str) -> AsyncIterator[Tap]:
    async with tapping(vllm_url) as found:
        yield found
