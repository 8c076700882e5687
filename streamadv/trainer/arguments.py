"""Checks the arguments of the trainer queue."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from ..batch.progress import STATE_FORMAT
from ..errors import SettingError
from ..messages import brief
from ..prompts.spec import is_number

MAX_URI_CHARS: Final = 2048


def check_arguments(
    rank: int,
    world_size: int,
    batch_groups: int,
    min_groups: int | None,
    mark: object,
    commit: object,
    numbers: Mapping[str, object],
    flags: Mapping[str, object],
) -> None:
    """Raise SettingError for an argument of a wrong type or out of range. numbers: not negative."""
    if rank >= world_size:
        raise SettingError(f"rank is {rank}, needs 0 <= rank < world_size ({world_size})")
    if min_groups is not None and min_groups > batch_groups:
        raise SettingError(f"min_groups is {min_groups}, needs batch_groups ({batch_groups}) or less")
    if mark not in ("auto", "explicit"):
        raise SettingError(f"mark is {brief(mark)}, needs 'auto' or 'explicit'")
    if commit not in ("each_batch", "manual"):
        raise SettingError(f"commit is {brief(commit)}, needs 'each_batch' or 'manual'")
    for name, number in numbers.items():
        if not is_number(number) or number < 0:
            raise SettingError(f"{name} is {brief(number)}, needs a number, 0 or more")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise SettingError(f"{name} is {brief(flag)}, needs True or False")


def check_weights(uri: str | None) -> None:
    """Raise SettingError unless it is None or a URI that fits into one line."""
    if uri is not None and not (isinstance(uri, str) and 0 < len(uri) <= MAX_URI_CHARS and uri.isprintable()):
        raise SettingError(f"weights is {brief(uri)}, needs a URI of at most {MAX_URI_CHARS} characters")


def check_quotas(quotas: object) -> dict[str, float]:
    """The weights, {} for None. Raises SettingError for what is no mapping of sources to numbers above 0."""
    if quotas is None:
        return {}
    if not isinstance(quotas, Mapping) or not quotas:
        raise SettingError(f"quotas is {brief(quotas)}, needs a mapping of data sources to weights, or None")
    for source, weight in quotas.items():
        if not isinstance(source, str) or not is_number(weight) or weight <= 0:
            raise SettingError(f"quotas[{brief(source)}] is {brief(weight)}, needs a number above 0")
    return {source: float(weight) for source, weight in quotas.items()}


def check_folder(folder: object) -> None:
    """Raise SettingError for what is no path."""
    if not isinstance(folder, str | os.PathLike):
        raise SettingError(f"folder is {brief(folder)}, needs a path")


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def check_state(state: Mapping[str, Any], run: str) -> None:
    """Raise SettingError unless `state` is what `state_dict` of a queue of this run returned."""
    if not isinstance(state, Mapping):
        raise SettingError(f"state is {brief(state)}: give what state_dict() returned")
    missing = {"run", "version", "groups"} - state.keys()
    if missing:
        raise SettingError(f"state has no {sorted(missing)[0]!r}: give what state_dict() returned")
    if not _is_whole(state.get("format", STATE_FORMAT)) or state.get("format", 1) > STATE_FORMAT:
        raise SettingError(
            f"state has format {brief(state['format'])}, this release reads up to {STATE_FORMAT}: use the release that "
            "has written it, or a later one"
        )
    if not _is_whole(state["version"]):
        raise SettingError(
            f"version of the state is {brief(state['version'])}: give what state_dict() returned"
        )
    groups = state["groups"]
    if not (isinstance(groups, list) and all(isinstance(group_id, str) for group_id in groups)):
        raise SettingError("groups of the state are no list of ids: give what state_dict() returned")
    if state["run"] != run:
        raise SettingError(
            f"state is of run {state['run']!r}, this queue reads {run!r}: load the state of a checkpoint of this run, "
            "or none where the run begins with those weights"
        )
