"""Extra columns of a push, in the form that the run has for each name: dtype, shape, per token or not.

The first push of a name fixes its form. A plain list tells neither its dtype nor whether it is per token, so both are
taken from the run where the numbers allow it. Columns of a group, which all of its members share, are checked, and
stored once under a payload key of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np

from .. import doors
from ..errors import TrajectoryError
from ..messages import brief, first_problem
from ..store.exchange import Payloads
from ..store.keys import ShardKeys
from ..store.scripts import ScriptCall, script_call
from ..trajectory.columns import cast_array
from ..trajectory.members import Checked, CheckedRow
from ..trajectory.packet_encoding import NBYTES, field_of
from ..trajectory.schema import TOKEN_COLUMNS, Column, Row

# Columns of a group


class GroupColumns(NamedTuple):
    """What is stored of a group's columns."""

    fields: tuple[tuple[str, Any], ...]  # name -> array
    size: int  # bytes of all arrays

    @classmethod
    def of(cls, row: CheckedRow, limit: int) -> Self:
        """Those that `read_columns` has read. Raises TrajectoryError for more than `limit` bytes."""
        arrays = {name: column.data for name, column in row.extras.items()}
        size = sum(map(NBYTES, arrays.values()))
        if size > limit:
            raise TrajectoryError(
                f"group: columns have {size} bytes, max_trajectory_bytes is {limit}: drop some or raise it for the run"
            )
        return cls(tuple([(name, field_of([array])) for name, array in arrays.items()]), size)


class ColumnsPush(NamedTuple):
    """Columns to be registered for a group: each call of `transaction` makes another attempt."""

    keys: ShardKeys
    group: tuple[Any, ...]  # id, and what the scripts that may open it take
    columns: GroupColumns

    def transaction(self) -> tuple[Payloads, ScriptCall]:
        """The payload and the call that registers it. Never to be sent twice."""
        key, (fields, size) = self.keys.payload(doors.random_bytes(12).hex()), self.columns
        args = [*self.group, size, ",".join(name for name, _ in fields)]
        call = script_call("columns", self.keys, args, group=self.group[0], columns=key)
        return [(key, dict(fields))], call


def read_columns(columns: Any) -> CheckedRow:
    """A group's columns as extra columns of a row. Raises TrajectoryError."""
    if not isinstance(columns, Mapping):
        raise TrajectoryError(f"group: columns is {brief(columns)}, needs a mapping of names to arrays")
    given = {name: _not_per_token(value) for name, value in columns.items() if value is not None}
    for name in given.keys() & TOKEN_COLUMNS:
        raise TrajectoryError(
            f"group: columns: {brief(name)} has a value for each token: push it with each rollout"
        )
    try:
        row = Row.model_validate({"input_ids": [0], "response_mask": [0], **given})
    except ValueError as error:
        raise TrajectoryError(f"group: columns: {first_problem(error)}") from None
    for name in given:  # another field of a row would have been refused
        column = row.extras[name]
        if column.per_token or not column.data.nbytes:
            problem = "is stated to be per token" if column.per_token else "is empty"
            raise TrajectoryError(f"group: columns: {brief(name)} {problem}: leave it out")
    return CheckedRow.of(row)


def _not_per_token(value: Any) -> Any:
    if isinstance(value, Column):
        return value
    stated = value if isinstance(value, Mapping) and "data" in value else {"data": value}
    return {"per_token": False, **stated}


# Columns of a push

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
    where = f"group {trajectory.group_id}, rollout {trajectory.rollout_index}: extra column"
    rows = []
    for row in trajectory.rows:
        extras = {}
        for name, column in row.extras.items():
            if name not in kinds:
                raise TrajectoryError(
                    f"{where} {name} is nothing that can be read in run {run}: use another name"
                )
            kind = json.loads(kinds[name])
            fitting = _fitting(column, kind)
            if _kind(fitting) != kind:
                raise TrajectoryError(
                    f"{where} {name} has {_in_words(_kind(column))}, run {run} has {_in_words(kind)} since its first "
                    f"push: {_remedy(name, column, kind)}"
                )
            extras[name] = fitting
        rows.append(row._replace(extras=extras))
    return trajectory._replace(rows=rows)


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
