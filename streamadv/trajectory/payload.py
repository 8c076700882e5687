"""The payload: a trajectory's data as one Redis hash.

The field `header` holds JSON: everything except arrays. Every other field is a column: the raw little-endian bytes of
all rows end to end. The producer encodes; advantage workers, scorers and the trainer decode, without a copy: arrays
are views of the received bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from pydantic_core import to_json

from ..errors import TrajectoryError, WireError
from ..messages import brief, first_problem, one_line
from .columns import (
    COLUMN_NAME,
    EXTRA_DTYPES,
    HEADER,
    KNOWN_COLUMNS,
    MAX_COLUMNS,
    MAX_DIMENSIONS,
    REQUIRED_COLUMNS,
    Array,
    check_values,
)
from .fields import GroupId, Metadata, ShortText
from .reference import MAX_ROW_TOKENS, Count, Length, Reference, StepSpan, scalars
from .schema import MAX_ROWS, MAX_STEPS, Column, Role, Row, Status, Step, Trajectory

SCHEMA_VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20


def _stored_column(name: str) -> str:
    """Refuses the names of a row's fields and of outputs: such a column would overwrite them when it is read."""
    if name in KNOWN_COLUMNS or (COLUMN_NAME.fullmatch(name) and name not in Row.model_fields):
        return name
    raise ValueError(f"{brief(name)} is no name of a stored column")


StoredColumn = Annotated[str, AfterValidator(_stored_column)]


class ColumnSpec(BaseModel):
    """How to read one column's bytes: dtype, shape after the first dimension, entries per row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: str
    shape: tuple[Annotated[int, Field(ge=0, le=1 << 24)], ...] = Field(
        default=(), max_length=MAX_DIMENSIONS - 1
    )
    lengths: list[Length] | None = Field(default=None, max_length=MAX_ROWS)  # None = one entry per token


_KNOWN_SPECS: Final = {name: ColumnSpec(dtype=dtype.str) for name, dtype in KNOWN_COLUMNS.items()}
_KNOWN_HEADERS: Final = {name: {"dtype": dtype.str} for name, dtype in KNOWN_COLUMNS.items()}


class RowHeader(BaseModel):
    """One row of a payload: its length in tokens, and the fields of `schema.Row` that are no columns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    length: Annotated[int, Field(ge=1, le=MAX_ROW_TOKENS)]
    agent: ShortText | None = None
    reward: FiniteFloat | None = None


class Header(BaseModel):
    """A trajectory without its arrays. Within a schema version releases only add fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: Literal[1] = SCHEMA_VERSION
    group_id: GroupId
    group_size: Count
    rollout_index: Count
    status: Status
    reward: FiniteFloat | None = None
    rewards: dict[ShortText, FiniteFloat] = Field(default_factory=dict)
    model_version: Count | tuple[Count, Count] | None = None
    data_source: ShortText | None = None
    role: Role = Role.TRAIN
    metadata: Metadata = Field(default_factory=dict)
    steps: tuple[StepSpan, ...] = Field(default=(), max_length=MAX_STEPS)
    rows: list[RowHeader] = Field(default_factory=list, max_length=MAX_ROWS)
    columns: dict[StoredColumn, ColumnSpec] = Field(default_factory=dict, max_length=2 * MAX_COLUMNS)


@dataclass(frozen=True, slots=True)
class Payload:
    """A decoded payload: one array per column, all rows end to end."""

    header_json: bytes  # valid; encoded for the reason given in `Reference`
    columns: dict[str, Array]

    @property
    def header(self) -> Header:
        """Parsed at every call: most payloads are never asked for it."""
        return Header.model_validate_json(self.header_json)


def encode_payload(trajectory: Trajectory) -> dict[Any, Any]:
    """The fields of the payload hash, columns as arrays. Raises TrajectoryError when the header is too large."""
    columns = _column_specs(trajectory)
    header = scalars(trajectory)
    header["group_size"] = trajectory.group_size
    if trajectory.model_version is not None:
        header["model_version"] = trajectory.model_version
    if trajectory.metadata:
        header["metadata"] = trajectory.metadata
    header["rows"] = [_row_header(row) for row in trajectory.rows]
    header["columns"] = columns
    text = to_json(header)
    if len(text) > MAX_HEADER_BYTES:
        raise TrajectoryError(
            f"metadata: header of {trajectory.group_id}/{trajectory.rollout_index} has {len(text)} bytes, "
            f"at most {MAX_HEADER_BYTES} are allowed: move large data into an extra column"
        )
    fields: dict[Any, Any] = {HEADER: text}
    rows = [
        {**row.columns, **{name: extra.data for name, extra in row.extras.items()}} for row in trajectory.rows
    ]
    for name in columns:
        fields[name] = rows[0][name] if len(rows) == 1 else np.concatenate([row[name] for row in rows])
    return fields


def payload_bytes(fields: Mapping[Any, Any]) -> int:
    """Bytes of all field values; names and Redis' own overhead are not counted."""
    return sum(len(value) if isinstance(value, bytes) else value.nbytes for value in fields.values())


