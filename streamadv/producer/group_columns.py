"""Columns of a group, which all of its members share: checked, and stored once under a payload key of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from .. import doors
from ..errors import TrajectoryError
from ..messages import brief, first_problem
from ..store.keys import ShardKeys
from ..store.resp import Payloads
from ..store.scripts import ScriptCall, script_call
from ..trajectory.checked import CheckedRow
from ..trajectory.packet import NBYTES, field_of
from ..trajectory.schema import TOKEN_COLUMNS, Column, Row


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
