"""Reads the replies of scripts that may open a group (`begin`, `push`, `cancel`): refusals, errors, codes.

A reply is a list whose first item is the state: ok, open, ended, busy, mismatch, layout or broken. See the headers of
the scripts and `lua/lib/admit.lua`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, Final

from ..errors import Busy, GroupEndedError, RunEndedError, SettingError, TrajectoryError
from ..store.reasons import Reason
from ..trajectory.packet import Packet
from ..trajectory.packet_encoding import select_members
from .tickets import GroupSpec

Reply = Sequence[Any]


class OtherSizeError(TrajectoryError):
    """The group is open with another size than the caller's."""

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


#: A byte budget that opens no group; groups that are open go on.
NO_ROOM: Final = -1
LOST_GROUPS_FIRST: Final = Reason(
    "lost_groups_first", "there is no room yet for groups that the server has lost"
)
NO_WEIGHTS: Final = Reason("no_weights", "no trainer has named weights yet")


def announcement(reply: Reply) -> bytes:
    """Of a reply `busy`: the last announcement of the trainer, see `lua/lib/announce.lua`; b"" before the first."""
    return bytes(reply[-1])


def is_over_share(reply: Reply) -> bool:
    """Whether a shard has its share of the groups that may be ahead of the trainer."""
    return list(reply[:2]) == [b"busy", b"max_staleness"]


def check_group_reply(reply: Reply, spec: GroupSpec) -> None:
    """Raise what a reply says of the group that no waiting changes.

    Raises RunEndedError, GroupEndedError (somebody else wrote into its hash), TrajectoryError (it is open with another
    size or role), SettingError (it needs more than the whole byte budget).
    """
    if reply[0] == b"broken":
        raise GroupEndedError(
            f"group {spec.group_id} is not what was opened, somebody wrote into it: begin another one"
        )
    if reply[0] == b"over":
        raise RunEndedError(
            f"group {spec.group_id} is not begun: the trainer has ended the run; stop, or start a trainer on it again"
        )
    if reply[0] == b"mismatch":
        size, role = int(reply[1]), reply[2].decode(errors="replace")
        if size == spec.size:
            raise TrajectoryError(
                f"role is {spec.role}, group {spec.group_id} is open with role {role}: evaluate in groups of their "
                "own, begun with role='eval'"
            )
        raise OtherSizeError(f"group_size is {spec.size}, group {spec.group_id} is open with {size}", size)
    if list(reply[:2]) == [b"busy", b"group_bytes"]:
        slot_bytes, limit = int(float(reply[2])), int(float(reply[3]))
        raise SettingError(
            f"max_bytes allows {limit} bytes a shard, one group of {spec.slots} reserves "
            f"{spec.slots * slot_bytes + spec.columns} ({slot_bytes} a rollout, by what the run's trajectories have "
            f"needed, max_trajectory_bytes until some are known): raise max_bytes, or lower max_trajectory_bytes "
            "or the group size"
        )


def refusal(reply: Reply, shard: int | None = None) -> Reason:
    """Why a group was not admitted, from a reply `busy`. shard: which one refused, where there are several."""
    name, used, limit, *figures = (part.decode() if isinstance(part, bytes) else part for part in reply[1:-1])
    where = "" if shard is None else f"shard {shard}: "
    if name == "maxmemory":
        return Reason("maxmemory", "the server is above its maxmemory")
    if name == "archive":
        return Reason("archive", f"{where}{used} bytes of ended groups are kept, keep_bytes allows {limit}")
    if name == "max_staleness":
        return Reason("pacing", f"{used} groups begun and not yet trained, max_staleness allows {limit}")
    if float(limit) == NO_ROOM:
        return LOST_GROUPS_FIRST
    text = f"{where}{used} bytes live or reserved of max_bytes {limit}"
    open_groups, logged, moving, batch_groups, slot_bytes = (int(float(figure or 0)) for figure in figures)
    if shard is None and not open_groups and not moving and logged < batch_groups:
        return Reason("batch_over_budget", f"{text} by {logged} groups, batch_groups is {batch_groups}")
    return Reason(
        "max_bytes",
        f"{text}, {open_groups} groups are open and {logged} wait for their training or commit; an open rollout "
        f"reserves {slot_bytes}",
    )


def busy_error(reason: Reason, run: str, timeout: float | None = None) -> Busy:
    """Busy for a refusal, after `timeout` seconds of waiting."""
    waited = "" if timeout is None else f" after {timeout:g} s"
    return Busy(f"run {run}: not admitted{waited}: {reason.line(run)}", (reason.name, reason.text))


def unregistered(packets: Sequence[Packet], reply: Reply, codes: dict[int, str]) -> list[Packet]:
    """What has to be sent once more, given the reply `ok` of `push` to a group's packets.

    The reply says of each member, in the order of sending: pushed (all, where it has no codes), duplicate, surplus,
    late or range, which is added to `codes`, by position. Or `again`: the server refuses a packet whole if another
    member is a duplicate, or part of its payload would belong to nobody; these members go without it. Or `lost`: the
    payload ended before the script saw it, by its time to live.
    """
    if len(reply) == 1:
        for packet in packets:
            codes |= dict.fromkeys(packet.positions, "pushed")
        return []
    replied = [code.decode() for code in reply[1:]]
    if "again" not in replied and "lost" not in replied:
        codes |= zip(chain.from_iterable([packet.positions for packet in packets]), replied, strict=True)
        return []
    waiting = []
    rest = iter(replied)
    for packet in packets:
        of_packet = list(islice(rest, len(packet.indices)))
        chosen = [member for member, code in enumerate(of_packet) if code in ("again", "lost")]
        if len(chosen) == len(of_packet):
            waiting.append(packet)
        elif chosen:
            waiting.append(select_members(packet, chosen))
        codes |= {
            position: code
            for position, code in zip(packet.positions, of_packet, strict=True)
            if code not in ("again", "lost")
        }
    return waiting


def cancelled_slots(reply: Reply) -> tuple[list[int], str | None]:
    """Slots that a reply of `cancel` has cancelled; for a group that had ended none, and why: surplus or late."""
    if reply[0] == b"ended":
        return [], reply[1].decode()
    return [int(index) for index in reply[1:]], None
