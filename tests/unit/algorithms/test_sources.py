"""Statistics by data source: a chain with by_source gives each source what it would get alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.algorithms import (
    ChainResult,
    PackedBatch,
    RunningMoments,
    build_chain,
    merge_metrics,
    run_chain,
)
from streamadv.algorithms.chain.sources import part_of
from streamadv.errors import ArgumentError

from .reference import batch_of, random_pairs

CHAINS: list[dict[str, Any]] = [
    {"reward": {"mean": "batch", "std": "batch"}},
    {"estimator": "reinforce_plus_plus", "whiten_advantages": True, "reward": {"mean": "group", "clip": 1.0}},
    {"estimator": "gae", "whiten_rewards": True, "whiten_advantages": True, "raw_advantages": True},
    {"estimator": "gigpo", "whiten_advantages": True},
    {"sample_weights": {"length": True}, "estimator": "gpg"},
]


def batch(seed: int, sources: list[str | None]) -> PackedBatch:
    made = batch_of(random_pairs(seed, 5))
    return replace(made, group_sources=[sources[g % len(sources)] for g in range(made.num_groups)])


def of_source(whole: PackedBatch, source: str) -> torch.Tensor:
    """Positions of its trajectories."""
    flags = torch.tensor([(name or "unknown") == source for name in whole.group_sources])
    return flags[whole.trajectory_group].nonzero().flatten()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    config=st.sampled_from(CHAINS),
    sources=st.lists(st.sampled_from(["math", "code", None]), min_size=1, max_size=3),
)
def test_each_source_gets_what_it_would_get_alone(
    seed: int, config: dict[str, Any], sources: list[str | None]
) -> None:
    whole = batch(seed, sources)
    together = run_chain(build_chain({**config, "by_source": True}), whole)
    alone: list[ChainResult] = []
    for source in sorted({name or "unknown" for name in whole.group_sources}):
        part = part_of(whole, of_source(whole, source))
        result = run_chain(build_chain(config), part.batch)
        alone.append(result)
        for field in ("advantages", "returns"):
            want, got = getattr(result, field), getattr(together, field)
            assert (want is None) == (got is None)
            if want is not None:
                assert torch.equal(got[part.indices[result.level]], want)
        assert torch.equal(together.rewards[part.indices["trajectory"]], result.rewards)
        assert torch.equal(together.step_rewards[part.indices["step"]], result.step_rewards)
        for name, column in result.columns.items():
            assert torch.equal(together.columns[name][part.indices["token"]], column)
        for name, value in result.metrics.items():
            assert together.metrics[f"{source}/{name}"] == value
    merged, _ = merge_metrics([(result.metrics, result.weights) for result in alone])
    assert {name: together.metrics[name] for name in merged} == merged


@pytest.mark.parametrize("config", CHAINS)
def test_one_source_is_as_none(config: dict[str, Any]) -> None:
    whole = batch(5, ["math"])
    together, without = (
        run_chain(build_chain({**config, "by_source": flag}), whole) for flag in (True, False)
    )
    assert together.advantages is not None
    assert without.advantages is not None
    assert torch.equal(together.advantages, without.advantages)


def test_running_moments_are_those_of_the_source() -> None:
    whole = batch(6, ["math", "code"])
    config = {"reward": {"mean": "running", "std": "running"}, "by_source": True}
    moments = {"math": RunningMoments(4.0, 1.0, 3.0), "code": RunningMoments(9.0, -5.0, 32.0)}
    rewards = run_chain(build_chain(config), whole, running=moments).rewards
    for source, own in moments.items():
        mask = of_source(whole, source)
        want = (whole.rewards[mask] - own.mean) / (own.std + 1e-6)
        assert torch.allclose(rewards[mask], want, rtol=1e-12)


def test_sources_are_one_for_each_group() -> None:
    whole = batch(7, ["math"])
    with pytest.raises(ArgumentError, match="group_sources"):
        replace(whole, group_sources=[*whole.group_sources, "code"])
