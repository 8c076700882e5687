"""Ones are counted per segment, whatever its length."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.trajectory.columns import count_ones
from streamadv.trajectory.members import offsets
from tests.shares import examples


@settings(max_examples=examples(60), deadline=None)
@given(lengths=st.lists(st.integers(1, 1200), max_size=8), chance=st.sampled_from([0.0, 0.5, 1.0]))
def test_ones_of_every_segment(lengths: list[int], chance: float) -> None:
    bounds = offsets(np.array(lengths, np.int64))
    mask = (np.random.default_rng(0).random(int(bounds[-1])) < chance).astype(np.uint8)
    want = [int(mask[start:stop].sum()) for start, stop in pairwise(bounds)]
    assert count_ones(mask, bounds).tolist() == want
