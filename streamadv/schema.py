"""The data model: trajectory, row, step, and the JSON-lines form they are exchanged in.

This is the public boundary, validated by pydantic. Past it, columns travel as raw bytes (`wire.py`) and a
trajectory is represented in streams by its reference (`wire.Reference`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from .columns import (
    COLUMN_NAME,
    KNOWN_COLUMNS,
    MAX_COLUMNS,
    OUTPUT_COLUMNS,
    REQUIRED_COLUMNS,
    Array,
    extra_array,
    known_array,
)
from .errors import TrajectoryError

MAX_ROWS: Final = 4096
MAX_STEPS: Final = 65536
MAX_GROUP_SIZE: Final = 4096

GroupId = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f]+$")]
ShortText = Annotated[str, StringConstraints(max_length=200)]
Version = Annotated[int, Field(ge=0, lt=2**53)]


class Status(StrEnum):
    """How a rollout ended. The first two are usable: they count towards completion and are trained on."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"  # ran into a length or turn limit
    ABORTED = "aborted"  # stopped from outside, by the engine or the environment
    FAILED = "failed"  # raised an error

    @property
    def usable(self) -> bool:
        return self in (Status.COMPLETED, Status.TRUNCATED)


class Role(StrEnum):
    """`baseline` counts for its group and is seen by the estimator (ReMax), but is never delivered."""

    TRAIN = "train"
    BASELINE = "baseline"


class Column(BaseModel):
    """An extra column that says itself whether it has one entry per token."""

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", frozen=True)

    data: Annotated[Any, BeforeValidator(extra_array), PlainSerializer(lambda array: array.tolist())]
    per_token: bool


def _column_field(name: str) -> Any:
    """The pydantic type of one known column: validated to its dtype, written as a list."""
    dtype = KNOWN_COLUMNS.get(name) or OUTPUT_COLUMNS[name]
    item: dict[str, Any] = {"type": "number"} if dtype.kind == "f" else {"type": "integer"}
    if name == "response_mask":
        item = {"enum": [0, 1]}
    return Annotated[
        Any,
        BeforeValidator(lambda value: None if value is None else known_array(name, value)),
        PlainSerializer(lambda array: None if array is None else array.tolist()),
        WithJsonSchema({"type": "array", "minItems": 1, "items": item}),
    ]


