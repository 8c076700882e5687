"""A computed work item has the bits that the chain gives for the batch, trajectory by trajectory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from streamadv.advantage.compute import ComputedItem, compute
from streamadv.advantage.prepare import PreparedItem
from streamadv.algorithms import (
    Estimate,
    PackedBatch,
    build_chain,
    estimator,
    pack_trajectories,
    registry,
    run_chain,
)
from streamadv.batch.record import Death, WorkItem
from streamadv.errors import EstimatorError, TrajectoryError
from streamadv.grouping.groups_log import Pointer
from streamadv.run.consumer import Entry
from streamadv.trajectory.columns import Array
from tests.support import CPU, some_of
from tests.unit.grouping.layouts import StoredGroups

CHAINS: dict[str, Any] = {
    "rows": {"estimator": "grpo"},
    "rows of a batch": {"estimator": "reinforce_plus_plus"},
    "steps": {"estimator": "gigpo"},
    "named rewards": {"estimator": "gdpo", "options": {"weights": {"fit": 1.0, "form": 0.5}}},
    "a baseline": {"estimator": "remax"},
    "tokens": {"estimator": "reinforce", "gamma": 0.9, "whiten_advantages": True},
    "KL": {
        "estimator": "reinforce",
        "kl": {"coefficient": 0.1},
        "advantage_clip": 1.0,
        "raw_advantages": True,
    },
    "masks": {"estimator": "grpo", "masks": {"truncated": True}, "reward": {"truncation": -1.0}},
}


def prepared_item(stored: StoredGroups, config: Any, shard: int, dead: list[int]) -> PreparedItem:
    """Groups alternate between two shards; the chain sees them all."""
    groups = [replace(group, shard=number % 2) for number, group in enumerate(stored.groups)]
    pointers = [Pointer(group.shard, group.entry, group.group_id, len(group.members)) for group in groups]
    item = WorkItem(batch="b", k=0, number=shard, shard=shard, groups=pointers, chain=config)
    entry = Entry(shard, "1-1", {})
    deaths = {groups[number].group_id: Death("undecodable", "torn") for number in dead}
    needs = build_chain(config).needs
    columns = {
        key: {name: columns[name] for name in needs}
        for key, columns in stored.columns.items()
        if key.partition(":")[0] not in deaths
    }
    return PreparedItem(entry, item, groups, columns, deaths)


def one_by_one(stored: StoredGroups, config: Any, shard: int, dead: list[int]) -> dict[str, bytes]:
    """Every result of the shard's trajectories: the chain's on whole ones, cut into trajectories and put together."""
    living = [number for number in range(len(stored.groups)) if number not in dead]
    trajectories = [trajectory for number in living for trajectory in stored.trajectories[number]]
    chain = build_chain(config)
    batch = pack_trajectories(trajectories, chain.needs)
    result = run_chain(chain, batch)
    published = [number % 2 == shard for number in living for _ in stored.trajectories[number]]
    bounds = {
        "trajectory": np.arange(len(trajectories) + 1),
        "row": batch.row_offsets.numpy(),
        "token": batch.cu_seqlens[batch.row_offsets].numpy(),
        "step": np.searchsorted(batch.steps.trajectory.numpy(), np.arange(len(trajectories) + 1)),
    }

    def cut(level: str, values: torch.Tensor) -> bytes:
        first = bounds[level].tolist()
        parts: list[Array] = [
            values.numpy()[first[n] : first[n + 1]] for n in range(len(trajectories)) if published[n]
        ]
        return b"".join(part.tobytes() for part in parts)

    cuts = {
        "rewards": cut("trajectory", result.rewards),
        "step_rewards": cut("step", result.step_rewards),
        **{name: cut("token", values) for name, values in result.columns.items()},
    }
    for name, values in (("advantages", result.advantages), ("returns", result.returns)):
        if values is not None:
            cuts[name] = cut(result.level, values)
    return cuts


def as_bytes(computed: ComputedItem) -> dict[str, bytes]:
    return computed.results | {name: bytes(column) for name, column in computed.outputs.items()}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("seed", some_of(range(4), 2))
def test_the_bits_of_single_trajectories(name: str, seed: int) -> None:
    config = CHAINS[name]
    for dead in ([], [1, 2]):
        for shard in (0, 1):
            stored = StoredGroups(seed, 6)
            computed = compute(prepared_item(stored, config, shard, dead), CPU)
            assert as_bytes(computed) == one_by_one(stored, config, shard, dead)
            header = json.loads(computed.header)
            assert header["columns"] == sorted(computed.outputs)
            living = [n for n in range(6) if n % 2 == shard and n not in dead]
            assert [counts[0] for counts in header["groups"]] == [f"g{n:03}" for n in living]
            trajectories = [stored.trajectories[n] for n in living]
            assert [counts[1] for counts in header["groups"]] == [len(group) for group in trajectories]
            assert [counts[4] for counts in header["groups"]] == [
                sum(len(row) for trajectory in group for row in trajectory.rows) for group in trajectories
            ]


def test_a_batch_without_living_groups_has_no_results() -> None:
    stored = StoredGroups(0, 2)
    computed = compute(prepared_item(stored, CHAINS["rows"], 0, [0, 1]), CPU)
    assert (computed.results, computed.outputs) == ({}, {})


def test_a_shard_without_living_groups_has_no_outputs() -> None:
    stored = StoredGroups(0, 6)
    computed = compute(prepared_item(stored, CHAINS["tokens"], 0, [0, 2, 4]), CPU)
    assert computed.outputs == {}
    assert json.loads(computed.header)["columns"] == []


def test_of_many_tokens_the_metrics_get_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamadv.advantage.compute.SAMPLED_TOKENS", 8)
    for shard in (0, 1):
        computed = compute(prepared_item(StoredGroups(0, 6), CHAINS["tokens"], shard, []), CPU)
        assert computed.advantages is not None
        values, weight = computed.advantages
        published = np.frombuffer(computed.outputs["advantages"], np.float32)
        assert weight > 1
        assert 0 < len(values) < len(published)
        assert np.isin(values, published).all()


def test_a_column_that_is_not_per_token_is_named() -> None:
    stored = StoredGroups(0, 2)
    prepared = prepared_item(stored, CHAINS["tokens"], 0, [])
    for columns in prepared.columns.values():
        columns["response_mask"] = columns["response_mask"][:, None]
    with pytest.raises(TrajectoryError, match="column response_mask is needed, and has not one number"):
        compute(prepared, CPU)


def test_an_estimator_that_writes_into_columns_spoils_no_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A work item that fails is computed again group by group, from what was fetched."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    @estimator("writing", scope="group", needs=["response_mask"])
    def write(batch: PackedBatch) -> Estimate:
        batch.column("response_mask").zero_()
        raise ValueError("no number for these")

    stored = StoredGroups(0, 3)
    prepared = prepared_item(stored, {"estimator": "writing"}, 0, [])
    before = {key: columns["response_mask"].copy() for key, columns in prepared.columns.items()}
    with pytest.raises(EstimatorError, match="no number for these"):
        compute(prepared, CPU)
    for key, columns in prepared.columns.items():
        assert columns["response_mask"].tolist() == before[key].tolist()
