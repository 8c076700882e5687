"""The order of prompts is a permutation in each epoch, another one in each, and the same in every process."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.prompts.spec import PromptSet, index_at, place_of


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(-5, 2**70), st.integers(0, 50))
def test_each_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    order = [index_at(length, seed, epoch, place) for place in range(length)]
    assert sorted(order) == list(range(length))
    assert [place_of(length, seed, epoch, index) for index in order] == list(range(length))


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(index_at(1000, seed, epoch, place) for place in range(1000))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16
    assert index_at(100, None, 3, 17) == 17


def test_no_place_is_preferred() -> None:
    """Where a prompt comes is even over epochs: no tenth of the epoch has much more than a tenth of its visits."""
    tenths = Counter(place_of(1000, 0, epoch, 7) // 100 for epoch in range(2000))
    assert all(140 < tenths[tenth] < 260 for tenth in range(10))


def test_a_group_id_names_the_prompt() -> None:
    prompts = PromptSet("train", {"code": 7, "math": 30}, 3, 5, {"code": 1, "math": 2}, 1, "")
    for source, length in (1, 7), (2, 30):
        for position in range(3 * length):
            tried = prompts.parse(prompts.group_id(f"{source} {position}", 2))
            assert tried is not None
            assert (tried.item, tried.number, tried.epoch) == (f"{source} {position}", 2, position // length)
    assert prompts.parse("prompt:train:math:0:30:0") is None
    assert prompts.parse("prompt:train:math:3:0:0") is None
    assert prompts.parse("prompt:eval:math:0:0:0") is None
