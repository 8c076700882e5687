"""The data model: trajectory, row and step, and the JSON form of an interchange file.

This is the public boundary: pydantic validates every field. Behind it trajectories travel in packets
(`packet_encoding.py`): columns as raw bytes, the other fields as a table (`members.py`). For records of a producer's
group, `producer/records.py` does the same checks faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Self

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictBool,
    WithJsonSchema,
    computed_field,
    model_validator,
)

from ..errors import TrajectoryError
from ..messages import brief, first_problem
from .columns import (
    COLUMN_NAME,
    EXTRA_DTYPES,
    KNOWN_COLUMNS,
    OUTPUT_COLUMNS,
    REQUIRED_COLUMNS,
    Array,
    NoArrayError,
    cast_array,
    extra_array,
    versions_of,
)
from .fields import (
    GroupId,
    LongText,
    Metadata,
    Reward,
    RoundName,
    ShortText,
    TokenColumn,
    Version,
    Whole,
    check_names,
    meant,
)

MAX_ROWS: Final = 4096
MAX_STEPS: Final = 65536
MAX_GROUP_SIZE: Final = 4096
MAX_REWARDS: Final = 64
TOKEN_COLUMNS: Final = (*KNOWN_COLUMNS, *OUTPUT_COLUMNS)


class Status(StrEnum):
    """How a rollout ended. The first two are usable: they count for their group and are trained on."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"  # ran into a length or turn limit
    ABORTED = "aborted"  # stopped from outside, by the engine or the environment
    FAILED = "failed"  # raised an error

    @property
    def usable(self) -> bool:
        return self in (Status.COMPLETED, Status.TRUNCATED)


class Role(StrEnum):
    """What a trajectory is for. The estimator reads a `baseline` (ReMax); the trainer never receives it.

    `eval` trajectories have groups of their own, which measure a policy version and are never trained on.
    """

    TRAIN = "train"
    BASELINE = "baseline"
    EVAL = "eval"


class _Model(BaseModel):
    """A model whose constructor raises TrajectoryError, on one line."""

    def __init__(self, /, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValueError as error:  # pydantic's, or a lone surrogate in a key
            raise TrajectoryError(f"{type(self).__name__}: {_problem(error, data)}") from None

    # Inside another model pydantic builds one without this constructor, and names the place of what is wrong.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]


class Column(_Model):
    """An extra column that states whether it has one entry per token."""

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", frozen=True, ser_json_inf_nan="constants"
    )

    data: Annotated[
        Any,
        BeforeValidator(extra_array),
        PlainSerializer(lambda array: array.tolist()),
        WithJsonSchema({"type": "array"}),
    ]
    per_token: StrictBool

    @computed_field  # type: ignore[prop-decorator]
    @property
    def dtype(self) -> str:
        """numpy's name, such as `<f4`. Files carry it, because a list of numbers does not tell its dtype."""
        return str(self.data.dtype.str)

    @model_validator(mode="before")
    @classmethod
    def _apply_dtype(cls, value: Any) -> Any:
        """Cast the list of an interchange file to the dtype that stands beside it."""
        if not isinstance(value, Mapping) or "dtype" not in value:
            return value
        value = dict(value)
        dtype = value.pop("dtype")
        if not isinstance(dtype, str) or dtype not in EXTRA_DTYPES:
            raise ValueError(f"dtype is {brief(dtype)}, needs one of {', '.join(sorted(EXTRA_DTYPES))}")
        if "data" in value:
            value["data"] = cast_array(extra_array(value["data"]), np.dtype(dtype))
        return value


