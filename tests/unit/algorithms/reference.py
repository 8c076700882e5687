"""Members, batches and plain float64 loops that the algorithm tests compare against."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import strategies as st

from streamadv.algorithms import PackedBatch
from streamadv.algorithms.packing import pack_members
from streamadv.trajectory.columns import Array
from streamadv.trajectory.members import BASELINE, HAS_REWARD, MEMBER, NO_STATE, ROW, STATUSES, STEP, Members
from streamadv.trajectory.schema import Status, Step


@dataclass(frozen=True)
class Member:
    group_id: str
    rollout_index: int
    reward: float | None
    row_lengths: Sequence[int]
    row_trainable: Sequence[int]
    steps: Sequence[Step] = ()
    is_baseline: bool = False


Pair = tuple[Member, dict[str, Array]]


def member(
    group_id: str,
    index: int,
    reward: float | None,
    masks: Sequence[Sequence[int]] = ((0, 1, 1),),
    steps: Sequence[Step] = (),
    is_baseline: bool = False,
    **columns: Sequence[float],
) -> Pair:
    """One trajectory with a row per mask, and its columns."""
    mask = np.concatenate([np.asarray(row, np.uint8) for row in masks])
    info = Member(
        group_id,
        index,
        reward,
        [len(row) for row in masks],
        [int(sum(row)) for row in masks],
        steps,
        is_baseline,
    )
    return info, {
        "response_mask": mask,
        **{name: np.asarray(value, np.float32) for name, value in columns.items()},
    }


def batch_of(pairs: Sequence[Pair]) -> PackedBatch:
    return pack([info for info, _ in pairs], [columns for _, columns in pairs])


def pack(
    members: Sequence[Any], columns: Sequence[Mapping[str, Array]] = (), device: str = "cpu"
) -> PackedBatch:
    """Members one by one, with the columns of each if there are any, as a batch."""
    names = list(columns[0]) if columns else []
    end_to_end = {name: np.concatenate([given[name] for given in columns]) for name in names}
    return pack_members(cast(Any, Laid(members)), end_to_end, device)


class Laid:
    """What `pack_members` reads of a layout, from members one by one."""

    def __init__(self, members: Sequence[Any]) -> None:
        ids = list(dict.fromkeys(member.group_id for member in members))
        sources = {member.group_id: getattr(member, "data_source", None) for member in members}
        self.groups = [SimpleNamespace(group_id=one, data_source=sources[one]) for one in ids]
        self.group = np.array([ids.index(member.group_id) for member in members], np.int64)
        self.members = arrays_of(members)


def arrays_of(members: Sequence[Any]) -> Members:
    table = np.zeros(len(members), MEMBER)
    for record, member in zip(table, members, strict=True):
        record["index"], record["rows"] = member.rollout_index, len(member.row_lengths)
        record["reward"], record["steps"] = member.reward or 0.0, len(member.steps)
        record["flags"] = HAS_REWARD * (member.reward is not None) | BASELINE * member.is_baseline
        record["status"] = STATUSES.index(getattr(member, "status", Status.COMPLETED))
    rows = [pair for member in members for pair in zip(member.row_lengths, member.row_trainable, strict=True)]
    states: dict[str, int] = {}
    steps = [
        (
            *(step.row, step.start, step.end),
            NO_STATE if step.state_key is None else states.setdefault(step.state_key, len(states)),
            step.reward,
        )
        for member in members
        for step in member.steps
    ]
    named = [getattr(member, "rewards", {}) for member in members]
    rewards = {
        name: np.array([given.get(name, np.nan) for given in named]) for given in named for name in given
    }
    return Members(table, np.array(rows, ROW), np.array(steps, STEP), tuple(states), rewards)


def random_pairs(seed: int, groups: int, most_members: int = 4, longest: int = 90) -> list[Pair]:
    """Ragged groups of trajectories with one to three rows, gapped masks, steps and float columns."""
    rng = np.random.default_rng(seed)
    pairs = []
    for group in range(groups):
        for index in range(rng.integers(1, most_members + 1)):
            lengths = rng.integers(2, longest, rng.integers(1, 4))
            masks = [rng.integers(0, 2, length) for length in lengths]
            steps = [
                Step(
                    row=row,
                    start=int(length) // 2 * half,
                    end=int(length) // 2 * (half + 1),
                    reward=float(rng.normal()),
                    state_key=None if rng.random() < 0.2 else str(rng.integers(0, 2)),
                )
                for row, length in enumerate(lengths)
                for half in (0, 1)
            ]
            reward = float(rng.choice([0.0, 1.0, 0.1, -100.0, 100.0, rng.normal()]))
            size = int(lengths.sum())
            names = (
                "values",
                "old_log_probs",
                "rollout_log_probs",
                "ref_log_probs",
                "teacher_log_probs",
                "token_level_rewards",
                "sum_pi_squared",
            )
            columns: dict[str, Any] = {name: rng.normal(size=size).astype(np.float32) for name in names}
            baseline = index > 0 and rng.random() < 0.1
            pairs.append(member(f"g{group:03d}", index, reward, masks, steps, baseline, **columns))
    return pairs


discounts = st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0])


def rows_of(batch: PackedBatch) -> list[tuple[int, int]]:
    bounds = batch.cu_seqlens.tolist()
    return list(itertools.pairwise(bounds))


def scan_loop(values: Sequence[float], discount: Sequence[float], rows: Sequence[tuple[int, int]]) -> Array:
    """x_t = v_t + c_t x_{t+1} within each row."""
    out = np.zeros(len(values))
    for start, end in rows:
        ahead = 0.0
        for t in range(end - 1, start - 1, -1):
            ahead = values[t] + discount[t] * ahead
            out[t] = ahead
    return out


def gae_loop(
    rewards: Array, values: Array, mask: Array, rows: Sequence[tuple[int, int]], gamma: float, lam: float
) -> Array:
    """GAE over the trainable tokens of each row, 0 elsewhere."""
    out = np.zeros(len(values))
    for start, end in rows:
        next_value = ahead = 0.0
        for t in range(end - 1, start - 1, -1):
            if mask[t]:
                ahead = rewards[t] + gamma * next_value - values[t] + gamma * lam * ahead
                next_value = values[t]
                out[t] = ahead
    return out


def normalise_loop(
    values: Array, groups: Sequence[Any], counted: Array, by_std: bool, epsilon: float
) -> Array:
    """(x - mean) / (std + epsilon) by group, 0 alone or among equals."""
    out = np.zeros(len(values))
    for i, group in enumerate(groups):
        peers = [v for v, g, c in zip(values, groups, counted, strict=True) if g == group and c]
        if len(set(peers)) < 2:
            out[i] = 0.0 if by_std or not peers else values[i] - peers[0]
            continue
        out[i] = values[i] - np.mean(peers)
        if by_std:
            out[i] /= np.std(peers, ddof=1) + epsilon
    return out
