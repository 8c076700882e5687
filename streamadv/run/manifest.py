"""The run manifest: the settings that all processes of a run must agree on.

The first process that has a value for a setting writes it. A process without a value takes the one there, even if it
runs already. A process with a different value stops with an error that names both. Shards, salts and the schema
version are fixed when the run is created. If a server has lost the manifest, every process writes back the whole
manifest that it knows; it stops if it finds another manifest there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ModelWrapValidatorHandler,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ..errors import ManifestMismatchError, SettingError
from ..messages import brief, first_problem, size_or_other, unknown_field
from ..store.keys import EntryKeys, RunKeys, check_run_name, find_salt
from ..store.scripts import ScriptCall, script_call
from ..trajectory.fields import ShortText
from ..trajectory.packet import REWARD, SCHEMA_VERSION
from ..trajectory.schema import MAX_GROUP_SIZE

Size = Annotated[int, BeforeValidator(size_or_other)]  # also as "4gb"
ScorerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]

MAX_SHARDS: Final = 1024
#: Longest time that a group may stay open.
MAX_DEADLINE_S: Final = 30 * 86400

#: Kinds of groups of which a share is kept, with the default.
KEPT_KINDS: Final[dict[str, float]] = {"trained": 0.05, "dropped": 0.2, "eval": 1.0, "dead": 1.0}


def _with_all_kinds(shares: dict[str, float]) -> dict[str, float]:
    if problem := unknown_field(shares, KEPT_KINDS):
        raise ValueError(problem)
    return {**KEPT_KINDS, **shares}


#: What a message about settings of a run begins with.
_OF_RUN: Final = "run settings: "


#: Settings that what is stored was made with.
FIXED: Final = frozenset({"shards", "redundancy", "filter_by", "scorers"})


class RunSettings(BaseModel):
    """Settings of a run, as given by one process. A field left at None takes what the manifest says.

    Raises SettingError for an unknown name, and for a value out of range or of another type.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS)] | None = Field(
        None, description="parts of the run, each in one cluster slot; fixed at creation"
    )
    group_deadline_s: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)] | None = Field(
        None, description="seconds from the opening of a group to its deadline"
    )
    redundancy: Annotated[int, Field(ge=0, le=MAX_GROUP_SIZE)] | None = Field(
        None, description="slots beyond group_size; the first group_size usable trajectories count"
    )
    partial_min_usable: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="train on a short group with so many usable members or more; none: drop all short groups",
    )
    zero_variance_filter: bool | None = Field(None, description="drop groups whose rewards are all equal")
    difficulty_low: FiniteFloat | None = Field(
        None, description="drop groups with a mean reward at or below this"
    )
    difficulty_high: FiniteFloat | None = Field(
        None, description="drop groups with a mean reward at or above this"
    )
    filter_by: ShortText | None = Field(
        None,
        description="what these filters judge instead of the reward: a named reward, or a number of this name in "
        "metadata; a push without it is an error",
    )
    scorers: Annotated[tuple[ScorerName, ...], Field(max_length=32)] | None = Field(
        None, description="processes that score trajectories pushed without reward, in this order"
    )
    max_trajectory_bytes: Annotated[Size, Field(ge=1024, le=1 << 30)] | None = Field(
        None,
        description="limit of all that is stored of one trajectory; admission reserves it for a rollout until eight "
        "trajectories are known",
    )
    max_bytes: Annotated[Size, Field(ge=1 << 20)] | None = Field(
        None,
        description="budget of the run; none: 0.7 x maxmemory of the server, or half of its machine's memory",
    )
    dedupe_groups: Annotated[int, Field(ge=1)] | None = Field(
        None, description="ended groups remembered, per shard"
    )
    dead_bytes: Annotated[Size, Field(ge=0)] | None = Field(
        None, description="payloads of dead letters kept, per shard; the oldest lose theirs first"
    )
    keep_bytes: Annotated[Size, Field(ge=0)] | None = Field(
        None,
        description="groups that have ended and are kept to be looked at, at most a tenth of maxmemory; the oldest go "
        "first; 0: none",
    )
    keep: (
        Annotated[dict[str, Annotated[float, Field(ge=0, le=1)]], AfterValidator(_with_all_kinds)] | None
    ) = Field(None, description="share of the groups that are kept: of those trained, dropped, eval and dead")
    archive: bool | None = Field(
        None,
        description="keep every group that ends until `streamadv archive` has it; while those it has not got fill "
        "keep_bytes, no group begins",
    )
    tokenizer: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        None,
        description="tokenizer.json, or its folder, by which people read tokens; the pipeline does not open it",
    )
    batch_groups: Annotated[int, Field(ge=1)] | None = Field(
        None, description="paces producers until a trainer brings its own"
    )
    max_staleness: Annotated[int, Field(ge=0)] | None = Field(
        None, description="likewise; none: until then only max_bytes limits them"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.difficulty_low, self.difficulty_high
        if low is not None and high is not None and low >= high:
            raise ValueError(f"difficulty_low {low} is not below difficulty_high {high}")
        if self.scorers is not None and len(set(self.scorers)) < len(self.scorers):
            raise ValueError(f"scorers {', '.join(self.scorers)}: name each once")
        return self

    @model_validator(mode="wrap")  # after all others, around them
    @classmethod
    def _on_one_line(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(values, Mapping) and (problem := unknown_field(values, cls.model_fields)):
            raise SettingError(f"{_OF_RUN}{problem}")
        try:
            return validate(values)
        except ValidationError as error:
            raise SettingError(f"{_OF_RUN}{first_problem(error)}") from None

    @property
    def _manifest_values(self) -> dict[str, Any]:
        """The fields that are not None, as JSON values, without `shards`: the manifest has salts instead."""
        return self.model_dump(mode="json", exclude_none=True, exclude={"shards"})


RunSettings.__doc__ = "\n".join(
    [f"{RunSettings.__doc__}\n"]
    + [f"{name}: {field.description}." for name, field in RunSettings.model_fields.items()]
)

_SALTS: Final = TypeAdapter(
    Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1, max_length=MAX_SHARDS)]
)
_COLUMN: Final = TypeAdapter(tuple[str, list[Annotated[int, Field(ge=0)]], bool])
_COLUMN_PREFIX: Final = "column."