class Row(_Model):
    """One token sequence of a trajectory, with its columns (each a 1-D array of the row's length T).

    Most trajectories have one row; step-wise agents, forks, compacted contexts and sub-agents have several. A token is
    trainable (`response_mask` 1) in one row only. Any other keyword is an extra column.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="allow", frozen=True)

    agent: ShortText | None = None
    reward: Reward | None = None  # of this row; None = the trajectory's reward

    input_ids: Annotated[Array, TokenColumn("input_ids")]
    response_mask: Annotated[Array, TokenColumn("response_mask")]
    rollout_log_probs: Annotated[Array | None, TokenColumn("rollout_log_probs")] = None
    old_log_probs: Annotated[Array | None, TokenColumn("old_log_probs")] = None
    ref_log_probs: Annotated[Array | None, TokenColumn("ref_log_probs")] = None
    teacher_log_probs: Annotated[Array | None, TokenColumn("teacher_log_probs")] = None
    values: Annotated[Array | None, TokenColumn("values")] = None
    token_level_rewards: Annotated[Array | None, TokenColumn("token_level_rewards")] = None
    sum_pi_squared: Annotated[Array | None, TokenColumn("sum_pi_squared")] = None
    versions: Annotated[Array | None, TokenColumn("versions")] = None
    advantages: Annotated[Array | None, TokenColumn("advantages")] = None
    returns: Annotated[Array | None, TokenColumn("returns")] = None
    raw_advantages: Annotated[Array | None, TokenColumn("raw_advantages")] = None
    rollout_is_weights: Annotated[Array | None, TokenColumn("rollout_is_weights")] = None
    sample_weights: Annotated[Array | None, TokenColumn("sample_weights")] = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        """Leave out extra columns that are None; refuse names that mean something else."""
        if not isinstance(data, Mapping):
            return data
        data = {name: value for name, value in data.items() if value is not None or name in _ROW_FIELDS}
        check_names([name for name in data if isinstance(name, str) and name not in _ROW_FIELDS])
        return data

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        length = len(self)
        for name, array in self.columns.items():
            if len(array) != length:
                raise ValueError(f"{name} has {len(array)} values, input_ids has {length}: one per token")
        extras = self.__pydantic_extra__ or {}
        for name, value in extras.items():
            if not COLUMN_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no column name: letters, digits, '_' and '.', at most 64, not header"
                )
            extras[name] = extra_column(name, value, length)
        return self

    def __len__(self) -> int:
        """T: the number of tokens, prompt and response."""
        return len(self.input_ids)

    @property
    def columns(self) -> dict[str, Array]:
        """Known columns that are present, in their fixed order."""
        values = self.__dict__  # one look-up per name; attribute access goes through pydantic
        return {name: array for name in TOKEN_COLUMNS if (array := values[name]) is not None}

    @property
    def extras(self) -> dict[str, Column]:
        """Extra columns, which the library carries to the trainer without interpreting them."""
        return self.__pydantic_extra__ or {}


_ROW_FIELDS: Final = frozenset(Row.model_fields)


def extra_column(name: str, value: Any, length: int) -> Column:
    """`value` as the extra column `name` of a row of so many tokens. Raises ValueError."""
    try:
        if isinstance(value, Mapping) and "data" in value:
            value = Column.model_validate(value)
        if not isinstance(value, Column):
            array = extra_array(value)
            # `per_token` counts as not stated
            value = Column.model_construct({"data"}, data=array, per_token=len(array) == length)
    except NoArrayError as error:
        elsewhere = f", or to stand in metadata={{{name!r}: ...}}"
        raise ValueError(f"extra column {name} {error}{meant(name) or elsewhere}") from None
    except ValueError as error:
        raise ValueError(f"extra column {name} {first_problem(error)}") from None
    if value.per_token and len(value.data) != length:
        raise ValueError(f"extra column {name} has {len(value.data)} entries, input_ids has {length}")
    assert isinstance(value, Column)
    return value


class Step(_Model):
    """One turn of an agent: its span of tokens in a row, its reward, and the state it acted in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    row: Annotated[int, Field(ge=0, lt=MAX_ROWS), Whole] = 0
    start: Annotated[int, Field(ge=0), Whole]
    end: Annotated[int, Field(gt=0), Whole]  # exclusive
    reward: Reward = 0.0
    state_key: ShortText | None = None  # hash of the observation; equal keys share a state group (GiGPO)


