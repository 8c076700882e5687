"""Made-up batches in the two layouts that are compared: packed for streamadv, padded for the peers.

Rows are ragged, episodes have several turns, groups of 8 are interleaved in the padded layout. Everything
follows from the seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from streamadv.algorithms.packed import PackedBatch
from streamadv.algorithms.packing import pack_trajectories
from streamadv.errors import SettingError
from streamadv.trajectory.columns import Array
from streamadv.trajectory.schema import Row, Step, Trajectory

from .lines import GROUP_SIZE, TURNS

STATES: Final = 5  # distinct observations a prompt group meets in a turn

FLOAT_COLUMNS: Final = ("values", "old_log_probs", "rollout_log_probs", "ref_log_probs")


@dataclass(frozen=True, slots=True)
class StepRows:
    """The turns of the batch as a peer sees them: one row each, all first turns before all second ones."""

    trajectory: Array  # [S] object: str labels
    group: Array
    state: Array
    number: Array  # [S] int64: which turn
    scores: Tensor  # [S] float32
    episode_scores: Tensor  # [S] float32


@dataclass(frozen=True, slots=True)
class Workload:
    """The same batch twice. B rows of up to T tokens, N tokens in all, S turns."""

    batch: PackedBatch
    padded: Mapping[str, Tensor]  # each [B, T], 0 in the padding; response_mask float32
    rewards: Tensor  # [B] float32
    groups: Array  # [B] object: str label of each padded row's group
    steps: StepRows
    row_order: Tensor  # [B] int64: the padded row of each packed row
    step_order: Tensor  # [S] int64: the packed step of each of `steps`


def make_workload(
    sequences: int,
    tokens: int,
    *,
    turns: int = TURNS,
    seed: int = 0,
    device: str = "cpu",
    padded: bool = True,
) -> Workload:
    """`sequences` rows (a multiple of 8) of tokens / 8 to `tokens` tokens, the longest with all of them.

    turns 1: every token is trainable. Otherwise an eighth of each row is prompt, and the last quarter of
    each turn is observation, also at the end of the row. padded False: the packed layout alone. Raises
    SettingError for sizes that cannot be cut so.
    """
    if sequences < GROUP_SIZE or sequences % GROUP_SIZE:
        raise SettingError(f"--sequences is {sequences}, needs a multiple of {GROUP_SIZE}")
    if tokens < 8 * TURNS:
        raise SettingError(f"--tokens is {tokens}, needs {8 * TURNS} at least")
    rng = np.random.default_rng(seed)
    groups = sequences // GROUP_SIZE
    lengths = rng.integers(max(tokens // 8, 4 * TURNS), tokens + 1, sequences)
    lengths[0] = tokens
    rewards = rng.normal(size=sequences).astype(np.float32)
    order = np.arange(sequences).reshape(GROUP_SIZE, groups).T.reshape(-1)

    trajectories, columns = [], []
    for row in order:
        length, group = int(lengths[row]), int(row) % groups
        mask, bounds = _mask(length, turns)
        scores = rng.normal(size=turns).astype(np.float32)
        states = rng.integers(0, STATES, turns)
        credited = np.zeros(length, np.float32)
        credited[np.flatnonzero(mask)[-1]] = rewards[row]
        drawn = rng.standard_normal((len(FLOAT_COLUMNS), length), dtype=np.float32)
        drawn[1:] = 0.1 * drawn[1:] - 1  # log-probabilities of policies close to each other
        columns.append(
            {
                "response_mask": mask,
                "token_level_rewards": credited,
                **dict(zip(FLOAT_COLUMNS, drawn, strict=True)),
            }
        )
        trajectories.append(
            Trajectory(
                group_id=f"{group:06d}",
                group_size=GROUP_SIZE,
                rollout_index=int(row) // groups,
                reward=float(rewards[row]),
                rows=[Row(input_ids=np.zeros(length, np.int32), **columns[-1])],
                steps=[
                    Step(start=start, end=end, reward=score, state_key=f"{group}/{k}/{states[k]}")
                    for k, ((start, end), score) in enumerate(
                        zip(itertools.pairwise(bounds.tolist()), scores.tolist(), strict=True)
                    )
                ],
            )
        )
    labels = np.array([f"prompt-{row % groups}" for row in range(sequences)], dtype=object)
    steps, step_order = _step_rows(trajectories, order, labels, turns)
    return Workload(
        batch=pack_trajectories(trajectories, columns[0], device),
        padded=_padded(columns, order, tokens, device) if padded else {},
        rewards=torch.from_numpy(rewards).to(device),
        groups=labels,
        steps=steps,
        row_order=torch.from_numpy(order).to(device),
        step_order=torch.from_numpy(step_order).to(device),
    )


def _mask(length: int, turns: int) -> tuple[Array, Array]:
    """([length] uint8 response_mask, [turns + 1] where turns begin and the last one ends)."""
    first = 0 if turns == 1 else length // 8
    bounds = np.linspace(first, length, turns + 1).astype(np.int64)
    mask = np.zeros(length, np.uint8)
    for start, end in itertools.pairwise(bounds):
        mask[start : end if turns == 1 else start + max(3 * (end - start) // 4, 1)] = 1
    return mask, bounds


def _padded(
    columns: Sequence[Mapping[str, Array]], order: Array, tokens: int, device: str
) -> dict[str, Tensor]:
    padded = {}
    for name in columns[0]:
        rows = np.zeros((len(columns), tokens), np.float32)
        for row, column in zip(order, columns, strict=True):
            rows[row, : len(column[name])] = column[name]
        padded[name] = torch.from_numpy(rows).to(device)
    return padded


def _step_rows(
    trajectories: Sequence[Trajectory], order: Array, labels: Array, turns: int
) -> tuple[StepRows, Array]:
    count = len(trajectories)
    number, member = np.divmod(np.arange(turns * count), count)
    picked = [trajectories[m].steps[k] for m, k in zip(member, number, strict=True)]
    steps = StepRows(
        trajectory=np.array([f"trajectory-{order[m]}" for m in member], dtype=object),
        group=labels[order[member]],
        state=np.array([step.state_key for step in picked], dtype=object),
        number=number,
        scores=torch.tensor([step.reward for step in picked]),
        episode_scores=torch.tensor([trajectories[m].reward for m in member]),
    )
    return steps, member * turns + number
