"""The model in this process: its log-probs are those that a trainer computes from the same weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamadv import weights
from streamadv.errors import SettingError
from streamadv.integrations.engines import Completion, Episode, LocalEngine

VOCABULARY, STOP = 32, 3


class Plain(torch.nn.Module):
    """A model without a cache: each token depends on the sum of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any) -> Any:
        seen = self.table(input_ids) * attention_mask[..., None]
        place = 0.1 * position_ids[..., None] * torch.arange(VOCABULARY)  # absolute
        return SimpleNamespace(logits=seen.cumsum(1) + place)


def plain() -> torch.nn.Module:
    torch.manual_seed(1)
    return Plain()


def llama() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="pip install 'streamadv[examples]'")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model: torch.nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=128, **sizes)
    )
    return model.eval()


def trained_log_probs(model: torch.nn.Module, completion: Completion, temperature: float) -> list[float]:
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions).logits
    found = torch.log_softmax(logits[0] / temperature, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return found[len(completion.prompt_ids) - 1 :].tolist()


@pytest.mark.parametrize("make", [plain, llama])
async def test_log_probs_are_those_of_the_model(make: Callable[[], torch.nn.Module]) -> None:
    model = make()
    engine = LocalEngine(model, stop_ids=[STOP], version=5)
    prompts = [[1, 2, 4], [7], [5, 6, 5, 6, 5, 6, 9]]
    asked = [engine.complete(prompt, max_tokens=9, temperature=0.7) for prompt in prompts for _ in range(4)]
    completions = await asyncio.gather(*asked)
    engine.close()
    assert len({tuple(completion.token_ids) for completion in completions}) > 3
    for completion in completions:
        assert completion.log_probs == pytest.approx(trained_log_probs(model, completion, 0.7), abs=2e-5)
        assert completion.version == 5
        ids = list(completion.token_ids)
        assert STOP not in ids[:-1]
        assert completion.finish_reason == ("stop" if ids[-1] == STOP else "length")
        assert len(ids) == 9 or ids[-1] == STOP


async def test_loaded_weights_have_their_version() -> None:
    engine = LocalEngine(plain(), seed=3)
    table = torch.zeros(VOCABULARY, VOCABULARY)
    table[:, 9] = 100.0
    await engine.load({"table.weight": table}, version=8)
    completion = await engine.complete([1], max_tokens=3)
    assert (completion.token_ids, completion.version) == ([9, 9, 9], 8)
    episode = Episode([1])
    episode.add(completion)
    assert episode.record()["versions"].tolist() == [-1, 8, 8, 8]
    with pytest.raises(SettingError, match="max_tokens 0"):
        await engine.complete([1], max_tokens=0)
    with pytest.raises(SettingError, match="0 prompt tokens"):
        await engine.complete([])
    engine.close()


async def test_it_takes_the_newest_weights_of_a_folder(tmp_path: Path) -> None:
    model = plain()
    engine, loader = LocalEngine(model), weights.Loader(tmp_path)
    with pytest.raises(FileNotFoundError):
        await engine.refresh(loader)
    table = torch.zeros(VOCABULARY, VOCABULARY)
    for version in (2, 3):
        table[:, version] = 100.0 * version
        weights.publish(tmp_path, version, {"table.weight": table})
        assert await engine.refresh(loader) == await engine.refresh(loader) == engine.version == version
        completion = await engine.complete([1], max_tokens=2)
        assert (completion.token_ids, completion.version) == ([version, version], version)
    engine.close()


async def test_an_error_of_the_model_reaches_those_who_asked() -> None:
    engine = LocalEngine(plain())
    results = await asyncio.gather(
        engine.complete([1]), engine.complete([VOCABULARY + 1]), return_exceptions=True
    )
    assert [type(result) for result in results] == [IndexError] * 2
    assert len((await engine.complete([1], max_tokens=2)).token_ids) == 2
    engine.close()


async def test_it_is_left_as_a_client_of_engines_is() -> None:
    async with LocalEngine(plain(), stop_ids=[STOP]) as engine:
        assert (await engine.complete([1], max_tokens=2)).token_ids
    with pytest.raises(RuntimeError):
        await engine.complete([1], max_tokens=2)
