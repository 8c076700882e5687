"""Arguments of the trainer queue, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import SettingError
from ..messages import brief

MAX_URI_CHARS: Final = 2048


def check_arguments(
    rank: int,
    world_size: int,
    mark: str,
    commit: str,
    durability_window: float,
    **counts: tuple[int | None, int],
) -> None:
    """Raise SettingError for an argument out of range. counts: the others, with the least value of each."""
    if not 0 <= rank < world_size:
        raise SettingError(f"rank is {rank}, needs 0 <= rank < world_size ({world_size})")
    for name, (value, least) in counts.items():
        if value is not None and value < least:
            raise SettingError(f"{name} is {value}, needs {least} or more")
    (min_groups, _), (batch_groups, _) = counts["min_groups"], counts["batch_groups"]
    if min_groups and batch_groups and min_groups > batch_groups:
        raise SettingError(f"min_groups is {min_groups}, needs batch_groups ({batch_groups}) or less")
    if mark not in ("auto", "explicit"):
        raise SettingError(f"mark is {mark!r}, needs 'auto' or 'explicit'")
    if commit not in ("each_batch", "manual"):
        raise SettingError(f"commit is {commit!r}, needs 'each_batch' or 'manual'")
    if not durability_window >= 0:
        raise SettingError(f"durability_window is {durability_window}, needs 0 or more seconds")


def check_weights(uri: str | None) -> None:
    """Raise SettingError unless it is None or a URI that fits into one line."""
    if uri is not None and not (isinstance(uri, str) and 0 < len(uri) <= MAX_URI_CHARS and uri.isprintable()):
        raise SettingError(f"weights is {brief(uri)}, needs a URI of at most {MAX_URI_CHARS} characters")


def check_state(state: Mapping[str, Any], run: str) -> None:
    """Raise SettingError unless `state` is what `state_dict` of a queue of this run returned."""
    if not isinstance(state, Mapping):
        raise SettingError(f"state is {brief(state)}: give what state_dict() returned")
    missing = {"run", "version", "groups"} - state.keys()
    if missing:
        raise SettingError(f"state has no {sorted(missing)[0]!r}: give what state_dict() returned")
    if state["run"] != run:
        raise SettingError(
            f"state is of run {state['run']!r}, this queue reads {run!r}: load the state of a checkpoint of this run, "
            "or none where the run begins with those weights"
        )
