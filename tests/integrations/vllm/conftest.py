"""One vLLM for all tests: it takes about a minute to start."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import ClientSession

from .serving import make_model, vllm
from .tap import Tap, tapping


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMADV_GATEWAY_SECRET", "a-secret-of-the-tests")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if there := os.environ.get("STREAMADV_VLLM_MODEL"):
        return Path(there)
    folder = tmp_path_factory.mktemp("vllm") / "model"
    make_model(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm(model, tmp_path_factory.mktemp("engine") / "log") as url:
        yield url


@pytest.fixture
async def tap(vllm_url: str, model: Path) -> AsyncIterator[Tap]:
    async with tapping(vllm_url) as found, ClientSession() as http:
        given = {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(model)},
        }  # other tests load others
        for path, body in (("/collective_rpc", given), ("/reset_prefix_cache", {})):
            async with http.post(vllm_url + path, json=body) as answer:
                assert answer.status == 200
        yield found
