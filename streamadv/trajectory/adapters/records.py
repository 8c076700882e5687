"""Recorded files as numbered records, for all adapters of this package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...errors import TrajectoryError
from ...messages import brief
from ..interchange import open_for_reading, parse_json

#: A recorded file is read whole, because group sizes are counted over all its records.
MAX_FILE_BYTES: Final = 1 << 30


class Record(NamedTuple):
    """One JSON object of a file, and where it stands, for error messages."""

    where: str
    fields: dict[str, Any]


def read_records(path: Path, max_bytes: int = MAX_FILE_BYTES) -> list[Record]:
    """The records of `path`: a JSON list of objects, or one object per line.

    Raises TrajectoryError, which names a record of a list by its index from 0, and a line by its number from 1.
    """
    with open_for_reading(path) as file:
        content: bytes = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise TrajectoryError(f"{path}: is larger than {max_bytes} bytes: split it, keeping groups together")
    if content.lstrip()[:1] == b"[":
        values = parse_json(content, str(path))
        objects = [(f"{path}: record {number}", value) for number, value in enumerate(values)]
    else:
        lines = [(f"{path}:{number}", line) for number, line in enumerate(content.split(b"\n"), start=1)]
        objects = [(where, parse_json(line, where)) for where, line in lines if line.strip()]
    if not objects:
        raise TrajectoryError(f"{path}: holds no record")
    for where, value in objects:
        if not isinstance(value, dict):
            raise TrajectoryError(f"{where}: is {brief(value)}, needs an object")
    return [Record(where, value) for where, value in objects]


def first_record(path: Path) -> dict[str, Any]:
    """The first object of a file, whichever of both forms it has. Raises TrajectoryError if there is none."""
    with open_for_reading(path) as file:
        start: bytes = file.readline(MAX_FILE_BYTES)
    if start.lstrip()[:1] == b"[":
        return read_records(path)[0].fields
    value = parse_json(start, str(path))
    if not isinstance(value, dict):
        raise TrajectoryError(f"{path}: is {brief(value)}, needs an object")
    return value


def required(record: Record, field: str) -> Any:
    """The value of a mandatory field. Raises TrajectoryError without it."""
    if field not in record.fields:
        raise TrajectoryError(f"{record.where}: {field}: is missing")
    return record.fields[field]


def field_name(record: Record, field: str, aliases: Sequence[str]) -> str:
    """The record's name for `field`: itself or one of `aliases`. Raises TrajectoryError if it has two of them."""
    present = [name for name in (field, *aliases) if name in record.fields]
    if len(present) > 1:
        raise TrajectoryError(f"{record.where}: {present[1]}: means the same as {present[0]}, keep one")
    return present[0] if present else field


def group_name(record: Record, field: str) -> str:
    """A group id from a field of text or a whole number. Raises TrajectoryError."""
    value = required(record, field)
    if type(value) is int and value.bit_length() <= 128:
        return str(value)
    if isinstance(value, str) and value and not any(char.isspace() for char in value):
        return value
    raise TrajectoryError(
        f"{record.where}: {field}: is {brief(value)}, needs a whole number or text without spaces"
    )


def index(record: Record, field: str) -> int:
    """A whole number from 0. Raises TrajectoryError."""
    value = required(record, field)
    if type(value) is not int or value < 0:
        raise TrajectoryError(f"{record.where}: {field}: is {brief(value)}, needs a whole number from 0")
    return value


def ranks(identities: Iterable[tuple[str, int]]) -> Mapping[str, Mapping[int, int]]:
    """Per group: its distinct indices in order, mapped to 0 .. n - 1.

    Indices that already are 0 .. n - 1 map to themselves; repeated ones count once.
    """
    indices: dict[str, set[int]] = {}
    for group_id, number in identities:
        indices.setdefault(group_id, set()).add(number)
    return {
        group_id: {number: rank for rank, number in enumerate(sorted(numbers))}
        for group_id, numbers in indices.items()
    }
