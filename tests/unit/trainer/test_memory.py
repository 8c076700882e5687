"""Columns get the memory of earlier batches, and never that of one somebody still has."""

from __future__ import annotations

import numpy as np
import torch

from streamadv.trainer.memory import ColumnMemory
from tests.support import CPU

FLOAT = np.dtype("<f4")


def test_memory_that_nobody_refers_to_is_used_again() -> None:
    memory = ColumnMemory(CPU)
    first, second = memory.column(1000, FLOAT), memory.column(1000, FLOAT)
    places = {first.data_ptr(), second.data_ptr()}
    del first, second
    kept = [memory.column(900, FLOAT), memory.column(1000, FLOAT)]
    assert {column.data_ptr() for column in kept} == places


def test_memory_of_a_column_in_use_is_left_alone() -> None:
    memory = ColumnMemory(CPU)
    column = memory.column(1000, FLOAT)
    view = column[10:20]
    buffer = column.numpy().data
    place = column.data_ptr()
    del column
    assert memory.column(1000, FLOAT).data_ptr() != place, "a part of the tensor is in use"
    del view
    assert memory.column(1000, FLOAT).data_ptr() != place, "its bytes are in use"
    del buffer
    assert memory.column(1000, FLOAT).data_ptr() == place


def test_columns_are_as_they_were_asked_for() -> None:
    column = ColumnMemory(CPU).column(5, np.dtype("<i8"), (2, 3))
    assert column.shape == (5, 2, 3)
    assert column.dtype == torch.int64
    assert ColumnMemory(CPU).column(0, FLOAT).shape == (0,)


def test_memory_does_not_pile_up() -> None:
    memory = ColumnMemory(CPU)
    for length in range(1000, 100_000, 3000):
        memory.column(length, FLOAT)
    assert sum(map(len, memory._memories)) <= 3 * 4 * 100_000