class Trajectory(_Model):
    """One rollout of one prompt, pushed whole: the unit of identity, completion, ledger and staleness.

    Identity is (run, group_id, rollout_index). `reward` None means unscorable: the slot ends, outside all statistics.
    Without `reward` the run's scorers bring it, or `producer.score` if `reward_later` is true.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_id: GroupId
    group_size: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE), Whole]
    rollout_index: Annotated[int, Field(ge=0, lt=2 * MAX_GROUP_SIZE), Whole]
    reward: Reward | None = None
    reward_later: StrictBool = False
    rewards: dict[ShortText, Reward] = Field(default_factory=dict, max_length=MAX_REWARDS)
    status: Status = Status.COMPLETED
    model_version: Version | tuple[Version, Version] | None = None  # a number, or [start, end]
    data_source: ShortText | None = None
    role: Role = Role.TRAIN
    round: RoundName | None = None  # of evaluation, such as step-100
    metadata: Metadata = Field(default_factory=dict)
    steps: list[Step] = Field(default_factory=list, max_length=MAX_STEPS)
    rows: list[Row] = Field(default_factory=list, max_length=MAX_ROWS)
    batch: Version | None = None  # output: the batch that delivered it
    staleness: Version | None = None  # output: batch minus the oldest version over trainable tokens
    outcome: ShortText | None = None  # output: how its group has ended
    reason: LongText | None = None  # output: why, in words

    @model_validator(mode="before")
    @classmethod
    def _single_row_at_top_level(cls, data: Any) -> Any:
        """Gather columns at top level into `rows`: files write a single row so."""
        if not isinstance(data, Mapping):
            return data
        if any(value is None for value in data.values()):
            data = {name: value for name, value in data.items() if value is not None or name in _MAY_BE_NONE}
        columns = {name: value for name, value in data.items() if name not in _FIELDS}
        if not columns:
            return data
        if data.get("rows", []) != []:
            raise ValueError(f"{next(iter(columns))!r} stands beside rows: move it into a row or remove it")
        check_names([name for name in columns if isinstance(name, str) and name not in _ROW_FIELDS])
        if not any(name in columns for name in REQUIRED_COLUMNS):
            unknown = brief(next(iter(columns)))
            raise ValueError(f"unknown field {unknown}: columns need input_ids and response_mask")
        rest = {name: value for name, value in data.items() if name in _FIELDS}
        return {**rest, "rows": [columns]}

    @model_validator(mode="after")
    def _check_structure(self) -> Self:
        if isinstance(self.model_version, tuple) and self.model_version[0] > self.model_version[1]:
            raise ValueError(f"model_version {list(self.model_version)} ends before it starts")
        if self.reward_later and self.scored:
            raise ValueError("reward_later stands beside reward: leave one of them out")
        if self.round is not None and self.role is not Role.EVAL:
            raise ValueError(f"round {brief(self.round)} stands beside role {self.role}, needs role eval")
        if self.status.usable and not self.rows:
            raise ValueError(f"status {self.status} needs at least one row with input_ids and response_mask")
        if len(self.rows) > 1 and len({frozenset((*row.columns, *row.extras)) for row in self.rows}) > 1:
            raise ValueError("rows differ in their columns: give every row the same ones")
        for position, step in enumerate(self.steps):
            if step.row >= len(self.rows):
                raise ValueError(f"steps.{position}.row is {step.row}, there are {len(self.rows)} rows")
            tokens = len(self.rows[step.row])
            if not step.start < step.end <= tokens:
                span = f"{brief(step.start)}..{brief(step.end)}"
                raise ValueError(f"steps.{position} spans {span}, needs start < end <= {tokens} of its row")
        return self

    @property
    def scored(self) -> bool:
        """Whether a reward (or the statement that there is none) came with the trajectory."""
        return "reward" in self.model_fields_set

    @property
    def num_tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def is_baseline(self) -> bool:
        return self.role is Role.BASELINE

    @property
    def row_lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self.rows]

    @property
    def row_trainable(self) -> list[int]:
        """Trainable tokens of each row."""
        return [int(np.count_nonzero(row.response_mask)) for row in self.rows]

    @property
    def version_span(self) -> tuple[int, int] | None:
        """Oldest and newest policy version over trainable tokens; None when the source has no version."""
        return versions_of(self.model_version, [row.columns for row in self.rows])

    def to_json(self) -> dict[str, Any]:
        """The interchange form: lists for arrays, a single row at top level, absent fields left out."""
        record = self.model_dump(mode="json", exclude={"rows"}, exclude_defaults=True)
        if self.scored:
            record["reward"] = self.reward
        rows = [row.model_dump(mode="json", exclude_none=True) for row in self.rows]
        if len(rows) == 1 and not {"agent", "reward"} & rows[0].keys():
            return {**record, **rows[0]}
        return {**record, "rows": rows} if rows else record


_FIELDS: Final = frozenset(Trajectory.model_fields)
#: Fields that None says something of, or that are required. Any other field that is None is left out.
_MAY_BE_NONE: Final = frozenset(
    ("group_id", "group_size", "rollout_index", "reward", "model_version", *REQUIRED_COLUMNS)
)


def parse_trajectory(data: Any, where: str = "trajectory") -> Trajectory:
    """Validate `data`: a mapping in interchange form, or the same fields with arrays.

    Raises TrajectoryError with one line: `where`, the field, its value and what it needs.
    """
    if not isinstance(data, Mapping | Trajectory):
        raise TrajectoryError(f"{where}: is {brief(data)}, needs an object with the fields of a trajectory")
    try:
        return Trajectory.model_validate(data)
    except ValueError as error:  # pydantic's, or a lone surrogate in a key
        raise TrajectoryError(f"{where}: {_problem(error, data)}") from None


def _problem(error: ValueError, data: Any) -> str:
    """What is wrong with the fields `data`."""
    problem = first_problem(error)
    if isinstance(data, Mapping) and "rows" not in data:  # the columns stood at top level
        problem = problem.removeprefix("rows.0.").removeprefix("rows.0: ")
    return problem


def trajectory_json_schema() -> dict[str, Any]:
    """JSON schema of one line of an interchange file: a row's columns at top level, or `rows`."""
    schema = Trajectory.model_json_schema(mode="validation")
    row = schema["$defs"]["Row"]
    flat = {name: value for name, value in row["properties"].items() if name != "reward"}
    schema["properties"] |= flat
    for name in _FIELDS - _MAY_BE_NONE:
        schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}
    schema["additionalProperties"] = {"$ref": "#/$defs/ExtraColumn"}
    row["additionalProperties"] = {"$ref": "#/$defs/ExtraColumn"}
    schema["$defs"]["ExtraColumn"] = {
        "title": "ExtraColumn",
        "description": "Any further column: carried through to the trainer, not interpreted.",
        "anyOf": [{"type": "array"}, {"$ref": "#/$defs/Column"}, {"type": "null"}],
    }
    column = schema["$defs"].setdefault("Column", Column.model_json_schema())
    column["properties"]["dtype"] = {"enum": sorted(EXTRA_DTYPES)}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "streamadv trajectory"
    return schema
