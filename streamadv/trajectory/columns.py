"""Columns: the names and dtypes that the library interprets, and the checks of arrays.

A column belongs to a row and holds one value per token: position t describes token t itself (no shift by one). Only
an extra column may state otherwise. Arrays are numpy: torch appears only in rooms that compute.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import countOf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..messages import one_line

#: dtype of every column that the library interprets, in the order of writing.
KNOWN_COLUMNS: Final[dict[str, np.dtype[Any]]] = {
    "input_ids": np.dtype("<i4"),
    "response_mask": np.dtype("u1"),
    "rollout_log_probs": np.dtype("<f4"),
    "old_log_probs": np.dtype("<f4"),
    "ref_log_probs": np.dtype("<f4"),
    "teacher_log_probs": np.dtype("<f4"),
    "values": np.dtype("<f4"),
    "token_level_rewards": np.dtype("<f4"),
    "sum_pi_squared": np.dtype("<f4"),
    "versions": np.dtype("<i4"),
}

#: Columns that the pipeline computes. Producers do not push them.
OUTPUT_COLUMNS: Final[dict[str, np.dtype[Any]]] = {
    "advantages": np.dtype("<f4"),
    "returns": np.dtype("<f4"),
    "raw_advantages": np.dtype("<f4"),
    "rollout_is_weights": np.dtype("<f4"),
    "sample_weights": np.dtype("<f4"),
}

REQUIRED_COLUMNS: Final = ("input_ids", "response_mask")

#: dtypes of extra columns: little-endian numbers of fixed size. Without objects nothing is ever unpickled.
EXTRA_DTYPES: Final = frozenset(["|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8"])

MAX_COLUMNS: Final = 64
MAX_DIMENSIONS: Final = 6
#: The one field of a stored payload that is no column.
HEADER: Final = b"header"
COLUMN_NAME: Final = re.compile(r"(?!header\Z)[A-Za-z_][A-Za-z0-9_.]{0,63}")

#: Columns of log-probabilities.
LOG_PROBS: Final = frozenset(("rollout_log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs"))
#: A log-probability may exceed 0 by this much: the spacing of float32 at logits of 8192, from which it is subtracted.
#: log_softmax itself never exceeds 0.
LOG_PROB_ROUNDING: Final = 1e-3
LARGEST: Final = sys.float_info.max

#: Entries of a mask that are summed faster than cut into blocks.
_SHORT_MASK: Final = 1 << 16
#: Bytes of a column up to which argmin and argmax are quicker than a reduction. They copy what is read-only.
SHORT_COLUMN: Final = 128 << 10

#: The type of a list's values that struct writes in a dtype as numpy would, and its format.
_PACKED: Final[dict[np.dtype[Any], tuple[type, str]]] = {
    np.dtype("<i4"): (int, "i"),
    np.dtype("u1"): (int, "B"),
    np.dtype("<f4"): (float, "f"),
}
_RANGES: Final = {
    dtype: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    for dtype in map(np.dtype, EXTRA_DTYPES)
    if dtype.kind in "iu"
}

Array = NDArray[Any]


def known_array(name: str, value: Any) -> Array:
    """`value` (list, numpy array or tensor) as the array of a column the library interprets: [T], in its dtype.

    Raises ValueError if `value` is not one-dimensional, is empty, is not numeric, changes in the column's dtype, or
    holds NaN or infinity.
    """
    array = unchecked_array(name, value)
    check_values(name, array)
    return array


def unchecked_array(name: str, value: Any) -> Array:
    """`known_array`, whose values are still to be checked."""
    dtype = KNOWN_COLUMNS.get(name) or OUTPUT_COLUMNS[name]
    array = _of_list(value, dtype) if type(value) is list else None
    if array is None:
        array = _numeric(value)
    if array.ndim != 1:
        raise ValueError(f"has {array.ndim} dimensions, needs 1: one value per token")
    if array.size == 0:
        raise ValueError("is empty, needs at least one token")
    if array.dtype != dtype:
        if array.dtype.kind == "b" and name != "response_mask":
            raise ValueError("holds booleans, needs numbers")
        array = cast_array(array, dtype)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


class NoArrayError(ValueError):
    """A value is no array of numbers at all: a single one, text, or other objects."""


def extra_array(value: Any) -> Array:
    """`value` as the array of an extra column: a dtype of EXTRA_DTYPES, 1 to MAX_DIMENSIONS dimensions.

    Raises ValueError for anything else.
    """
    array = _numeric(value)
    if array.ndim == 0:  # most often a misspelt field
        raise NoArrayError(f"is the single value {array}, needs a list")
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    little_endian = array.dtype.newbyteorder("<")
    if little_endian.str not in EXTRA_DTYPES:
        raise ValueError(f"has dtype {array.dtype}, needs one of {', '.join(sorted(EXTRA_DTYPES))}")
    if array.ndim > MAX_DIMENSIONS:
        raise ValueError(f"has {array.ndim} dimensions, at most {MAX_DIMENSIONS} are allowed")
    return np.ascontiguousarray(array.astype(little_endian, copy=False))


def check_values(name: str, array: Array) -> None:
    """Raise ValueError for NaN, infinity, negative ids, a mask other than 0 and 1, positive log-probabilities."""
    if array.dtype.kind == "f" and array.size:
        most = LOG_PROB_ROUNDING if name in LOG_PROBS else LARGEST
        # With a NaN both are NaN, and no comparison holds.
        if not (_extreme(array, np.minimum) >= -LARGEST and _extreme(array, np.maximum) <= most):
            finite = np.isfinite(array)
            first = int(np.flatnonzero(~finite if not finite.all() else array > most)[0])
            needs = "at most 0: it is the logarithm of a probability" if finite.all() else "finite numbers"
            raise ValueError(f"is {array[first]} at token {first}, needs {needs}")
    elif name == "response_mask" and array.size and _extreme(array, np.maximum) > 1:
        first = int(np.flatnonzero(array > 1)[0])
        raise ValueError(f"is {array[first]} at token {first}, needs 0 or 1")
    elif name == "input_ids" and array.size and _extreme(array, np.minimum) < 0:
        first = int(np.flatnonzero(array < 0)[0])
        raise ValueError(f"is {array[first]} at token {first}, needs an id from 0 on: rows are not padded")


def versions_of(
    stated: int | tuple[int, int] | None, rows: Sequence[Mapping[str, Array]]
) -> tuple[int, int] | None:
    """The oldest and the newest policy version of a trajectory, at least 0; None if nobody knows.

    That is of the trainable tokens in its rows, where these have the column `versions`, else what is `stated`.
    """
    if rows and "versions" in rows[0]:  # then all rows have them
        trained = [row["versions"][row["response_mask"].view(np.bool_)] for row in rows]
        versions = trained[0] if len(rows) == 1 else np.concatenate(trained)
        if len(versions):
            return max(0, _extreme(versions, np.minimum)), max(0, _extreme(versions, np.maximum))
    return (stated, stated) if isinstance(stated, int) else stated


def _extreme(array: Array, reduce: np.ufunc) -> Any:
    """The least or the greatest value. reduce: np.minimum or np.maximum."""
    if array.nbytes > SHORT_COLUMN:
        return reduce.reduce(array, None).item()
    return array.item(array.argmin() if reduce is np.minimum else array.argmax())


def count_ones(mask: Array, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """[K]: ones of `mask` ([N] uint8, 0 or 1) in each of the K segments bounds[k] : bounds[k + 1]; none is empty.

    In a long mask, blocks are so small that a byte counts their ones: numpy sums bytes many times faster than it
    converts them.
    """
    if len(mask) <= _SHORT_MASK:
        return np.add.reduceat(mask, bounds[:-1], dtype=np.int32).astype(np.int64)
    block = 255
    blocks = -(-np.diff(bounds) // block)  # of each segment
    first = np.cumsum(blocks) - blocks
    starts = np.repeat(bounds[:-1] - block * first, blocks) + block * np.arange(int(blocks.sum()))
    if not len(starts):
        return np.zeros(0, np.int64)
    counts: NDArray[np.int64] = np.add.reduceat(
        np.add.reduceat(mask, starts, dtype=np.uint8), first, dtype=np.int64
    )
    return counts


def _of_list(value: list[Any], dtype: np.dtype[Any]) -> Array | None:
    """The list as an array of this dtype; None where a value is of another kind or does not fit."""
    kind, code = _PACKED[dtype]
    if not value or countOf(map(type, value), kind) != len(value):
        return None
    data = bytearray(len(value) * dtype.itemsize)
    with suppress(struct.error, OverflowError):
        struct.pack_into(f"<{len(value)}{code}", data, 0, *value)  # three times as quick as numpy
        return np.frombuffer(data, dtype)
    return None


def _numeric(value: Any) -> Array:
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        return value
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        try:
            value = value.detach().cpu()
            value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
        except TypeError:
            raise ValueError(
                f"has dtype {value.dtype}, which numpy has not: cast it, such as by .float()"
            ) from None
        except RuntimeError as error:
            raise _unreadable(error) from None
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError("has masked values, needs numbers: fill them")
    kinds = _check_nesting(value, MAX_DIMENSIONS) if isinstance(value, list | tuple) else set()
    try:
        array = np.asarray(value)
        if array.dtype.kind == "f" and kinds and all(issubclass(kind, int) for kind in kinds):
            array = np.asarray(value, np.uint64)  # numpy makes floats of integers on both sides of 2^63
    except ValueError as error:
        raise ValueError("is ragged, needs lists of equal length") from error
    except OverflowError as error:
        raise ValueError("holds whole numbers that share no 64-bit type") from error
    except Exception as error:  # what tensors in a list raise, or an object's own `__array__`
        raise _unreadable(error) from None
    if array.size == 0 and isinstance(value, list | tuple):
        array = array.astype(np.int64)
    if array.dtype.kind not in "biuf":
        raise NoArrayError(f"holds {array.dtype} values, needs numbers")
    return array


def _unreadable(error: Exception) -> ValueError:
    return ValueError(f"cannot be read ({one_line(str(error))}), needs numbers, an array or one tensor")


def _check_nesting(value: Sequence[Any], depth: int) -> set[type]:
    """The types of the values in a nested list.

    Runs before numpy allocates: among many short strings one long string would make numpy reserve the long size for
    all. Raises ValueError for text, and for a mix of values and lists.
    """
    if depth == 0:
        raise ValueError(f"has more than {MAX_DIMENSIONS} dimensions")
    kinds: set[type] = set(map(type, value))
    if kinds & {str, bytes, bytearray}:
        raise NoArrayError("holds text, needs numbers")
    if bool in kinds and len(kinds) > 1:
        raise ValueError("mixes booleans with other values, needs numbers")
    if kinds & {list, tuple}:
        if not kinds <= {list, tuple}:
            raise ValueError("is ragged, needs lists of equal length")
        return set().union(*(_check_nesting(item, depth - 1) for item in value))
    return kinds


def cast_array(array: Array, dtype: np.dtype[Any]) -> Array:
    """`array` as `dtype`; floats are rounded. Raises ValueError if a conversion to integers changes a value."""
    if dtype.kind in "iu":
        if array.dtype.kind == "f" and not np.array_equal(array, np.trunc(array)):
            raise ValueError("holds fractions, needs whole numbers")
        least, most = _RANGES[dtype]
        # Python compares its own numbers exactly, numpy in the array's dtype.
        if array.size and (_extreme(array, np.maximum) > most or _extreme(array, np.minimum) < least):
            raise ValueError(f"holds values outside {least}..{most}")
        return array.astype(dtype)
    with np.errstate(over="ignore"):  # overflow becomes inf and is reported as such
        return array.astype(dtype)
