"""Memory of columns, used again for the next batch once nobody refers to it."""

from __future__ import annotations

import math
import threading
from sys import getrefcount
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..algorithms.packing import empty_column
from ..trajectory.columns import Array

#: References to an array in a list that a loop over the list looks at: of the list, of the loop, and of the call.
_UNUSED: Final = 3


class ColumnMemory:
    """Columns of one queue's batches on the host.

    The system gives a process memory page by page, at its first touch: that takes longer than receiving the content.
    """

    def __init__(self, device: torch.device) -> None:
        """device: that the columns are made for."""
        self._device = device
        self._lock = threading.Lock()
        self._arrays: list[Array] = []  # with every tensor that uses one, torch holds a reference to it

    def column(self, length: int, dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> Tensor:
        """As `empty_column`. What is for a CUDA device is pinned; torch uses pinned memory again by itself."""
        if self._device.type == "cuda":
            return empty_column(length, dtype, self._device, shape)
        size = length * math.prod(shape) * dtype.itemsize
        return torch.from_numpy(self._take(size).view(dtype).reshape(length, *shape))

    def copy_of(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """`values` [N] as `dtype`, where they lie."""
        if values.device.type != "cpu":
            return values.to(dtype, copy=True)
        return self.column(len(values), torch.empty(0, dtype=dtype).numpy().dtype).copy_(values)

    def _take(self, size: int) -> Array:
        with self._lock:
            fits = [
                array
                for array in self._arrays
                if size <= len(array) <= 2 * size and getrefcount(array) == _UNUSED
            ]
            if not fits:
                self._arrays = [array for array in self._arrays if getrefcount(array) > _UNUSED]
                self._arrays.append(torch.empty(size + size // 4, dtype=torch.uint8).numpy())
                return self._arrays[-1][:size]
            return min(fits, key=len)[:size]
