"""Kept groups as rows of a Parquet file, and back. A line of the file is a row of a trajectory: one token sequence.

Fields of the trajectory stand in each of its rows, JSON where they are objects. The first line of a group also has its
entry of the stream `kept` (`entry_fields`), from which `rewind` computes its batch again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import to_json

from ..errors import TrajectoryError
from ..messages import one_line
from ..status.seen import KeptEntry
from ..trajectory.columns import KNOWN_COLUMNS, OUTPUT_COLUMNS, Array
from ..trajectory.packet import column_kind
from ..trajectory.schema import Column, Trajectory, parse_trajectory
from .follow import Archived, Form

#: In front of the names of extra columns.
EXTRA: Final = "extra."
#: Key of the kinds of extra columns in a file's metadata: name -> JSON of [dtype, shape, per_token].
KINDS: Final = b"streamadv.columns"
#: Bytes of lines that are compressed together.
ROW_GROUP_BYTES: Final = 16 << 20

#: Group and rollout index.
Place = tuple[str, int]

_TEXT = pa.string()
_FIELDS: Final = {
    "group_id": _TEXT,
    "rollout_index": pa.int32(),  # null: the members of the group cannot be read
    "row": pa.int32(),
    "group_size": pa.int32(),
    "status": _TEXT,
    "role": _TEXT,
    "data_source": _TEXT,
    "reward": pa.float64(),  # null: unscorable
    "rewards": _TEXT,
    "outcome": _TEXT,
    "reason": _TEXT,
    "batch": pa.int64(),
    "staleness": pa.int64(),
    "version_oldest": pa.int64(),
    "version_newest": pa.int64(),
    "round": _TEXT,
    "agent": _TEXT,
    "row_reward": pa.float64(),
    "metadata": _TEXT,
    "steps": _TEXT,
    "ended": pa.timestamp("ms", "UTC"),
    "shard": pa.int32(),
    "entry": _TEXT,
    "problem": _TEXT,  # why there are no tokens
    "entry_fields": pa.binary(),
}
#: Fields of a trajectory that stand in its lines as they are.
_SAME: Final = (
    "rollout_index", "group_size", "data_source", "reward", "reason", "batch", "staleness", "round",
)  # fmt: skip
_TOKENS: Final = {**KNOWN_COLUMNS, **OUTPUT_COLUMNS}


class TableFile:
    def __init__(self, path: Path, kinds: Mapping[str, str]) -> None:
        self._schema = _schema(kinds)
        texts = [name for name, kind in _FIELDS.items() if kind == _TEXT]
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", use_dictionary=texts)
        self._waiting: list[pa.Table] = []

    def write(self, groups: Sequence[Archived]) -> None:
        lines = [line for group in groups for line in _lines_of(group)]
        self._waiting.append(pa.Table.from_pylist(lines, schema=self._schema))
        if sum(table.nbytes for table in self._waiting) >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting))
            self._waiting = []

    def close(self) -> None:
        self._flush()
        self._writer.close()


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file. Raises TrajectoryError."""
    try:
        with pq.ParquetFile(path) as file:
            kinds = json.loads((file.schema_arrow.metadata or {})[KINDS])
            lines = _read(file, [name for name in file.schema_arrow.names if name != "entry_fields"])
            whole = (line for line in lines if line["rollout_index"] is not None and line["problem"] is None)
            for _, rows in groupby(whole, key=lambda line: (line["group_id"], line["rollout_index"])):
                yield _trajectory(list(rows), kinds, str(path))
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise TrajectoryError(f"{path}: is no file of an archive: {one_line(str(error))}") from None


def read_entries(path: Path) -> Iterator[KeptEntry]:
    """The entries of a file as they stood in the stream `kept`."""
    with pq.ParquetFile(path) as file:
        for line in _read(file, ["shard", "entry", "entry_fields"]):
            if line["entry_fields"] is not None:
                yield KeptEntry(line["shard"], line["entry"], _unpacked(line["entry_fields"]))


def read_ids(path: Path) -> set[str]:
    """The groups of a file."""
    return set(pq.read_table(path, columns=["group_id"])["group_id"].to_pylist())


def read_columns(
    path: Path, group_ids: Set[str], names: Sequence[str]
) -> dict[Place, list[dict[str, Array]]]:
    """Columns of the rows of groups by group and rollout index, as they were pushed."""
    chosen = ["group_id", "rollout_index", "problem", *names]
    table = pq.read_table(path, columns=chosen, filters=[("group_id", "in", group_ids)])
    rows: dict[Place, list[dict[str, Array]]] = {}
    for line in _rows(table):
        if line["problem"] is None:
            found = {name: line[name] for name in names if line[name] is not None}
            rows.setdefault((line["group_id"], line["rollout_index"]), []).append(found)
    return rows


