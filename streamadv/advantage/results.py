"""Results of work items: reads and checks entries of the results log, and finds each trajectory's part of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ..algorithms.chain_metrics import merge_metrics
from ..algorithms.packed import Level
from ..batch.ends import SIZE
from ..batch.record import Death, WorkItem
from ..errors import ArgumentError, WireError
from ..grouping.layout import Layout, Piece, pieces
from ..messages import brief, first_problem, one_line
from ..run.kept import Numbers, is_kept, pack_results
from ..store.keys import ShardKeys
from ..trajectory.columns import KNOWN_COLUMNS, OUTPUT_COLUMNS, Array
from ..trajectory.members import Members, Positions, offsets

_RESULT_FIELDS: Final = (b"batch", b"header", b"output", b"output_bytes")
_RESULTS: Final[dict[str, np.dtype[Any]]] = {
    "rewards": np.dtype("<f8"),
    "step_rewards": np.dtype("<f8"),
    "advantages": np.dtype("<f4"),
    "returns": np.dtype("<f4"),
}
#: What a result has a number for each of; others have one at the level of the chain.
_LEVELS: Final = {"rewards": "trajectory", "step_rewards": "step"}

Count = Annotated[int, Field(ge=0, lt=1 << 40)]  # sums of them fit into 64 bits


def _known_output(name: str) -> str:
    if name in KNOWN_COLUMNS or name in OUTPUT_COLUMNS:
        return name
    raise ValueError(f"{brief(name)} is no column")


OutputName = Annotated[str, AfterValidator(_known_output)]


class GroupCounts(NamedTuple):
    """How many of a work item's results belong to a group. Groups follow each other in the header's order."""

    group_id: str
    trajectories: Count
    rows: Count
    steps: Count
    tokens: Count


class ResultHeader(BaseModel):
    """The header of an entry of the results log. `compute.compute` writes it."""

    model_config = ConfigDict(frozen=True)

    unit: int  # number of the work item
    level: Level
    groups: list[GroupCounts]
    columns: list[OutputName]  # of the output hash
    metrics: dict[str, float]
    weights: dict[str, float]
    dead: dict[str, Death]  # groups that could not be read or computed
    #: groups whose results stand in the output hash a second time, each in a field of its own
    kept: list[str] = []


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """One entry of the results log: the results of one work item. Equal to itself only."""

    batch: str  # id
    header: ResultHeader
    output: str  # key of the output hash, '' if the chain has no result per token
    numbers: dict[str, Array]  # one per trajectory, row or step, in the order of the header's groups


def parse_result(keys: ShardKeys, fields: Mapping[bytes, bytes]) -> Result:
    """An entry of a shard's results log. Raises WireError if it holds no results."""
    missing = [name for name in _RESULT_FIELDS if name not in fields]
    if missing:
        raise WireError(f"field {missing[0].decode()} is missing")
    try:
        header = ResultHeader.model_validate_json(fields[b"header"])
        batch, output = fields[b"batch"].decode(), fields[b"output"].decode()
    except ValueError as error:
        raise WireError(f"header: {first_problem(error)}") from error
    if not SIZE.fullmatch(fields[b"output_bytes"]):
        raise WireError(f"output_bytes is {brief(fields[b'output_bytes'])}, needs a number of bytes")
    if not output.startswith(keys.output("")) and (output or header.columns):
        raise WireError(f"output is {brief(output)}, needs the key of an output")
    try:
        merge_metrics([(header.metrics, header.weights)] * 2)
    except (ArgumentError, ArithmeticError, KeyError) as error:
        raise WireError(f"header: its metrics cannot be merged: {one_line(str(error))}") from error
    counts = {
        "trajectory": sum(group.trajectories for group in header.groups),
        "row": sum(group.rows for group in header.groups),
        "step": sum(group.steps for group in header.groups),
    }
    numbers: dict[str, Array] = {}
    for field, raw in fields.items():
        if field in _RESULT_FIELDS:
            continue
        name = field.decode(errors="replace")
        level = _LEVELS.get(name, header.level)
        if name not in _RESULTS or level == "token":
            raise WireError(f"result {one_line(name)} is unknown at level {header.level}")
        dtype = _RESULTS[name]
        size = counts[level] * dtype.itemsize
        if len(raw) != size:
            raise WireError(f"result {name} has {len(raw)} bytes, needs {size}")
        numbers[name] = np.frombuffer(raw, dtype)
    if header.groups and not {"rewards", "step_rewards"} <= numbers.keys():
        raise WireError("rewards or step_rewards are missing")
    return Result(batch, header, output, numbers)


def misfit(result: Result, item: WorkItem, counts: Mapping[str, GroupCounts]) -> str | None:
    """Why these are not the results of `item`, or None. counts: of the batch's living groups, by id."""
    published = [pointer.group_id for pointer in item.groups if pointer.shard == item.shard]
    counts_in_result = {group.group_id: group for group in result.header.groups}
    if len(counts_in_result) < len(result.header.groups) or not counts_in_result.keys() <= set(published):
        return "it has groups twice, or groups of other work items"
    for group_id in published:
        is_due = group_id in counts and group_id not in result.header.dead
        if is_due and counts_in_result.get(group_id) != counts[group_id]:
            return f"group {group_id} has other counts than in the log"
    return None


