"""Segment statistics against numpy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.algorithms.segments import moments, segment_sum, tokens_where, whiten, whiten_weighted
from tests.shares import examples

groups = st.lists(
    st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), max_size=6), min_size=1, max_size=5
)


@settings(max_examples=examples(60), deadline=None)
@given(groups=groups)
def test_moments_match_numpy(groups: list[list[tuple[float, bool]]]) -> None:
    flat = [item for group in groups for item in group]
    offsets = torch.tensor([0, *np.cumsum([len(group) for group in groups]).tolist()])
    values = torch.tensor([value for value, _ in flat], dtype=torch.float64)
    weight = torch.tensor([float(counts) for _, counts in flat])
    stats = moments(values, offsets, weight)
    for group, start, end in zip(groups, offsets[:-1], offsets[1:], strict=True):
        counted = [value for value, counts in group if counts]
        size, mean, std, centred = (statistic[start:end] for statistic in stats)
        assert size.tolist() == [len(counted)] * len(group)
        want = np.mean(counted) if counted else 0.0
        np.testing.assert_allclose(mean, np.full(len(group), want), atol=1e-10)
        want = np.std(counted, ddof=1) if len(counted) > 1 else 0.0
        np.testing.assert_allclose(std, np.full(len(group), want), atol=1e-10)
        np.testing.assert_allclose(centred + mean, values[start:end], atol=1e-10)
    np.testing.assert_allclose(
        segment_sum(values, offsets), [sum(value for value, _ in group) for group in groups], atol=1e-10
    )


def test_weights_count_an_element_several_times() -> None:
    stats = moments(torch.tensor([1.0, 4.0]), torch.tensor([0, 2]), torch.tensor([3, 1]))
    assert stats.mean.tolist() == [np.mean([1, 1, 1, 4])] * 2
    assert stats.std.tolist() == [np.std([1, 1, 1, 4], ddof=1)] * 2


def test_equal_values_leave_no_rounding_noise() -> None:
    stats = moments(torch.full((7,), 0.1, dtype=torch.float64), torch.tensor([0, 7]))
    assert stats.std.tolist() == [0.0] * 7
    assert stats.centred.tolist() == [0.0] * 7


def test_values_outside_the_statistics_may_be_anything() -> None:
    values = torch.tensor([1.0, torch.nan, 3.0])
    stats = moments(values, torch.tensor([0, 3]), torch.tensor([1, 0, 1]))
    assert stats.mean.tolist() == [2.0] * 3
    tokens = tokens_where(torch.tensor([1, 0, 1]), torch.tensor([0, 3]))
    np.testing.assert_allclose(whiten(values, tokens), [-(0.5**0.5), 0, 0.5**0.5], rtol=1e-6)


def test_whitening_needs_two_values_and_keeps_equal_ones_at_zero() -> None:
    one = tokens_where(torch.tensor([1, 0, 0]), torch.tensor([0, 2, 3]))
    assert whiten(torch.tensor([5.0, 9.0, 9.0]), one, everywhere=True).tolist() == [5, 9, 9]
    assert whiten_weighted(torch.tensor([5.0, 9.0]), torch.tensor([1, 0])).tolist() == [5, 9]
    everything = tokens_where(torch.ones(3), torch.tensor([0, 2, 3]))
    assert whiten(torch.full((3,), 0.1), everything).tolist() == [0, 0, 0]
