"""What a producer reads out of the replies of `begin.lua` and `push.lua`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .. import metrics
from ..errors import Busy, GroupEndedError, SettingError, TrajectoryError
from ..store.reasons import Reason

LOST_GROUPS_FIRST: Final = Reason(
    "lost_groups_first", "there is no room yet for groups that the server has lost"
)
NO_ROOM: Final = -1  # a budget that opens no group; those that are open go on


def refusal(reply: Sequence[Any], shard: int | None = None) -> Reason:
    """Why a group was not admitted. shard: which one refused, where there are several."""
    name, used, limit, *figures = (part.decode() if isinstance(part, bytes) else part for part in reply[1:])
    where = "" if shard is None else f"shard {shard}: "
    if name == "maxmemory":
        return Reason("maxmemory", "the server is above its maxmemory")
    if name == "max_staleness":
        text = f"{used} groups begun and not yet trained, max_staleness allows {limit}"
        return Reason("pacing", text)
    if float(limit) == NO_ROOM:
        return LOST_GROUPS_FIRST
    text = f"{where}{used} bytes live or reserved of max_bytes {limit}"
    open_groups, logged, moving, batch_groups = (int(figure or 0) for figure in figures)
    if shard is None and not open_groups and not moving and logged < batch_groups:
        return Reason("batch_over_budget", f"{text} by {logged} groups, batch_groups is {batch_groups}")
    return Reason(
        "max_bytes", f"{text}, {open_groups} groups are open and {logged} wait for their training or commit"
    )


def busy_error(reply: Sequence[Any], timeout: float | None, shard: int | None = None) -> Busy:
    """Busy with the figures of a refusal."""
    waited = "" if timeout is None else f" after {timeout:g} s"
    reason = refusal(reply, shard)
    return Busy(f"not admitted{waited}: {reason}", (reason.name, reason.text))


def check_room(reply: Sequence[bytes], places: int) -> None:
    """Raises SettingError for a group refused because it needs more than the whole budget: it would wait for ever."""
    if reply[1] != b"group_bytes":
        return
    each, limit = int(float(reply[2])), int(float(reply[3]))
    raise SettingError(
        f"max_bytes allows {limit} bytes a shard, one group of {places} reserves {places * each} ({each} a rollout, by "
        f"what the run's trajectories have needed, max_trajectory_bytes until some are known): raise max_bytes, or "
        f"lower max_trajectory_bytes or the group size"
    )


def broken_group_error(group_id: str) -> GroupEndedError:
    """To raise for an open group whose hash no script of the run has left so."""
    return GroupEndedError(
        f"group {group_id} is not what was opened, somebody wrote into it: begin another one"
    )


def push_codes(reply: list[Any], group_id: str, size: int, places: int) -> list[str]:
    """What the push script says of each record.

    Raises Busy, SettingError (no room for such a group), TrajectoryError (group_size), GroupEndedError.
    """
    state = reply[0].decode()
    if state == "busy":
        check_room(reply, places)
        raise busy_error(reply, None)
    if state == "mismatch":
        raise TrajectoryError(f"group_size is {size}, group {group_id} is open with {int(reply[1])}")
    if state == "broken":
        raise broken_group_error(group_id)
    codes = [code.decode().partition(" ")[0] for code in reply[1:]]
    metrics.producer_pushed(codes)
    if "range" in codes:
        raise TrajectoryError(f"record {codes.index('range')}: group {group_id} has no such place left")
    return codes
