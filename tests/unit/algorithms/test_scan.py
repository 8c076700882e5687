"""Reverse scans against a loop, and their independence of everything outside the row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.algorithms.scan import ends_row, reverse_scan, scan_blocks
from streamadv.algorithms.segments import Trainable, tokens_where

from .reference import discounts, scan_loop

lengths = st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 128, 200]), min_size=1, max_size=6)


def rows_of_sizes(sizes: list[int]) -> Trainable:
    return tokens_where(torch.ones(sum(sizes)), torch.tensor([0, *np.cumsum(sizes).tolist()]))


@settings(max_examples=40, deadline=None)
@given(sizes=lengths, gamma=discounts, per_token=st.booleans(), seed=st.integers(0, 100))
def test_matches_a_loop(sizes: list[int], gamma: float, per_token: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    values = rng.normal(size=total)
    discount = rng.choice([0.0, gamma, 1.0], total) if per_token else np.full(total, gamma)
    tokens = rows_of_sizes(sizes)
    rows = list(itertools.pairwise(tokens.offsets.tolist()))
    coefficients = torch.from_numpy(discount) if per_token else gamma
    for scan in (reverse_scan, scan_blocks):
        got = scan(torch.from_numpy(values), coefficients, tokens)
        np.testing.assert_allclose(got.numpy(), scan_loop(values, discount, rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 1e-6, 0.9, 0.999, 1.0])
def test_long_row_stays_finite_and_exact(gamma: float) -> None:
    total = 128 * 1024
    values = np.random.default_rng(1).normal(size=total).astype(np.float32)
    want = scan_loop(values.astype(np.float64), np.full(total, gamma), [(0, total)])
    for scan in (reverse_scan, scan_blocks):
        got = scan(torch.from_numpy(values), gamma, rows_of_sizes([total])).numpy()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(before=lengths, own=st.integers(1, 300), seed=st.integers(0, 100))
def test_a_row_does_not_feel_its_neighbours(before: list[int], own: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    row = torch.from_numpy(rng.normal(size=own).astype(np.float32))
    discount = torch.from_numpy(rng.random(own))
    alone = reverse_scan(row, discount, rows_of_sizes([own]))
    ahead = torch.from_numpy(rng.normal(size=sum(before)).astype(np.float32))
    sizes = [*before, own, 70]
    values = torch.cat([ahead, row, torch.full((70,), 1e30)])
    discounts_all = torch.cat([torch.ones(len(ahead)).double(), discount, torch.ones(70).double()])
    together = reverse_scan(values, discounts_all, rows_of_sizes(sizes))
    assert torch.equal(together[len(ahead) : len(ahead) + own], alone)


def test_row_ends_are_found_beside_empty_rows() -> None:
    tokens = tokens_where(torch.ones(4), torch.tensor([0, 0, 1, 4, 4]))
    assert ends_row(tokens).tolist() == [True, False, False, True]


def test_a_broken_row_does_not_reach_its_neighbours_on_a_device() -> None:
    values = torch.tensor([1.0, 2.0, torch.nan, torch.inf] * 50)
    tokens = rows_of_sizes([2] * 100)
    found = scan_blocks(values, 0.5, tokens).view(-1, 2)
    assert found[::2].tolist() == [[2.0, 2.0]] * 50
