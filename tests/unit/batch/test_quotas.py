"""Quotas: batches whose shares by data source follow weights, within what is complete, and no source waits for ever."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.batch.selection import choose, share_out
from streamadv.errors import SettingError
from streamadv.grouping.groups_log import GroupSums, LoggedGroup
from streamadv.trainer.queue import TrainerQueue
from tests.shares import examples

from .test_batches import rules


def group(number: int, source: str | None) -> LoggedGroup:
    entry = f"{number}-0"
    return LoggedGroup(
        0, entry, f"g{number}", 1, source, "complete", 0, 1, 0, (), 1, sums=GroupSums(1, 0, 0, 1)
    )


def groups(sources: str) -> list[LoggedGroup]:
    return [group(number, source) for number, source in enumerate(sources)]


def sources_of(chosen: list[LoggedGroup]) -> str:
    return "".join(str(each.data_source) for each in chosen)


def test_a_batch_follows_the_weights() -> None:
    fit, unfit = choose(groups("aaaaaaabbb"), 0, 4, *rules(quotas={"a": 1, "b": 1}))
    assert sources_of(fit) == "aabb"
    assert not unfit


def test_without_quotas_the_oldest_are_taken() -> None:
    assert sources_of(choose(groups("aaaaaaabbb"), 0, 4, *rules())[0]) == "aaaa"


def test_what_a_source_lacks_others_fill() -> None:
    assert sources_of(share_out(groups("aaaaab"), 4, {"a": 1, "b": 3})) == "aaab"
    assert sources_of(share_out(groups("aaaa"), 4, {"a": 1, "b": 3})) == "aaaa"


def test_a_source_without_a_weight_has_the_smallest() -> None:
    assert Counter(sources_of(share_out(groups("aaaaaaaabbbbcccc"), 8, {"a": 2, "b": 1}))) == {
        "a": 4,
        "b": 2,
        "c": 2,
    }


def test_unfit_groups_are_dropped() -> None:
    unfit = choose(groups("aab"), 5, 2, *rules(2, quotas={"a": 1, "b": 1}))
    assert [reason for _, reason in unfit[1]] == ["stale"] * 3


@settings(max_examples=examples(200), deadline=None)
@given(
    st.text("abcd", min_size=1, max_size=60),
    st.integers(1, 9),
    st.fixed_dictionaries({name: st.floats(0.01, 100.0) for name in "abc"}),
)
def test_no_group_waits_longer_than_the_bound(sources: str, limit: int, quotas: dict[str, float]) -> None:
    """The oldest is in every batch, and the n-th of a source whose share is p groups in one of ceil(n / p)."""
    waiting = groups(sources)
    weights = {name: quotas.get(name, min(quotas.values())) for name in set(sources)}
    parts = {name: int(limit * weight / sum(weights.values())) for name, weight in weights.items()}
    ranks = {
        each.group_id: (number, sum(one.data_source == each.data_source for one in waiting[:number]) + 1)
        for number, each in enumerate(waiting)
    }
    batch = 0
    while waiting:
        batch += 1
        chosen = share_out(waiting, limit, quotas)
        assert len(chosen) == min(limit, len(waiting))
        assert chosen[0] is waiting[0]
        for each in chosen:
            older, nth = ranks[each.group_id]
            part = parts[str(each.data_source)]
            assert batch <= min(older + 1, math.ceil(nth / part) if part else older + 1)
        waiting = [each for each in waiting if each not in chosen]


@pytest.mark.parametrize("quotas", [{}, {"a": 0}, {"a": "1"}, {1: 1.0}, 3, {"a": math.inf}])
def test_wrong_quotas_are_refused(quotas: Any) -> None:
    with pytest.raises(SettingError, match="quotas"):
        TrainerQueue("redis://localhost:1", "run", quotas=quotas)