def counts_of(layout: Layout) -> list[GroupCounts]:
    """Of each group of a layout of whole groups."""
    first = np.searchsorted(layout.group, np.arange(len(layout.groups) + 1))
    counts = [np.diff(bound[first]) for bound in _bounds_of(layout.members).values()]
    table = np.stack(counts, axis=1).tolist()
    return [GroupCounts(group.group_id, *counts) for group, counts in zip(layout.groups, table, strict=True)]


def results_of_groups(
    layout: Layout,
    share: float,
    level: Level,
    results: Mapping[str, bytes],
    outputs: Mapping[str, memoryview],
) -> dict[str, bytes]:
    """The results of each group of a layout that commit may keep, by id.

    share: of such groups. results: numbers per trajectory, row or step; outputs: per token.
    """
    first = np.searchsorted(layout.group, np.arange(len(layout.groups) + 1))
    spans = {name: bound[first] for name, bound in _bounds_of(layout.members).items()}  # of groups
    arrays = [
        Numbers(name, _LEVELS.get(name, level), np.frombuffer(raw, _RESULTS[name]))
        for name, raw in results.items()
    ]
    arrays += [
        Numbers(name, "token", np.frombuffer(raw, (OUTPUT_COLUMNS | KNOWN_COLUMNS)[name]))
        for name, raw in outputs.items()
    ]
    found = {}
    for number, group in enumerate(layout.groups):
        if is_kept(group.group_id, share):
            own = [n._replace(values=n.values[slice(*spans[n.level][number : number + 2])]) for n in arrays]
            found[group.group_id] = pack_results(own)
    return found


def _bounds_of(members: Members) -> dict[str, Positions]:
    """[M + 1] by level: where the numbers of each member begin."""
    return {
        "trajectory": np.arange(len(members) + 1),
        "row": members.first_row,
        "step": members.first_step,
        "token": offsets(members.table["tokens"]),
    }


class BatchResults:
    """The results of all work items of a batch, for the M members of a layout of its living groups.

    Members are named by their positions in the layout. The results also hold numbers of groups that became dead
    letters after they were computed: nobody asks for those.
    """

    def __init__(self, results: Sequence[Result], layout: Layout) -> None:
        """results: of the batch's work items, in their order; no `misfit`. layout: whole groups."""
        self.results = [result for result in results if result.header.groups]
        #: Of the advantages and returns.
        self.level: Level = self.results[0].header.level if self.results else "row"
        names = [set(result.numbers) for result in self.results]
        columns = [set(result.header.columns) for result in self.results]
        #: Results with a number per trajectory, row or step, that all members have.
        self.names: set[str] = set.intersection(*names) if names else set()
        #: Results with a number per token, that all members have: columns of the output hashes.
        self.columns: list[str] = sorted(set.intersection(*columns)) if columns else []
        counts = [count for result in self.results for count in result.header.groups]
        number_of = {count.group_id: number for number, count in enumerate(counts)}
        group = np.array([number_of[group.group_id] for group in layout.groups], np.int64)[layout.group]
        first_member = np.searchsorted(layout.group, layout.group)  # of the member's group
        bounds = _bounds_of(layout.members)
        sizes = np.array([count[1:] for count in counts], np.int64).reshape(-1, len(bounds))
        before = np.cumsum(sizes, axis=0) - sizes  # numbers of the groups before, in all results end to end
        #: [M] by level: where a member's numbers begin in all results end to end, and how many there are.
        self._start = {
            level: before[group, column] + bound[:-1] - bound[first_member]
            for column, (level, bound) in enumerate(bounds.items())
        }
        self._length = {level: np.diff(bound) for level, bound in bounds.items()}
        first_group = offsets(np.array([len(result.header.groups) for result in self.results], np.int64))
        #: [M]: which of `results` has the member.
        self.result: Positions = np.searchsorted(first_group, group, side="right") - 1
        tokens = offsets(sizes[:, -1])[first_group]
        #: Tokens in each output column of each of `results`.
        self.num_tokens: list[int] = np.diff(tokens).tolist()
        #: [M]: the member's first token in these columns.
        self.first_token: Positions = self._start["token"] - tokens[self.result]

    def numbers(self, name: str, members: Positions | Sequence[int]) -> Array:
        """The numbers of one of `names`, of each of the `members` in turn."""
        positions = np.asarray(members, np.int64)
        level = _LEVELS.get(name, self.level)
        start, length = self._start[level][positions], self._length[level][positions]
        end_to_end = np.concatenate([np.zeros(0, _RESULTS[name]), *(r.numbers[name] for r in self.results)])
        values: Array = end_to_end[np.repeat(start - offsets(length)[:-1], length) + np.arange(length.sum())]
        return values

    def pieces(self, members: Positions | Sequence[int]) -> dict[int, list[Piece]]:
        """How an output column of the `members`, end to end, is put together: pieces by position in `results`."""
        positions = np.asarray(members, np.int64)
        return pieces(self.result[positions], self.first_token[positions], self._length["token"][positions])
