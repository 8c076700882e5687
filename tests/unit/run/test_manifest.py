"""The manifest: the first value given stands, another one is an error naming both."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from streamadv.errors import ManifestMismatchError, SettingError
from streamadv.run import find_run, open_run
from streamadv.run.manifest import DEFAULTS, RunSettings
from streamadv.store.connection import Connection
from streamadv.store.keys import EntryKeys

VALUES: dict[str, tuple[Any, Any]] = {
    "group_deadline_s": (60, 61.5),
    "redundancy": (1, 2),
    "partial_min_usable": (3, 4),
    "zero_variance_filter": (True, False),
    "difficulty_low": (0.1, 0.2),
    "difficulty_high": (0.9, 0.8),
    "filter_by": ("correct", "style"),
    "scorers": (["a", "b"], ["b", "a"]),
    "max_trajectory_bytes": (1 << 20, 1 << 21),
    "max_bytes": (1 << 30, 1 << 31),
    "dedupe_groups": (10, 20),
    "dead_bytes": (1 << 20, 0),
    "keep_bytes": (1 << 20, 0),
    "keep": ({"trained": 0.5, "dropped": 0.2, "eval": 1.0, "dead": 1.0}, {"trained": 0.1}),
    "archive": (True, False),
    "tokenizer": ("a/tokenizer.json", "b"),
    "batch_groups": (8, 16),
    "max_staleness": (0, 4),
}


def test_help_tells_what_each_setting_is() -> None:
    for name, field in RunSettings.model_fields.items():
        assert f"\n{name}: {field.description}.\n" in f"{RunSettings.__doc__}\n"


def test_every_setting_of_a_run_is_tried_here() -> None:
    assert VALUES.keys() == DEFAULTS.keys() == RunSettings.model_fields.keys() - {"shards"}


@pytest.mark.parametrize("name", VALUES)
def test_the_first_value_given_stands(fake: Connection, name: str) -> None:
    first, other = VALUES[name]
    early = open_run(fake, "r")
    assert getattr(early.manifest, name) == DEFAULTS[name]
    assert getattr(open_run(fake, "r", RunSettings(**{name: first})).manifest, name) == (
        tuple(first) if isinstance(first, list) else first
    )
    open_run(fake, "r", RunSettings(**{name: first}))
    with pytest.raises(ManifestMismatchError, match=name) as error:
        open_run(fake, "r", RunSettings(**{name: other}))
    for value in (first, other):
        assert str(value).split(".")[0] in str(error.value)
    early.refresh()
    assert getattr(early.manifest, name) != DEFAULTS[name]


def test_shards_are_fixed_when_the_run_is_created(fake: Connection) -> None:
    assert len(open_run(fake, "r", RunSettings(shards=3)).keys.shards) == 3
    assert open_run(fake, "r").keys == open_run(fake, "r", RunSettings(shards=3)).keys
    with pytest.raises(ManifestMismatchError, match="shards is 2, run r was created with 3"):
        open_run(fake, "r", RunSettings(shards=2))


def test_runs_do_not_share_settings(fake: Connection) -> None:
    open_run(fake, "a", RunSettings(shards=3, redundancy=2))
    other = open_run(fake, "b")
    assert (len(other.keys.shards), other.manifest.redundancy) == (1, 0)


@pytest.mark.parametrize("version", [2, 99])  # in 2 deadlines are by the server's clock
def test_another_schema_version_is_refused(fake: Connection, version: int) -> None:
    open_run(fake, "r")
    fake.scripts.hset(EntryKeys("r").manifest, "schema_version", json.dumps(version))
    with pytest.raises(SettingError, match=f"schema version {version}, this release reads 3: finish it"):
        open_run(fake, "r")


def test_only_existing_runs_are_found(fake: Connection) -> None:
    with pytest.raises(SettingError, match="'r' does not exist"):
        find_run(fake, "r")
    assert not fake.scripts.keys("*")
    open_run(fake, "r", RunSettings(shards=2))
    assert len(find_run(fake, "r").keys.shards) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shards": 0}, "shards"),
        ({"shards": 4000}, "shards"),
        ({"group_deadline_s": 0}, "group_deadline_s"),
        ({"group_deadline_s": float("nan")}, "group_deadline_s"),
        ({"redundancy": -1}, "redundancy"),
        ({"partial_min_usable": 0}, "partial_min_usable"),
        ({"difficulty_low": 0.9, "difficulty_high": 0.1}, "difficulty_low 0.9 is not below"),
        ({"difficulty_low": float("inf")}, "difficulty_low"),
        ({"scorers": ["a b"]}, "scorers"),
        ({"scorers": ["a", "a"]}, "scorers"),
        ({"max_trajectory_bytes": 10}, "max_trajectory_bytes"),
        ({"max_bytes": 10}, "max_bytes"),
        ({"max_byte": 1 << 30}, "did you mean max_bytes?"),
    ],
    ids=str,
)
def test_wrong_settings_are_one_line_naming_the_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=re.escape(message)) as error:
        RunSettings(**values)
    assert "\n" not in str(error.value)
