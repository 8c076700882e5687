"""The run manifest: what all processes of a run must agree on.

The first process given a value writes it; one without takes it; a different value is an error naming both.
Shards, salts and the schema version are fixed when the run is created.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    model_validator,
)

from .errors import ManifestMismatchError, SettingError
from .keys import (
    RUNS,
    RUNS_VOID,
    RunKeys,
    check_run_name,
    find_salt,
    manifest_key,
    void_key,
)
from .problems import first_problem
from .schema import MAX_GROUP_SIZE
from .scripts import ScriptCall, script_call
from .wire import SCHEMA_VERSION

ScorerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]

#: Shared by every process of a run; None stands for "not given" and is never written.
DEFAULTS: Final[dict[str, Any]] = {
    "group_deadline_s": 3600.0,
    "redundancy": 0,
    "partial_min_usable": None,
    "zero_variance_filter": False,
    "difficulty_low": None,
    "difficulty_high": None,
    "scorers": (),
    "max_trajectory_bytes": 4 << 20,
    "max_bytes": None,
    "dedupe_groups": 1_000_000,
    "dead_bytes": 256 << 20,
}


class RunSettings(BaseModel):
    """Settings of a run, as given by one process. A field left at None takes what the manifest says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shards: Annotated[int, Field(ge=1, le=1024)] | None = None  # fixed at creation; default 1
    group_deadline_s: Annotated[float, Field(gt=0, le=30 * 86400)] | None = None  # from opening
    redundancy: Annotated[int, Field(ge=0, le=MAX_GROUP_SIZE)] | None = None  # places beyond group_size
    partial_min_usable: Annotated[int, Field(ge=1)] | None = None  # train a short group from so many on
    zero_variance_filter: bool | None = None  # drop groups whose rewards are all equal
    difficulty_low: FiniteFloat | None = None  # drop groups with mean reward <= this
    difficulty_high: FiniteFloat | None = None  # drop groups with mean reward >= this
    scorers: tuple[ScorerName, ...] | None = None  # visited in this order by trajectories without reward
    max_trajectory_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] | None = None
    max_bytes: Annotated[int, Field(ge=1 << 20)] | None = None  # of the run; default from the server's memory
    dedupe_groups: Annotated[int, Field(ge=1)] | None = None  # ended groups remembered per shard
    dead_bytes: Annotated[int, Field(ge=0)] | None = None  # payloads of dead letters kept per shard

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.difficulty_low, self.difficulty_high
        if low is not None and high is not None and low >= high:
            raise ValueError(f"difficulty_low {low} is not below difficulty_high {high}")
        if self.scorers is not None and len(set(self.scorers)) < len(self.scorers):
            raise ValueError(f"scorers {', '.join(self.scorers)}: name each once")
        return self

    @property
    def given(self) -> dict[str, Any]:
        """What was set, as it goes into the manifest; `shards` apart, which is resolved first."""
        return self.model_dump(mode="json", exclude_none=True, exclude={"shards"})


class Manifest(BaseModel):
    """The manifest as read: every setting resolved."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    keys: RunKeys
    group_deadline_s: float
    redundancy: int
    partial_min_usable: int | None
    zero_variance_filter: bool
    difficulty_low: float | None
    difficulty_high: float | None
    scorers: tuple[str, ...]
    max_trajectory_bytes: int
    max_bytes: int | None
    dedupe_groups: int
    dead_bytes: int
    columns: dict[str, str]  # extra column -> JSON of [dtype, shape, per_token]

    @property
    def policy_args(self) -> list[Any]:
        """The group policy as the scripts take it: see `lua/lib/complete.lua`."""
        return [
            _text(self.partial_min_usable),
            "1" if self.zero_variance_filter else "0",
            _text(self.difficulty_low),
            _text(self.difficulty_high),
            self.dedupe_groups,
        ]


def manifest_call(
    run: str, settings: RunSettings | None, columns: Mapping[str, str] | None = None
) -> ScriptCall:
    """Read the manifest, writing what `settings` give and nobody gave before."""
    check_run_name(run)
    settings = settings or RunSettings()
    shards = settings.shards or 1
    salts = [find_salt(run, shard, shards) for shard in range(shards)]
    fields: dict[str, str] = {"schema_version": json.dumps(SCHEMA_VERSION), "salts": json.dumps(salts)}
    fields |= {name: json.dumps(value) for name, value in settings.given.items()}
    fields |= {f"column.{name}": kind for name, kind in (columns or {}).items()}
    keys = [void_key(run), manifest_key(run)]
    return script_call("manifest", keys, [part for pair in fields.items() for part in pair])


def parse_manifest(run: str, settings: RunSettings | None, reply: list[bytes]) -> Manifest:
    """The manifest from the reply of `manifest_call`.

    Raises ManifestMismatchError when a given value differs from the written one, SettingError for a run of
    another schema version.
    """
    stored = {name.decode(): value.decode() for name, value in zip(reply[::2], reply[1::2], strict=True)}
    version = json.loads(stored["schema_version"])
    if version != SCHEMA_VERSION:
        raise SettingError(
            f"run {run} has schema version {version}, this release reads {SCHEMA_VERSION}: use another run name"
        )
    salts = tuple(json.loads(stored["salts"]))
    given = {} if settings is None else settings.given
    if settings is not None and settings.shards is not None and settings.shards != len(salts):
        raise ManifestMismatchError(f"shards is {settings.shards}, run {run} was created with {len(salts)}")
    values: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        values[name] = json.loads(stored[name]) if name in stored else default
        if name in given and given[name] != values[name]:
            raise ManifestMismatchError(
                f"{name} is {given[name]}, run {run} was created with {values[name]}: "
                f"leave it out, or use another run name"
            )
    columns = {
        name.removeprefix("column."): kind for name, kind in stored.items() if name.startswith("column.")
    }
    return Manifest(keys=RunKeys(run, salts), columns=columns, **values)


def register_call(run: str) -> ScriptCall:
    """Put the run on the server's list of runs."""
    return script_call("register", [RUNS_VOID, RUNS], [run])


def run_settings(**values: Any) -> RunSettings:
    """RunSettings from flags or keywords. Raises SettingError on one line."""
    try:
        return RunSettings(**values)
    except ValueError as error:  # pydantic's, or a lone surrogate in a key
        raise SettingError(f"run settings: {first_problem(error)}") from error


def _text(value: float | None) -> str:
    return "" if value is None else repr(value)
