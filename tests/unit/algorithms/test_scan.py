"""Reverse scans against a loop, and their independence of everything outside the row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.algorithms.scan import blocks, next_in_row, reverse_scan

from .reference import discounts, scan_loop

lengths = st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 128, 200]), min_size=1, max_size=6)


def offsets(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(sizes).tolist()])


@settings(max_examples=40, deadline=None)
@given(sizes=lengths, gamma=discounts, per_token=st.booleans(), seed=st.integers(0, 100))
def test_matches_a_loop(sizes: list[int], gamma: float, per_token: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    values = rng.normal(size=total).astype(np.float32)
    discount = rng.choice([0.0, gamma, 1.0], total) if per_token else np.full(total, gamma)
    bounds = offsets(sizes)
    rows = list(zip(bounds.tolist(), bounds.tolist()[1:], strict=False))
    coefficients = torch.from_numpy(discount) if per_token else gamma
    got = reverse_scan(torch.from_numpy(values), coefficients, blocks(bounds, total))
    np.testing.assert_allclose(got.numpy(), scan_loop(values, discount, rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gamma", [0.0, 1e-6, 0.9, 0.999, 1.0])
def test_long_row_stays_finite_and_exact(gamma: float) -> None:
    total = 128 * 1024
    values = np.random.default_rng(1).normal(size=total).astype(np.float32)
    got = reverse_scan(torch.from_numpy(values), gamma, blocks(offsets([total]), total)).numpy()
    want = scan_loop(values, np.full(total, gamma), [(0, total)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(before=lengths, own=st.integers(1, 300), seed=st.integers(0, 100))
def test_a_row_does_not_feel_its_neighbours(before: list[int], own: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    row = torch.from_numpy(rng.normal(size=own).astype(np.float32))
    discount = torch.from_numpy(rng.random(own))
    alone = reverse_scan(row, discount, blocks(offsets([own]), own))
    ahead = torch.from_numpy(rng.normal(size=sum(before)).astype(np.float32))
    sizes = [*before, own, 70]
    values = torch.cat([ahead, row, torch.full((70,), 1e30)])
    discounts_all = torch.cat([torch.ones(len(ahead)).double(), discount, torch.ones(70).double()])
    together = reverse_scan(values, discounts_all, blocks(offsets(sizes), sum(sizes)))
    assert torch.equal(together[len(ahead) : len(ahead) + own], alone)


def test_next_in_row_stops_at_row_ends() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert next_in_row(values, torch.tensor([0, 0, 1, 4, 4])).tolist() == [0.0, 3.0, 4.0, 0.0]
