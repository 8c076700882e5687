"""Memory of columns, reused for the next batch once nothing refers to it."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..algorithms.packing import empty_column
from ..trajectory.columns import Array


class _Memory:
    """Some memory, and the column made of it last: torch holds that array with every tensor that uses the memory."""

    __slots__ = ("bytes", "column")

    def __init__(self, size: int) -> None:
        self.bytes: Array = torch.empty(size, dtype=torch.uint8).numpy()
        self.column: Callable[[], Array | None] = lambda: None

    def __len__(self) -> int:
        return len(self.bytes)

    def as_column(self, length: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Tensor:
        size = length * math.prod(shape) * dtype.itemsize
        array = self.bytes[:size].view(dtype).reshape(length, *shape)
        self.column = weakref.ref(array)
        return torch.from_numpy(array)


class ColumnMemory:
    """Columns of one queue's batches on the host.

    The system gives a process memory page by page, at its first touch: that takes longer than receiving the content.
    """

    def __init__(self, device: torch.device) -> None:
        """device: that the columns are made for."""
        self._device = device
        self._lock = threading.Lock()
        self._memories: list[_Memory] = []

    def column(self, length: int, dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> Tensor:
        """As `empty_column`. What is for a CUDA device is pinned; torch uses pinned memory again by itself."""
        if self._device.type == "cuda":
            return empty_column(length, dtype, self._device, shape)
        size = length * math.prod(shape) * dtype.itemsize
        with self._lock:
            return self._unused(size).as_column(length, dtype, shape)

    def copy_of(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """`values` [N] as `dtype`, where they lie."""
        if values.device.type != "cpu":
            return values.to(dtype, copy=True)
        return self.column(len(values), torch.empty(0, dtype=dtype).numpy().dtype).copy_(values)

    def _unused(self, size: int) -> _Memory:
        """Memory of at least so many bytes that nobody refers to."""
        unused = [memory for memory in self._memories if memory.column() is None]
        fits = [memory for memory in unused if size <= len(memory) <= 2 * size]
        if fits:
            return min(fits, key=len)
        new = _Memory(size + size // 4)
        self._memories = [memory for memory in self._memories if memory not in unused] + [new]
        return new
