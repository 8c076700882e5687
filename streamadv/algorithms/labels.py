"""Labels as numbers from 0 in order of appearance, and elements in the order of their numbers; on the host."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable

import numpy as np

from ..trajectory.columns import Array
from ..trajectory.members import Positions


def numbered(labels: Collection[Hashable]) -> tuple[Positions, list[Hashable]]:
    """(the number of each label, [K]; the labels by number); equal labels share one. TypeError for an unhashable."""
    numbers = defaultdict[Hashable, int](itertools.count().__next__)
    return np.fromiter(map(numbers.__getitem__, labels), np.int64, len(labels)), list(numbers)


def numbered_array(labels: Array) -> Positions:
    """The number of each label of an array [K] of whole numbers."""
    _, first, label = np.unique(labels, return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[label]


def by_number(numbers: Positions) -> tuple[Positions, Positions]:
    """(order [K]: the elements number after number, those of one in their order; offsets [G + 1] of the numbers)."""
    return np.argsort(numbers, kind="stable"), np.append(0, np.cumsum(np.bincount(numbers)))