class Row(BaseModel):
    """One token sequence of a trajectory, with its columns (each a 1-D array of the row's length T).

    Most trajectories have one row; step-wise agents, forks, compacted contexts and sub-agents have several.
    A token is trainable (`response_mask` 1) in one row only. Any further keyword is an extra column.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="allow", frozen=True)

    agent: ShortText | None = None
    reward: FiniteFloat | None = None  # of this row; None = the trajectory's reward

    input_ids: _column_field("input_ids")
    response_mask: _column_field("response_mask")
    rollout_log_probs: _column_field("rollout_log_probs") = None
    old_log_probs: _column_field("old_log_probs") = None
    ref_log_probs: _column_field("ref_log_probs") = None
    teacher_log_probs: _column_field("teacher_log_probs") = None
    values: _column_field("values") = None
    token_level_rewards: _column_field("token_level_rewards") = None
    sum_pi_squared: _column_field("sum_pi_squared") = None
    versions: _column_field("versions") = None
    advantages: _column_field("advantages") = None
    returns: _column_field("returns") = None
    raw_advantages: _column_field("raw_advantages") = None
    rollout_is_weights: _column_field("rollout_is_weights") = None

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        length = len(self)
        for name in (*KNOWN_COLUMNS, *OUTPUT_COLUMNS):
            array = getattr(self, name)
            if array is not None and len(array) != length:
                raise ValueError(f"{name} has {len(array)} values, input_ids has {length}: one per token")
        extras = self.__pydantic_extra__ or {}
        if len(extras) > MAX_COLUMNS:
            raise ValueError(f"has {len(extras)} extra columns, at most {MAX_COLUMNS} are allowed")
        for name, value in extras.items():
            if not COLUMN_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no column name: letters, digits, '_' and '.', at most 64")
            extras[name] = _extra_column(name, value, length)
        return self

    def __len__(self) -> int:
        """T: the number of tokens, prompt and response."""
        return len(self.input_ids)

    @property
    def columns(self) -> dict[str, Array]:
        """Known columns that are present, in their fixed order."""
        names = (*KNOWN_COLUMNS, *OUTPUT_COLUMNS)
        return {name: array for name in names if (array := getattr(self, name)) is not None}

    @property
    def extras(self) -> dict[str, Column]:
        """Extra columns, carried through untouched."""
        return self.__pydantic_extra__ or {}


def _extra_column(name: str, value: Any, length: int) -> Column:
    try:
        if isinstance(value, Mapping):
            value = Column.model_validate(value)
        if not isinstance(value, Column):
            array = extra_array(value)
            value = Column.model_construct(data=array, per_token=len(array) == length)
    except ValueError as error:
        raise ValueError(f"extra column {name} {first_problem(error)}") from error
    if value.per_token and len(value.data) != length:
        raise ValueError(f"extra column {name} has {len(value.data)} entries, input_ids has {length}")
    return value


class Step(BaseModel):
    """One turn of an agent: a span of tokens in a row, what it earned, and the state it acted in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    row: Annotated[int, Field(ge=0, lt=MAX_ROWS)] = 0
    start: Annotated[int, Field(ge=0)]
    end: Annotated[int, Field(gt=0)]  # exclusive
    reward: FiniteFloat = 0.0
    state_key: ShortText | None = None  # hash of the observation; equal keys share a state group (GiGPO)


