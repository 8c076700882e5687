"""Counters of other programs as versions of the run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamadv as sa
from streamadv.errors import ArgumentError


def test_counters_of_other_programs() -> None:
    verl_tags, trl_async, optimizer_steps = (
        sa.VersionCounter(),
        sa.VersionCounter(first=1),
        sa.VersionCounter(step=4),
    )
    assert verl_tags.span(3, 5) == (3, 5)
    assert [trl_async.version(count) for count in (0, 1, 2, 7)] == [0, 0, 1, 6]
    assert [optimizer_steps.version(count) for count in (0, 3, 4, 9)] == [0, 0, 1, 2]


@given(
    count=st.integers(0, 10**6),
    version=st.integers(0, 10**6),
    step=st.integers(1, 9),
    later=st.integers(0, 999),
)
def test_a_counter_goes_on_from_one_moment(count: int, version: int, step: int, later: int) -> None:
    counter = sa.VersionCounter.at(count, version, step)
    assert counter.version(count) == version
    assert counter.version(count + later * step) == version + later
    assert counter.version(counter.count(version + later)) == version + later


def test_a_counter_that_stands_still_is_refused() -> None:
    with pytest.raises(ArgumentError, match="step is 0, needs 1 or more"):
        sa.VersionCounter(step=0)