def _column_specs(trajectory: Trajectory) -> dict[str, dict[str, Any]]:
    """The header's description of every stored column. Raises TrajectoryError where rows differ."""
    if not trajectory.rows:
        return {}
    first = trajectory.rows[0]
    # What an earlier run computed, as in a file written by `consume`, is not stored.
    specs = {name: _KNOWN_HEADERS[name] for name in first.columns if name in KNOWN_COLUMNS}
    for name, column in first.extras.items():
        columns = [row.extras[name] for row in trajectory.rows]
        kinds = {(c.data.dtype.str, c.data.shape[1:], c.per_token) for c in columns}
        if len(kinds) > 1:
            raise TrajectoryError(f"extra column {name} differs between rows in dtype, shape or per_token")
        lengths = None if column.per_token else [len(c.data) for c in columns]
        spec = ColumnSpec(dtype=column.data.dtype.str, shape=column.data.shape[1:], lengths=lengths)
        specs[name] = spec.model_dump(exclude_defaults=True)
    missing = [name for name in REQUIRED_COLUMNS if name not in specs]
    if missing:
        raise TrajectoryError(f"{missing[0]}: every row needs it")
    return specs


def _row_header(row: Row) -> dict[str, Any]:
    header: dict[str, Any] = {"length": len(row)}
    if row.agent is not None:
        header["agent"] = row.agent
    if row.reward is not None:
        header["reward"] = row.reward
    return header