class Trajectory(BaseModel):
    """One rollout of one prompt, pushed whole: the unit of identity, completion, ledger and staleness.

    Identity is (run, group_id, rollout_index). `reward` None means unscorable (ends its place, outside all
    statistics); leaving it out means a scorer or `producer.score` brings it later.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    group_id: GroupId
    group_size: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)]
    rollout_index: Annotated[int, Field(ge=0, lt=2 * MAX_GROUP_SIZE)]
    reward: FiniteFloat | None = None
    rewards: dict[ShortText, FiniteFloat] = Field(default_factory=dict, max_length=64)
    status: Status = Status.COMPLETED
    model_version: Version | tuple[Version, Version] | None = None  # a number, or [start, end]
    data_source: ShortText | None = None
    role: Role = Role.TRAIN
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    steps: list[Step] = Field(default_factory=list, max_length=MAX_STEPS)
    rows: list[Row] = Field(default_factory=list, max_length=MAX_ROWS)
    batch: Version | None = None  # output: the batch (version) it was delivered in
    staleness: Version | None = None  # output: batch minus the oldest version it was generated by

    @model_validator(mode="before")
    @classmethod
    def _single_row_at_top_level(cls, data: Any) -> Any:
        """A single row's columns stand at top level in a file: gather them into `rows`."""
        if not isinstance(data, Mapping):
            return data
        columns = {name: value for name, value in data.items() if name not in cls.model_fields}
        if not columns:
            return data
        if data.get("rows"):
            raise ValueError(f"{next(iter(columns))!r} stands beside rows: move it into a row or remove it")
        missing = [name for name in REQUIRED_COLUMNS if name not in columns]
        if len(missing) == len(REQUIRED_COLUMNS):
            raise ValueError(f"unknown field {next(iter(columns))!r}: columns need input_ids and response_mask")
        rest = {name: value for name, value in data.items() if name in cls.model_fields}
        return {**rest, "rows": [columns]}

    @model_validator(mode="after")
    def _check_structure(self) -> Self:
        if isinstance(self.model_version, tuple) and self.model_version[0] > self.model_version[1]:
            raise ValueError(f"model_version {list(self.model_version)} ends before it starts")
        if self.status.usable and not self.rows:
            raise ValueError(f"status {self.status} needs at least one row with input_ids and response_mask")
        names = {(*row.columns, *row.extras) for row in self.rows}
        if len(names) > 1:
            raise ValueError("rows differ in their columns: give every row the same ones")
        for position, step in enumerate(self.steps):
            if step.row >= len(self.rows):
                raise ValueError(f"steps.{position}.row is {step.row}, there are {len(self.rows)} rows")
            if not step.start < step.end <= len(self.rows[step.row]):
                raise ValueError(
                    f"steps.{position} spans {step.start}..{step.end}, its row has {len(self.rows[step.row])} tokens"
                )
        return self

    @property
    def scored(self) -> bool:
        """Whether a reward (or the statement that there is none) came with the trajectory."""
        return "reward" in self.model_fields_set

    @property
    def num_tokens(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def version_span(self) -> tuple[int, int] | None:
        """Oldest and newest policy version over trainable tokens; None when the source has no version."""
        spans: list[tuple[int, int]] = []
        for row in self.rows:
            if row.versions is not None:
                trained = row.versions[row.response_mask == 1]
                if trained.size:
                    spans.append((max(0, int(trained.min())), max(0, int(trained.max()))))
        if spans:
            return min(start for start, _ in spans), max(end for _, end in spans)
        if isinstance(self.model_version, tuple):
            return self.model_version
        return None if self.model_version is None else (self.model_version, self.model_version)

    def to_json(self) -> dict[str, Any]:
        """The interchange form: lists for arrays, a single row at top level, nothing that is absent."""
        record = self.model_dump(mode="json", exclude={"rows"}, exclude_defaults=True)
        if self.scored:
            record["reward"] = self.reward
        rows = [row.model_dump(mode="json", exclude_none=True) for row in self.rows]
        if len(rows) == 1 and not {"agent", "reward"} & rows[0].keys():
            return {**record, **rows[0]}
        return {**record, "rows": rows} if rows else record


def parse_trajectory(data: Any, where: str = "trajectory") -> Trajectory:
    """Validate `data` (a mapping in interchange form or with arrays).

    Raises TrajectoryError with one line: `where`, the field and what it needs.
    """
    try:
        return Trajectory.model_validate(data)
    except ValidationError as error:
        raise TrajectoryError(f"{where}: {first_problem(error)}") from error


def first_problem(error: ValueError) -> str:
    """The first problem of a validation error on one line: `field.path: what is wrong`."""
    if not isinstance(error, ValidationError):
        return str(error)
    problem = error.errors(include_url=False, include_input=True)[0]
    message = problem["msg"].removeprefix("Value error, ")
    path = ".".join(str(part) for part in problem["loc"])
    value = problem.get("input")
    if problem["type"] not in ("value_error", "missing") and isinstance(value, str | int | float | None):
        message = f"{message} (got {value!r})"
    return f"{path}: {message}" if path else message


def trajectory_json_schema() -> dict[str, Any]:
    """JSON schema of one line of an interchange file: a row's columns at top level, or `rows`."""
    schema = Trajectory.model_json_schema(mode="validation")
    row = schema["$defs"]["Row"]
    flat = {name: value for name, value in row["properties"].items() if name not in ("agent", "reward")}
    schema["properties"] |= flat
    schema["additionalProperties"] = {"$ref": "#/$defs/ExtraColumn"}
    row["additionalProperties"] = {"$ref": "#/$defs/ExtraColumn"}
    schema["$defs"]["ExtraColumn"] = {
        "title": "ExtraColumn",
        "description": "Any further column: carried through to the trainer, not interpreted.",
        "anyOf": [{"type": "array"}, {"$ref": "#/$defs/Column"}],
    }
    schema["$defs"].setdefault("Column", Column.model_json_schema())
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "streamadv trajectory"
    return schema


