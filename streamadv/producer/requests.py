"""The requests that a producer's steps yield, what their replies say, and the one place where one is sent again.

Steps are generators: they yield requests and receive replies. `Producer` and `AsyncProducer` carry out single
attempts; `attempts` decides what happens between two attempts.

The reply of a script that may open a group (`begin`, `columns`, `push`, `cancel`) is a list whose first item is the
state: ok, open, ended, busy, mismatch, layout or broken. See the headers of the scripts and `lua/lib/admit.lua`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from redis.exceptions import OutOfMemoryError

from .. import doors
from ..errors import Busy, GroupEndedError, RunEndedError, SettingError, StreamadvError, TrajectoryError
from ..store.exchange import Payloads
from ..store.keys import ShardKeys
from ..store.reasons import Reason
from ..store.retry import RETRYABLE, Outage
from ..store.scripts import ScriptCall, script_call
from ..trajectory.packet_encoding import Packet, merge_packets
from .extra_columns import ColumnsPush
from .tickets import GroupSpec

if TYPE_CHECKING:
    from .announcements import Place
    from .membership import Membership

Item = TypeVar("Item")
Reply = Sequence[Any]

STAGE: Final = "producer"
#: Largest part of a push sent in one MULTI, which holds the server up for some 3 ms. A packet may exceed the bytes.
MAX_SLICE_PACKETS: Final = 64
MAX_SLICE_MEMBERS: Final = 128
MAX_SLICE_BYTES: Final = 4 << 20


class Load(NamedTuple):
    """What one call brings."""

    packets: int
    members: int
    size: int  # bytes of payloads and member tables


def load_of(packet: Packet) -> Load:
    """Of one packet."""
    return Load(1, len(packet.indices), packet.size + len(packet.table))


class GroupPush(NamedTuple):
    """Packets of a group, as one call of the push script takes them."""

    spec: tuple[Any, ...]  # see lua/lib/enter.lua
    epoch: int  # of the ticket
    packets: Sequence[Packet]


class Push(NamedTuple):
    """Packets of groups of one shard, to be sent together: each call of `transaction` makes another attempt.

    Packets without payloads too go by the client that `ServerIds` asks: another client may still reach a former
    primary, and what that acknowledges is lost.
    """

    keys: ShardKeys
    scorer: str  # whose stream takes what has no reward yet; "" = the run has none
    limits: tuple[Any, ...]  # producer, and those of lua/lib/admit.lua
    groups: Sequence[GroupPush]

    @property
    def lane(self) -> tuple[Any, ...]:
        """Equal for pushes that may go together."""
        return self.keys, self.scorer, self.limits

    @property
    def load(self) -> Load:
        """Of all its packets."""
        loads = [load_of(packet) for group in self.groups for packet in group.packets]
        return Load(*map(sum, zip(*loads, strict=True)))

    def transaction(self) -> tuple[Payloads, ScriptCall]:
        """The payloads and the call that registers them. Never to be sent twice."""
        args = [*self.limits, "1" if self.scorer else "0", len(self.groups)]
        payloads = []
        for group in self.groups:
            args += [*group.spec, group.epoch, len(group.packets)]
            for packet in group.packets:
                key = ""
                if packet.size:
                    # A new key for each attempt: the server may have registered one whose reply was lost.
                    key = self.keys.payload(doors.random_bytes(12).hex())
                    payloads.append((key, packet.fields))
                indices = packet.indices
                is_gapless = indices[-1] - indices[0] == len(indices) - 1
                args += [len(indices), indices[0] if is_gapless else "", key]
                args += [packet.size, packet.members, packet.table]
        hashes = [self.keys.group(group.spec[0]) for group in self.groups]
        call = script_call(
            "push",
            self.keys,
            args,
            scorer=self.keys.scoring(self.scorer) if self.scorer else self.keys.void,
            group_hashes=hashes,
            payloads=[key for key, _ in payloads],
        )
        return payloads, call


class GroupCall(NamedTuple):
    """A call of a script that may open a group: `begin`, `columns`, `push` or `cancel`.

    `make` is called for each attempt, because the limits of admission change. Above maxmemory, where the server
    refuses these scripts, the reply is OUT_OF_MEMORY.
    """

    make: Callable[[], ScriptCall | Push | ColumnsPush]


class Pause(NamedTuple):
    """Wait so many seconds, or until the producer is closed; one that leaves waits on."""

    seconds: float
    leaves: bool = False


class AdmissionPause(NamedTuple):
    """Wait so many seconds, or until the trainer announces in a shard that it may have made room."""

    seconds: float
    stream: str
    after: bytes  # the announcement that the refusal knew of; b"0-0" = none
    place: Place  # in the line of those who wait for it


class Memory(NamedTuple):
    """Ask the server for its memory figures; {} where INFO is missing."""


class ServerIds(NamedTuple):
    """Ask which server has each shard; None where it does not tell."""

    shards: Sequence[ShardKeys]


T = TypeVar("T")
Attempt = ScriptCall | Push | ColumnsPush | Pause | AdmissionPause | Memory | ServerIds
Request = Attempt | GroupCall
Steps = Generator[Request, Any, T]

OUT_OF_MEMORY: Final = [b"busy", b"maxmemory", b"0", b"0", b""]


def attempts(
    steps: Steps[T], membership: Membership, *, patient: bool, leaves: bool
) -> Generator[Attempt, Any, T]:
    """Yield each request of `steps` as often as it takes; receives the reply or an exception.

    Calls are repeated until the server answers. Of an impatient one the steps hear that it does not, as of every other
    error. Once the producer is closed, or with `leaves` has left, ProducerClosedError ends the steps before an attempt.
    """
    outage: Outage | None = None  # made when there is one: most calls succeed at once
    reply: Any = None
    while True:
        try:
            request = steps.throw(reply) if isinstance(reply, Exception) else steps.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except Exception as error:
            if not isinstance(error, StreamadvError):
                membership.check_open(leaves)  # else its connection was closed under it
            raise
        while True:
            membership.check_open(leaves)
            attempt = request.make() if isinstance(request, GroupCall) else request
            reply = yield attempt
            if not isinstance(reply, Exception):
                break
            if isinstance(reply, OutOfMemoryError) and isinstance(request, GroupCall):
                reply = OUT_OF_MEMORY
                break
            if not isinstance(reply, RETRYABLE) or not patient:
                break
            outage = outage or Outage(STAGE, membership.run)
            yield Pause(outage.delay_after(reply))
        if outage is not None and not isinstance(reply, Exception):
            outage.over()


# Several pushes as one


def join(pushes: Sequence[Push]) -> Push:
    """Pushes of one lane as one, which has each group once, in as few packets as its members allow."""
    if len(pushes) == 1:
        return pushes[0]
    packets: dict[tuple[tuple[Any, ...], int], list[Packet]] = {}
    for push in pushes:
        for group in push.groups:
            packets.setdefault((group.spec, group.epoch), []).extend(group.packets)
    groups = [GroupPush(spec, epoch, merge_packets(found)) for (spec, epoch), found in packets.items()]
    return pushes[0]._replace(groups=groups)


def shares(pushes: Sequence[Push], joined: Push, replies: Sequence[Reply]) -> list[list[Reply]]:
    """What the replies to `joined`, made by `join(pushes)`, say to each of them: a reply for each of its groups."""
    if len(pushes) == 1:
        return [list(replies)]
    found: dict[tuple[tuple[Any, ...], int], tuple[Reply, dict[int, list[Any]]]] = {}
    for group, reply in zip(joined.groups, replies, strict=True):
        codes: dict[int, list[Any]] = {}  # by rollout index
        if len(reply) > 1 and reply[0] == b"ok":
            for index, code in zip(_indices(group.packets), reply[1:], strict=True):
                codes.setdefault(index, []).append(code)
        found[group.spec, group.epoch] = reply, codes
    return [[_share(group, *found[group.spec, group.epoch]) for group in push.groups] for push in pushes]


def _share(group: GroupPush, reply: Reply, codes: dict[int, list[Any]]) -> Reply:
    return [reply[0], *(codes[index].pop(0) for index in _indices(group.packets))] if codes else reply


def _indices(packets: Sequence[Packet]) -> Iterator[int]:
    return chain.from_iterable([packet.indices for packet in packets])


def slices(items: Iterable[Item], load: Callable[[Item], Load]) -> list[list[Item]]:
    """All items in parts that one call may bring."""
    queue = deque(items)
    if len(queue) == 1:
        return [list(queue)]
    parts = []
    while queue:
        parts.append(take_slice(queue, load))
    return parts


def take_slice(queue: deque[Item], load: Callable[[Item], Load]) -> list[Item]:
    """Remove the first items, as much as the MAX_SLICE constants allow; one item may exceed them."""
    taken: list[Item] = []
    packets = members = size = 0
    while queue:
        more = load(queue[0])
        packets, members, size = packets + more.packets, members + more.members, size + more.size
        if taken and (packets > MAX_SLICE_PACKETS or members > MAX_SLICE_MEMBERS or size > MAX_SLICE_BYTES):
            break
        taken.append(queue.popleft())
    return taken


# What a reply says

#: A byte budget that opens no group; groups that are open go on.
NO_ROOM: Final = -1
LOST_GROUPS_FIRST: Final = Reason(
    "lost_groups_first", "there is no room yet for groups that the server has lost"
)
NO_WEIGHTS: Final = Reason("no_weights", "no trainer has named weights yet")


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
        raise TrajectoryError(f"group_size is {spec.size}, group {spec.group_id} is open with {size}")
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
