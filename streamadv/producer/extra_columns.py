"""Extra columns of a push, in the form that the run has for each name: dtype, shape, per token or not.

The first push of a name fixes its form. A plain list tells neither its dtype nor whether it is per token, so both are
taken from the run where the numbers allow it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ..errors import TrajectoryError
from ..trajectory.checked import Checked, CheckedRow
from ..trajectory.columns import cast_array
from ..trajectory.schema import Column

#: What lists of Python's numbers become.
_OF_LISTS: Final = frozenset(("<i8", "<f8"))


def kinds_of(trajectories: Sequence[Checked]) -> dict[str, str]:
    """What a first push of these fixes for each extra column, as JSON of [dtype, shape of an entry, per token].

    Where they differ, that is what one of them states, else what one shows that has not an entry per token: another may
    have as many entries as tokens by chance.
    """
    columns: dict[str, list[Column]] = {}
    for trajectory in trajectories:
        for row in trajectory.rows:
            for name, column in row.extras.items():
                columns.setdefault(name, []).append(column)
    return {
        name: json.dumps(_kind(min(found, key=lambda column: (_is_guess(column), column.per_token))))
        for name, found in columns.items()
    }


def conform(trajectory: Checked, kinds: Mapping[str, str], run: str) -> Checked:
    """`trajectory` with its extra columns as the run has them. Raises TrajectoryError for one that cannot be so.

    kinds: of the manifest.
    """
    try:
        rows = [_conform_row(row, kinds, run) for row in trajectory.rows]
    except ValueError as error:
        where = f"group {trajectory.group_id}, rollout {trajectory.rollout_index}"
        raise TrajectoryError(f"{where}: {error}") from None
    return trajectory._replace(rows=rows)


def _conform_row(row: CheckedRow, kinds: Mapping[str, str], run: str) -> CheckedRow:
    extras = {}
    for name, column in row.extras.items():
        if name not in kinds:
            raise ValueError(
                f"extra column {name} is nothing that can be read in run {run}: use another name"
            )
        kind = json.loads(kinds[name])
        fitting = _fitting(column, kind)
        if _kind(fitting) != kind:
            raise ValueError(
                f"extra column {name} has {_in_words(_kind(column))}, run {run} has {_in_words(kind)} since its first "
                f"push: {_remedy(name, column, kind)}"
            )
        extras[name] = fitting
    return row._replace(extras=extras)


def _kind(column: Column) -> list[Any]:
    return [column.data.dtype.str, list(column.data.shape[1:]), column.per_token]


def _is_guess(column: Column) -> bool:
    """Whether nobody stated `per_token`, so that only the number of entries speaks for it."""
    return "per_token" not in column.model_fields_set


def _fitting(column: Column, kind: Sequence[Any]) -> Column:
    """The column with the dtype of `kind`, and not per token if `kind` is not, as far as it leaves that open."""
    data, per_token = column.data, column.per_token and (kind[2] or not _is_guess(column))
    dtype = np.dtype(kind[0])
    if data.dtype != dtype and data.dtype.str in _OF_LISTS:
        try:
            cast = cast_array(data, dtype)
        except ValueError:
            return column
        with np.errstate(invalid="ignore"):
            is_same = np.array_equal(cast.astype(data.dtype), data, equal_nan=data.dtype.kind == "f")
        data = cast if is_same else data
    if data is column.data and per_token == column.per_token:
        return column
    return Column.model_construct(data=data, per_token=per_token)


def _in_words(kind: Sequence[Any]) -> str:
    dtype, shape, per_token = kind
    numbers = f"{' x '.join(map(str, shape))} numbers" if shape else "one number"
    return (
        f"dtype {np.dtype(dtype).name}, {numbers} {'per token' if per_token else 'an entry, not per token'}"
    )


def _remedy(name: str, column: Column, kind: Sequence[Any]) -> str:
    if column.per_token == kind[2]:
        return "push that, or use another name"
    if column.per_token:
        return f'push {name}={{"data": ..., "per_token": False}}'
    return (
        "give one entry per token, or use another name, from its first push on as "
        '{"data": ..., "per_token": False}'
    )