class Manifest(BaseModel):
    """The manifest as read: every setting resolved."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    keys: RunKeys
    fields: dict[str, str]  # as they stand on the server, without those that are ignored
    ignored: tuple[str, ...]  # what somebody wrote that says nothing, one line each
    columns: dict[str, str]  # extra column -> JSON of [dtype, shape, per_token]
    # The settings, with their defaults. None stands for "not given" and is never written.
    group_deadline_s: float = 3600.0
    redundancy: int = 0
    partial_min_usable: int | None = None
    zero_variance_filter: bool = False
    difficulty_low: float | None = None
    difficulty_high: float | None = None
    filter_by: str = REWARD
    scorers: tuple[str, ...] = ()
    max_trajectory_bytes: int = 4 << 20
    max_bytes: int | None = None
    dedupe_groups: int = 1_000_000
    dead_bytes: int = 256 << 20
    keep_bytes: int = 256 << 20
    keep: dict[str, float] = KEPT_KINDS
    archive: bool = False
    tokenizer: str | None = None
    batch_groups: int | None = None
    max_staleness: int | None = None

    @property
    def policy_args(self) -> list[Any]:
        """The group policy as the scripts take it: see `lua/lib/close.lua`."""
        least, low, high = (
            "" if value is None else repr(value)
            for value in (self.partial_min_usable, self.difficulty_low, self.difficulty_high)
        )
        return [least, "1" if self.zero_variance_filter else "0", low, high, self.dedupe_groups]


#: Shared by every process of a run.
DEFAULTS: Final = {
    name: field.default for name, field in Manifest.model_fields.items() if name in RunSettings.model_fields
}


def manifest_call(
    run: str,
    settings: RunSettings,
    columns: Mapping[str, str] | None = None,
    before: Manifest | None = None,
) -> ScriptCall:
    """Read the manifest, after writing what this process knows of it or was given and nobody has written yet."""
    check_run_name(run)
    if before is None:
        shards = settings.shards or 1
        salts = [find_salt(run, shard, shards) for shard in range(shards)]
        fields = {"schema_version": json.dumps(SCHEMA_VERSION), "salts": json.dumps(salts)}
    else:
        fields = dict(before.fields)
    fields |= {name: json.dumps(value) for name, value in settings._manifest_values.items()}
    fields |= {f"{_COLUMN_PREFIX}{name}": kind for name, kind in (columns or {}).items()}
    return script_call("manifest", EntryKeys(run), [part for pair in fields.items() for part in pair])


def parse_manifest(
    run: str, settings: RunSettings | None, reply: list[Any], before: Manifest | None = None
) -> Manifest:
    """The manifest from the reply of `manifest_call`. before: what this process has worked with so far.

    Raises ManifestMismatchError when a given or known value differs from the written one, SettingError for a run of
    another schema version.
    """
    stored, ignored = dict[str, bytes](), list[str]()
    for name, value in zip(reply[1::2], reply[2::2], strict=True):
        try:
            stored[name.decode()] = value
        except UnicodeDecodeError:
            ignored.append(f"manifest field {brief(name)} is no UTF-8")
    salts = _layout(run, stored)
    if before is not None and before.keys.salts != salts:
        expected, actual = (
            f"{len(salts)} (salts {', '.join(map(str, salts[:8]))})" for salts in (before.keys.salts, salts)
        )
        raise ManifestMismatchError(
            f"shards is {expected} in this process, run {run} has {actual} now: {_ANEW}, delete the run and create it "
            f"again with `streamadv runs create --shards {len(before.keys.salts)} --run {run}`"
        )
    if settings is not None and settings.shards not in (None, len(salts)):
        raise ManifestMismatchError(f"shards is {settings.shards}, run {run} was created with {len(salts)}")
    values = _pop_unreadable(stored, ignored)
    fields = {name: value.decode(errors="backslashreplace") for name, value in stored.items()}
    if before is not None:
        for name, known in before.fields.items():
            if fields.get(name) != known:
                raise ManifestMismatchError(
                    f"{name} is {known} in this process, run {run} has {fields.get(name, 'none')} now: {_ANEW}, give "
                    f"all of them the same value"
                )
    if settings is not None:
        for name, given in settings._manifest_values.items():
            stands = list(values[name]) if isinstance(values[name], tuple) else values[name]
            if given != stands:
                has, remedy = "has", f"stop the run's processes and use `streamadv runs change --run {run}`"
                if name in FIXED:
                    has, remedy = "was created with", "use another run name"
                raise ManifestMismatchError(
                    f"{name} is {given}, run {run} {has} {stands}: leave it out, or {remedy}"
                )
    columns = {
        name.removeprefix(_COLUMN_PREFIX): kind
        for name, kind in fields.items()
        if name.startswith(_COLUMN_PREFIX)
    }
    return Manifest(
        keys=RunKeys(run, salts), fields=fields, ignored=tuple(ignored), columns=columns, **values
    )


def _pop_unreadable(stored: dict[str, bytes], ignored: list[str]) -> dict[str, Any]:
    """The value of every setting. Fields that cannot be read leave `stored`, with a line in `ignored`."""
    values = dict(DEFAULTS)
    for name in DEFAULTS.keys() & stored.keys():
        text, value, problem = stored[name], None, "no value"
        try:
            value = getattr(RunSettings.model_validate_json(b'{"%s": %s}' % (name.encode(), text)), name)
        except SettingError as error:
            problem = str(error).removeprefix(_OF_RUN)
        except ValidationError as error:  # no JSON at all
            problem = first_problem(error)
        if value is not None:
            values[name] = value
        else:
            ignored.append(f"manifest {name} is {brief(stored.pop(name))}: {problem}; {values[name]!r} holds")
    for name in [name for name in stored if name.startswith(_COLUMN_PREFIX)]:
        try:
            _COLUMN.validate_json(stored[name])
        except ValueError:
            ignored.append(f"manifest {brief(name)} is {brief(stored.pop(name))}: no kind of a column")
    return values


_ANEW: Final = (
    "it was changed, or its manifest was lost and another process, which did not know it, wrote a new one; "
    "stop all processes of the run"
)


def _layout(run: str, stored: Mapping[str, bytes]) -> tuple[int, ...]:
    """The salts of the run's shards. Raises SettingError for another schema version, or none that can be read."""
    try:
        version = int(json.loads(stored.get("schema_version", b"")))
        salts = tuple(_SALTS.validate_json(stored.get("salts", b"")))
    except (ValueError, TypeError, RecursionError):
        raise SettingError(
            f"run {run}: its manifest has no schema_version and salts that can be read, somebody wrote over it: "
            f"use another run name"
        ) from None
    if version != SCHEMA_VERSION:
        raise SettingError(
            f"run {run} has schema version {version}, this release reads {SCHEMA_VERSION}: finish it with a release of "
            f"version {version}, or write it to files with that (`streamadv dead requeue --all --run {run}`, "
            f"`streamadv consume --run {run}`) "
            f"and `streamadv replay` them into another run"
        )
    return salts


def given_settings(settings: RunSettings | None) -> RunSettings:
    """The settings that a process was given. Raises SettingError for anything else."""
    if settings is not None and not isinstance(settings, RunSettings):
        raise SettingError(f"settings is {brief(settings)}, needs streamadv.RunSettings(NAME=VALUE, ...)")
    return settings or RunSettings()