def decode_payload(
    fields: Mapping[bytes, bytes],
    only: Sequence[str] | None = None,
    reference: Reference | None = None,
    buffers: Mapping[str, Array] | None = None,
) -> Payload:
    """Header and columns (all, or those named in `only`) from the fields of a payload hash.

    Arrays are views of `fields`. A known column that is named in `buffers` is copied into that array instead; its
    values are not checked, so the caller checks them. Sizes are compared with the header before an array is made.
    Raises WireError, also when the payload contradicts its reference.
    """
    text = fields.get(HEADER)
    if text is None:
        raise WireError("payload has no header field")
    if len(text) > MAX_HEADER_BYTES:
        raise WireError(f"payload header has {len(text)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    try:
        header = Header.model_validate_json(text)
    except ValidationError as error:
        raise WireError(f"payload header: {first_problem(error)}") from error
    names = header.columns if only is None else [name for name in only if name in header.columns]
    lengths = [row.length for row in header.rows]
    columns = {}
    for name in names:
        raw = fields.get(name.encode())
        if raw is None:
            raise WireError(f"column {name} is named in the header but missing")
        if buffers is not None and name in buffers:
            _check_known(name, header.columns[name], buffers[name].nbytes, raw)
            columns[name] = buffers[name]
            columns[name].data.cast("B")[:] = raw
        else:
            columns[name] = decode_column(name, header.columns[name], lengths, raw)
    problem = None if reference is None else _contradiction(reference, header, columns)
    if problem is not None:
        raise WireError(problem)
    return Payload(text, columns)


def _contradiction(reference: Reference, header: Header, columns: Mapping[str, Array]) -> str | None:
    """Where a payload contradicts its reference, or None; `response_mask` is compared if it was read."""
    if (header.group_id, header.rollout_index) != (reference.group_id, reference.rollout_index):
        return f"payload header is of {one_line(header.group_id)}/{header.rollout_index}"
    if tuple(row.length for row in header.rows) != reference.row_lengths:
        return "payload header has other row lengths than the reference"
    if header.steps != reference.steps:
        return "payload header has other steps than the reference"
    if tuple(sorted(header.columns)) != reference.columns:
        return "payload header has other columns than the reference"
    mask = columns.get("response_mask")
    if mask is not None:
        stop = 0
        for length, announced in zip(reference.row_lengths, reference.row_trainable, strict=True):
            start, stop = stop, stop + length
            ones = int(np.count_nonzero(mask[start:stop]))
            if ones != announced:
                return f"column response_mask has {ones} ones in a row, the reference {announced}"
    return None


def decode_column(name: str, spec: ColumnSpec, row_lengths: Sequence[int], raw: bytes) -> Array:
    """A read-only view of `raw` as the column `name`, all rows end to end. Raises WireError."""
    if name in KNOWN_COLUMNS:
        return _decode_known(name, spec, sum(row_lengths), raw)
    if spec.dtype not in EXTRA_DTYPES:
        raise WireError(f"column {name} has dtype {brief(spec.dtype)}, not one of the allowed ones")
    if spec.lengths is not None and len(spec.lengths) != len(row_lengths):
        raise WireError(f"column {name} lists {len(spec.lengths)} rows, the header has {len(row_lengths)}")
    dtype = np.dtype(spec.dtype)
    entries = sum(row_lengths if spec.lengths is None else spec.lengths)
    needed = entries * math.prod(spec.shape) * dtype.itemsize
    if len(raw) != needed:
        raise WireError(f"column {name} has {len(raw)} bytes, its header says {needed}")
    return np.frombuffer(raw, dtype).reshape(entries, *spec.shape)


def _decode_known(name: str, spec: ColumnSpec, tokens: int, raw: bytes) -> Array:
    dtype = KNOWN_COLUMNS[name]
    _check_known(name, spec, tokens * dtype.itemsize, raw)
    array = np.frombuffer(raw, dtype)
    try:
        check_values(name, array)
    except ValueError as error:
        raise WireError(f"column {name} {error}") from error
    return array


def _check_known(name: str, spec: ColumnSpec, needed: int, raw: bytes) -> None:
    if spec.dtype != _KNOWN_SPECS[name].dtype or spec.shape or spec.lengths is not None:
        raise WireError(
            f"column {name} has dtype {brief(spec.dtype)}, needs {_KNOWN_SPECS[name].dtype!r}, one value per token"
        )
    if len(raw) != needed:
        raise WireError(f"column {name} has {len(raw)} bytes, its header says {needed}")


def payload_trajectory(
    payload: Payload, outputs: Mapping[str, Array] | None = None, **fields: Any
) -> Trajectory:
    """The trajectory of a payload with all its columns, plus output columns and fields (batch, reward ...).

    Raises WireError when header and columns contradict each other.
    """
    header = payload.header
    columns = {**payload.columns, **(outputs or {})}
    data = {name: getattr(header, name) for name in header.model_fields_set & Trajectory.model_fields.keys()}
    rows = []
    try:
        for position, row in enumerate(header.rows):
            values = {name: _slice(header, name, array, position) for name, array in columns.items()}
            rows.append(Row(agent=row.agent, reward=row.reward, **values))
        steps = [Step(**span._asdict()) for span in header.steps]
        return Trajectory.model_validate({**data, "rows": rows, "steps": steps, **fields})
    except ValidationError as error:
        raise WireError(f"payload header: {first_problem(error)}") from error


def _slice(header: Header, name: str, array: Array, position: int) -> Any:
    spec = header.columns.get(name)
    lengths = [row.length for row in header.rows] if spec is None or spec.lengths is None else spec.lengths
    start = sum(lengths[:position])
    part = array[start : start + lengths[position]]
    if spec is None or name in KNOWN_COLUMNS:
        return part
    return Column(data=part, per_token=spec.lengths is None)
