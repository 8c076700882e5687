"""Compiled loops over tokens and segments on a CPU: plain, row after row, float64 inside.

All arrays are contiguous. `offsets` [R + 1] int64 is the range of a row or segment, `mask` [N] bool says which tokens
count. A row's result depends on its tokens alone. The compiler may not reorder arithmetic (no fastmath), so the bits
are the same on every machine. Kernels write into their last arguments, and round once, to the dtype of those.

`tokens` and `rewards` hold the loops, `compiler` compiles them. All loops are attributes of this package. numba is
imported with the first one that is asked for, as a chain is composed without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ...extras import torch

if TYPE_CHECKING:
    from torch import Tensor


def on_cpu(tensor: Tensor) -> bool:
    """Whether these loops can read `tensor`; on other devices torch computes."""
    return tensor.is_cpu


def as_array(tensor: Tensor) -> Any:
    """A CPU tensor as a contiguous array; half precision becomes float32. A view of `tensor` if possible."""
    if tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.to(torch.float32)
    return tensor.detach().contiguous().numpy()


def __getattr__(name: str) -> Any:
    """The loop called `name`; found once, then it is a name of this package."""
    if not name.startswith("_"):
        for home in ("tokens", "rewards"):
            loops = vars(importlib.import_module(f".{home}", __name__))
            if name in loops:
                globals()[name] = loops[name]
                return loops[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
