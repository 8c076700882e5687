"""Pushes packets of a group in slices, cancels slots, brings scores; keeps them for a server that may lose them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from .. import doors, metrics, tracing
from ..errors import Busy, StreamadvError, TrajectoryError
from ..messages import check_number
from ..store.keys import ShardKeys
from ..store.reasons import Reason
from ..store.scripts import ScriptCall, script_call
from ..store.waiting import Blocked, Wait
from ..trajectory.members import STATUSES, Checked
from ..trajectory.packet_encoding import Packet, encode_packets, ended_packets, select_members
from ..trajectory.schema import Role, Trajectory
from .admission import ADMISSION_WAIT_S, Admission
from .extra_columns import ColumnsPush, GroupColumns, conform, kinds_of, read_columns
from .membership import SPEC_ARGS, Membership
from .records import check_one_group, check_roles
from .requests import (
    MAX_SLICE_MEMBERS,
    NO_ROOM,
    OUT_OF_MEMORY,
    STAGE,
    GroupCall,
    GroupPush,
    Push,
    Reply,
    Steps,
    busy_error,
    check_group_reply,
    is_over_share,
    refusal,
    slices,
)
from .resend import ResendWindow
from .sender import together
from .tickets import GroupSpec, PushResult, Ticket, check_score


class Pushes:
    """How a producer's records reach the server."""

    def __init__(self, membership: Membership, admission: Admission, resend: ResendWindow) -> None:
        self._membership = membership
        self._admission = admission
        self._resend = resend
        self._again = self._send_again  # one object for all that is kept
        self._columns = self._send_columns  # likewise

    def push_trajectories(self, trajectories: Sequence[Trajectory]) -> Steps[PushResult]:
        """Push trajectories of one group.

        The group may be unknown: it is opened, or Busy raised. Raises TrajectoryError; an index that the group would
        not have opens none.
        """
        if not trajectories:
            return PushResult([])
        check_one_group(trajectories)
        checked, first = [Checked.of(trajectory) for trajectory in trajectories], trajectories[0]
        role = check_roles(trajectories)
        slots = first.group_size + (self._membership.manifest.redundancy if role == Role.TRAIN else 0)
        spec = GroupSpec(
            first.group_id, first.group_size, slots, first.data_source, role=role, round=first.round
        )
        packets = yield from self.encode(checked)
        highest = max([trajectory.rollout_index for trajectory in trajectories])
        if highest < slots:
            budget = self._admission.budget_for_new(self._membership.shard_of(spec.group_id))
            return (yield from self.send(spec, packets, budget=budget))
        try:  # its group may have been begun with more slots
            return (yield from self.send(spec, packets, budget=NO_ROOM))
        except Busy:
            raise TrajectoryError(
                f"rollout_index is {highest}, group {spec.group_id} has {slots} slots (0 to {slots - 1})"
            ) from None

    def encode(self, trajectories: Sequence[Checked]) -> Steps[Sequence[Packet]]:
        """Packets of trajectories of one group, one at least; new names of columns are fixed for the run.

        Raises TrajectoryError, also for a reward that nobody brings: it would keep its group open until the deadline.
        """
        waiting = [
            trajectory
            for trajectory in trajectories
            if not (trajectory.scored or trajectory.reward_later) and trajectory.status in STATUSES
        ]
        if waiting and not self._membership.manifest.scorers:  # some may have been named since
            yield from self._membership.agree()
        if waiting and not self._membership.manifest.scorers:
            first = waiting[0]
            has, its = (" only components (rewards)", ", their total") if first.rewards else (" none", "")
            raise TrajectoryError(
                f"reward: trajectory {first.group_id}/{first.rollout_index} has{has}, and run {self._membership.run} "
                f"has no scorers to bring it: give reward{its} (None = unscorable), name scorers in the run's "
                f"settings, or say reward_later=True and bring it with producer.score"
            )
        if any(row.extras for trajectory in trajectories for row in trajectory.rows):
            trajectories = yield from self._with_extras(trajectories)
        manifest = self._membership.manifest
        return encode_packets(trajectories, manifest.max_trajectory_bytes, manifest.filter_by)

    def push_many(
        self, groups: Sequence[Sequence[Trajectory]], timeout: float | None
    ) -> Steps[list[PushResult]]:
        """`push_trajectories` of each group, in few calls. Waits up to `timeout` seconds for those refused.

        Raises Busy after it, and what `push_trajectories` raises, once all others are pushed.
        """
        check_number("timeout", timeout, "seconds", zero=True, or_none=True)
        wait = Wait(self._admission.not_admitted, timeout=timeout, base=ADMISSION_WAIT_S)
        outcomes: dict[int, PushResult | StreamadvError] = {}
        missing: Sequence[int] = range(len(groups))
        has_waited = False
        while True:
            found = yield from together([self.push_trajectories(groups[number]) for number in missing])
            outcomes |= zip(missing, found, strict=True)
            refusals = {number: item for number, item in outcomes.items() if isinstance(item, Busy)}
            if not refusals or wait.expired:
                break
            missing, has_waited = list(refusals), True
            yield from self._admission.pause_for_room(wait, Reason(*refusals[missing[-1]].reason))
        if has_waited and not refusals:
            wait.over()
        results = []
        for outcome in outcomes.values():
            if isinstance(outcome, StreamadvError):
                raise outcome
            results.append(outcome)
        return results

    def encode_columns(self, columns: Any) -> Steps[GroupColumns]:
        """Columns of a group as they are stored; new names are fixed for the run. Raises TrajectoryError."""
        checked = Checked("new", 1, 0, [read_columns(columns)])
        [conformed] = yield from self._with_extras([checked])
        return GroupColumns.of(conformed.rows[0], self._membership.manifest.max_trajectory_bytes)

    def bring_columns(self, ticket: Ticket, columns: GroupColumns) -> Steps[PushResult]:
        """Store the columns of the group that has just been begun."""
        shard, what = self._membership.shard_of(ticket.group_id), (GroupSpec.of(ticket)[:-1], tuple(columns))
        server_id = self._resend.servers.get(shard)
        result = yield from self._send_columns(*what, waits=True)
        self._resend.remember(shard, server_id, columns.size, self._columns, *what)
        return result

    def _send_columns(
        self, spec: tuple[Any, ...], columns: tuple[Any, ...], waits: bool = False
    ) -> Steps[PushResult]:
        """spec, columns: values of a GroupSpec and GroupColumns. Raises Busy, TrajectoryError."""
        group = GroupSpec(*spec)
        keys = self._membership.keys_of(group.group_id)

        def attempt(arguments: list[Any]) -> ColumnsPush:
            return ColumnsPush(keys, tuple(arguments), GroupColumns(*columns))

        code = b"lost"
        while code == b"lost":
            reply = yield from self.call_group_script(group, attempt, waits=waits)
            code = reply[-1]
        return PushResult([code.decode()])

    def cancel(self, spec: GroupSpec, count: int, free: Collection[int]) -> Steps[PushResult]:
        """Cancel `count` of the slots `free`: the highest ones that nobody has ended elsewhere.

        Raises TrajectoryError when there are fewer; those are cancelled nevertheless.
        """
        allowed = "".join("1" if slot in free else "0" for slot in range(spec.slots))
        shard = self._membership.shard_of(spec.group_id)
        server_id = self._resend.servers.get(shard)
        codes: list[str] = []
        cancelled: list[int] = []

        def cancel_call(own: Sequence[Any], arguments: list[Any]) -> ScriptCall:
            keys = self._membership.keys_of(spec.group_id)
            return script_call("cancel", keys, [*arguments, *own], group=spec.group_id)

        try:
            while len(codes) < count:
                part = min(MAX_SLICE_MEMBERS, count - len(codes))
                # Under one nonce a call may be repeated. Of those for which the last argument has a '1' it takes the
                # highest.
                own = [doors.random_bytes(8).hex(), part, allowed[: min(cancelled, default=len(allowed))]]
                call = partial(cancel_call, own)
                reply = yield from self.call_group_script(spec, call, waits=True)
                # Surplus or late; else these are the slots that are cancelled now.
                has_ended = reply[0] == b"ended"
                now = [] if has_ended else [int(index) for index in reply[1:]]
                cancelled += now
                if not has_ended and len(now) < part:
                    raise TrajectoryError(
                        f"cancel: {count} rollouts of group {spec.group_id} were to be cancelled, the rest has ended: "
                        f"{', '.join(map(str, cancelled)) or 'none'} cancelled now"
                    )
                metrics.succeeded(STAGE)
                codes += [reply[1].decode() if has_ended else "pushed"] * part
        finally:  # sent again are these slots: others may be free by then
            ended = ended_packets(sorted(cancelled), "cancelled", spec.role)
            for packets in slices(ended, lambda packet: [packet]):
                kept = tuple([(*packet[:5], ()) for packet in packets])
                self._resend.remember(shard, server_id, 0, self._again, spec[:-1], kept, 0)
        return PushResult(codes, cancelled)

    def score(
        self, group_id: str, rollout_index: int, reward: float | None, rewards: Mapping[str, float] | None
    ) -> Steps[str]:
        """Bring the reward of a pushed trajectory: 'scored', 'duplicate', 'ended' or 'unknown'."""
        checked = check_score(group_id, rollout_index, reward, rewards)
        score: dict[str, Any] = {"reward": checked.reward} | ({"rewards": checked.rewards} if rewards else {})
        value = None  # unscorable
        if checked.reward is not None:
            value = checked.rewards.get(self._membership.manifest.filter_by, checked.reward)
        call = script_call(
            "score",
            self._membership.keys_of(group_id),
            [group_id, checked.rollout_index, "" if value is None else repr(value), json.dumps(score)],
            group=group_id,
        )

        def send() -> Steps[PushResult]:
            reply = yield call
            return PushResult([reply.decode()])

        result = yield from self._resend.send(self._membership.shard_of(group_id), send)
        return result.codes[0]

    def send(
        self, spec: GroupSpec, packets: Sequence[Packet], epoch: int = 0, budget: int | None = None
    ) -> Steps[PushResult]:
        """Send packets of a group in as many calls as it takes, each kept to be sent again.

        epoch: of the ticket. budget: as of `call_group_script`. Raises Busy if there is a budget,
        TrajectoryError.
        """
        rollouts = sum([len(packet.indices) for packet in packets])
        membership = self._membership
        codes: dict[int, str] = {}  # by position in the push
        with tracing.pushing(membership.run, spec.group_id, rollouts):
            if membership.finished and membership.plays is None:
                yield from membership.reopen()
            all_keys = membership.manifest.keys
            shard = all_keys.shard_of(spec.group_id)
            keys = all_keys.shards[shard]
            for part in slices(packets, lambda packet: [packet]):
                server_id = self._resend.servers.get(shard)
                codes |= yield from self._send(keys, spec, part, epoch, budget, waits=budget is None)
                size = sum([packet.size + len(packet.table) for packet in part])
                # Nothing but plain tuples, so that the garbage collector leaves them alone.
                kept = tuple([(*packet[:5], tuple(packet.fields.items())) for packet in part])
                self._resend.remember(shard, server_id, size, self._again, spec[:-1], kept, epoch)
        members = sorted([pair for packet in packets for pair in zip(*packet[:2], strict=True)])
        return PushResult(
            [codes[position] for position, _ in members],
            [index for position, index in members if codes[position] == "pushed"],
        )

    def _send_again(
        self, spec: tuple[Any, ...], packets: Sequence[tuple[Any, ...]], epoch: int
    ) -> Steps[PushResult]:
        group, thawed = GroupSpec(*spec), [Packet._make((*kept[:-1], dict(kept[-1]), ())) for kept in packets]
        codes = yield from self._send(self._membership.keys_of(group.group_id), group, thawed, epoch, None)
        return PushResult(list(codes.values()))

    def _send(
        self,
        keys: ShardKeys,
        spec: GroupSpec,
        packets: Sequence[Packet],
        epoch: int,
        budget: int | None,
        waits: bool = False,
    ) -> Steps[dict[int, str]]:
        """Send what one call may bring, and return the codes by position in the push.

        budget, waits: as of `call_group_script`. Raises Busy, TrajectoryError.
        """
        codes: dict[int, str] = {}
        waiting: Sequence[Packet] = packets

        def attempt(arguments: list[Any]) -> Push:
            scorers = self._membership.manifest.scorers
            group = GroupPush(tuple(arguments[:SPEC_ARGS]), epoch, waiting)
            return Push(keys, scorers[0] if scorers else "", tuple(arguments[SPEC_ARGS:]), [group])

        while waiting:
            reply = yield from self.call_group_script(spec, attempt, budget, waits=waits)
            if len(reply) == 1:  # without codes: all are pushed
                for packet in waiting:
                    codes |= dict.fromkeys(packet.positions, "pushed")
                break
            waiting = unregistered(waiting, reply, codes)
        metrics.succeeded(STAGE)
        if refused := [position for position, code in codes.items() if code == "range"]:
            index_of: dict[int, int] = {}
            for packet in packets:
                index_of |= zip(packet.positions, packet.indices, strict=True)
            first = min(refused)
            raise TrajectoryError(
                f"record {first}: rollout_index is {index_of[first]}, group {spec.group_id} has no such slot"
            )
        return codes

    def call_group_script(
        self,
        spec: GroupSpec,
        call: Callable[[list[Any]], ScriptCall | Push | ColumnsPush],
        budget: int | None = None,
        *,
        waits: bool = False,
    ) -> Steps[Reply]:
        """The reply of a script that has written into a group, which it opens if need be.

        call: makes one attempt, given the arguments of the admission. budget: the byte budget for a group that may be
        new; None for one that was admitted before. waits: until the group is admitted; else raises Busy, though a group
        that may be new waits while the server is above its maxmemory. Raises what `check_group_reply` raises.
        """
        wait: Wait | None = None
        groups_elsewhere: int | None = None
        request = GroupCall(lambda: call(self._membership.group_arguments(spec, budget, groups_elsewhere)))
        while True:
            reply: Reply = yield request
            if isinstance(reply[0], list):  # `push` answers for each group, the other scripts know one only
                reply = reply[0]
            if reply[0] == b"layout":
                yield from self._membership.confirm_layout()
                continue
            if reply[0] != b"ok":
                check_group_reply(reply, spec)
            if reply[0] != b"busy":
                if wait is not None:
                    wait.over()
                return reply
            if groups_elsewhere is None and self._membership.shards > 1 and is_over_share(reply):
                counts = yield from self._membership.groups_ahead()
                groups_elsewhere = sum(counts) - counts[self._membership.shard_of(spec.group_id)]
            elif waits or (reply is OUT_OF_MEMORY and budget is not None):
                wait = wait or Wait(Blocked(self._membership.who, "a push waits", self._membership.run))
                yield from self._admission.pause_for_room(wait, refusal(reply))
                groups_elsewhere = None
            else:
                raise busy_error(refusal(reply), self._membership.run)

    def _with_extras(self, trajectories: Sequence[Checked]) -> Steps[Sequence[Checked]]:
        """The trajectories with their extra columns as the run has them; new ones are fixed. Raises TrajectoryError."""
        manifest, kinds = self._membership.manifest, kinds_of(trajectories)
        if kinds.keys() - manifest.columns.keys():
            manifest = yield from self._membership.agree(kinds)
        return [conform(trajectory, manifest.columns, manifest.keys.run) for trajectory in trajectories]


def unregistered(packets: Sequence[Packet], reply: Reply, codes: dict[int, str]) -> list[Packet]:
    """What has to be sent once more, given the reply `ok` of `push` to a group's packets.

    The reply says of each member, in the order of sending: pushed, duplicate, surplus, late or range, which is added to
    `codes`, by position. Or `again`: the server refuses a packet whole if another member is a duplicate, or part of its
    payload would belong to nobody; these members go without it. Or `lost`: the payload ended before the script saw it,
    by its time to live.
    """
    waiting, rest = [], iter([code.decode() for code in reply[1:]])
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
