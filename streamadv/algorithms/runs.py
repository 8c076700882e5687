"""Runs: maximal stretches of consecutive trainable tokens in a row, i.e. the turns of an agent."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .scan import blocks, reverse_scan
from .segments import segment_sum, spread
from .trainable import Trainable


class Runs(NamedTuple):
    """The runs of a batch, in order."""

    offsets: Tensor  # [Q + 1] int64: run q holds trainable tokens offsets[q] : offsets[q + 1]
    row_offsets: Tensor  # [R + 1] int64: row r holds runs row_offsets[r] : row_offsets[r + 1]


def find_runs(tokens: Trainable) -> Runs:
    """Where the runs are."""
    count = len(tokens.position)
    begins = torch.ones(count + 1, dtype=torch.bool, device=tokens.position.device)
    begins[1:count] = tokens.position[1:] != tokens.position[:-1] + 1
    begins[tokens.offsets] = True
    offsets = begins.nonzero().squeeze(1)
    return Runs(offsets, torch.searchsorted(offsets, tokens.offsets))


def run_mean(values: Tensor, tokens: Trainable) -> Tensor:
    """[K] float64: the mean over its run of each of `values` [K], one per trainable token."""
    offsets = find_runs(tokens).offsets
    mean = segment_sum(values, offsets) / (offsets[1:] - offsets[:-1])
    return spread(mean, offsets, len(values))


def run_returns(rewards: Tensor, tokens: Trainable, gamma: float) -> Tensor:
    """[K] float64: G = reward at the run's last token + gamma * G of the row's next run, on all its tokens.

    The return of ROLL's agentic_reinforce: time advances by one per turn. `rewards` [K]; those elsewhere do
    not count.
    """
    runs = find_runs(tokens)
    last = rewards[runs.offsets[1:] - 1]
    returns = reverse_scan(last, gamma, blocks(runs.row_offsets, len(last)))
    return spread(returns, runs.offsets, len(rewards))
