"""Compiles the loops, by numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...extras import load

njit = load("numba").njit


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` at its first call, to run without the GIL, and cache the result on disk."""
    compiled: Callable[..., Any]
    try:
        compiled = njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # no writable directory for the cache: every process compiles
        compiled = njit(function, nogil=True, error_model="numpy")
    return compiled