#: Files as `streamadv archive` writes them.
PARQUET: Final = Form("parquet", TableFile, read_ids)


# Writing


def _schema(kinds: Mapping[str, str]) -> pa.Schema:
    tokens = {name: pa.list_(pa.from_numpy_dtype(dtype)) for name, dtype in _TOKENS.items()}
    extras = {
        f"{EXTRA}{name}": pa.list_(pa.from_numpy_dtype(column_kind(name, kinds).dtype)) for name in kinds
    }
    return pa.schema({**_FIELDS, **tokens, **extras}, {KINDS: json.dumps(dict(kinds))})


def _lines_of(archived: Archived) -> Iterator[dict[str, Any]]:
    """The lines of a group; one without tokens for what cannot be read."""
    entry, group, trajectories, problem = archived
    same = {
        "group_id": group.group_id,
        "outcome": group.outcome,
        "ended": group.ended_ms,
        "shard": entry.shard,
        "entry": entry.id,
        "data_source": group.data_source,
        "group_size": group.size,
    }
    first: dict[str, Any] = {"entry_fields": _packed(entry.fields)}
    for trajectory in trajectories:
        version = trajectory.model_version
        oldest, newest = version if isinstance(version, tuple) else (version, version)
        fields = {
            **same,
            **{name: getattr(trajectory, name) for name in _SAME},
            "status": trajectory.status.value,
            "role": trajectory.role.value,
            "rewards": _json(trajectory.rewards),
            "version_oldest": oldest,
            "version_newest": newest,
            "metadata": _json(trajectory.metadata),
            "steps": _json([step.model_dump(exclude_defaults=True) for step in trajectory.steps]),
        }
        for number, row in enumerate(trajectory.rows or [None]):
            line = fields | first | {"row": number}
            if row is not None:
                line |= {"agent": row.agent, "row_reward": row.reward, **row.columns}
                line |= {f"{EXTRA}{name}": column.data.ravel() for name, column in row.extras.items()}
            yield line
            first = {}
    there = {trajectory.rollout_index for trajectory in trajectories}
    absent = [member.rollout_index for member in group.members if member.rollout_index not in there]
    nobody: list[int | None] = [] if trajectories else [None]
    for index in absent or nobody:
        yield same | first | {"rollout_index": index, "problem": problem or "its members cannot be read"}
        first = {}


def _json(value: Any) -> str | None:
    return to_json(value).decode() if value else None


def _packed(fields: Mapping[bytes, bytes]) -> bytes:
    """An entry's fields as bytes: a line of JSON with names and lengths, then the values."""
    head = [[name.decode(), len(value)] for name, value in fields.items()]
    return b"\n".join([json.dumps(head).encode(), b"".join(fields.values())])


def _unpacked(raw: bytes) -> dict[bytes, bytes]:
    text, _, rest = raw.partition(b"\n")
    fields, at = {}, 0
    for name, length in json.loads(text):
        fields[name.encode()] = rest[at : at + length]
        at += length
    return fields


# Reading


def _read(file: pq.ParquetFile, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number in range(file.num_row_groups):  # lines that are in memory together
        yield from _rows(file.read_row_group(number, columns=list(names)))


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The lines of a table, lists as arrays."""
    columns = [
        column.to_numpy() if pa.types.is_list(column.type) else column.to_pylist() for column in table.columns
    ]
    for values in zip(*columns, strict=True):
        yield dict(zip(table.column_names, values, strict=True))


def _trajectory(rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, str], where: str) -> Trajectory:
    first = rows[0]
    names = (*_SAME, "group_id", "status", "role", "outcome")
    record: dict[str, Any] = {name: first[name] for name in names}
    record |= {name: json.loads(first[name]) for name in ("rewards", "metadata", "steps") if first[name]}
    if first["version_oldest"] is not None:
        oldest, newest = first["version_oldest"], first["version_newest"]
        record["model_version"] = oldest if oldest == newest else (oldest, newest)
    return parse_trajectory({**record, "rows": [_row(line, kinds) for line in rows]}, where)


def _row(line: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    row = {name: line[name] for name in _TOKENS if line.get(name) is not None}
    row |= {"agent": line["agent"], "reward": line["row_reward"]}
    for name in kinds:
        if (flat := line.get(f"{EXTRA}{name}")) is not None:
            kind = column_kind(name, kinds)
            entry = math.prod(kind.shape)
            count = len(flat) // entry if entry else len(line["input_ids"]) if kind.per_token else 0
            row[name] = Column(data=flat.reshape(count, *kind.shape), per_token=kind.per_token)
    return row
