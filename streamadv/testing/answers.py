"""What producers are told, compared with the promises at once, and noted for the judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from .excuses import nobody_knew, was_untouched
from .inspection import SHARD
from .scene import SLOW_S, Acknowledged, Group, Life

if TYPE_CHECKING:
    from .pipeline import Pipeline

#: Seconds that a group may wait for admission when nothing fails.
ADMISSION_S: Final = 75.0
#: Of a shard's clock at most, when the server's jumps: `lua/lib/clock.lua`.
STEP_S: Final = 5.0


class Answers:
    """What the server has answered the producers of a pipeline."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._world = pipeline.world

    def note(self, life: Life, asked: float, group: Group, index: int, code: str) -> None:
        """The server has answered a push of a usable trajectory, whose operation began when it `asked`."""
        if life.process.dead:
            return
        now = self._world.time
        # The shard's clock follows a jump of the server's so far.
        ahead = sum(min(by, STEP_S) for at, by in self._world.jumps if at >= group.begun and by > 0)
        if (
            code == "late"
            and group.whole
            and group.role == "train"
            and now < group.begun + group.deadline_s - 0.5 - ahead
            and not was_untouched(self._pipeline, group)
        ):
            after = f"{now - group.begun:.1f} s after its beginning"
            self._pipeline.violate(
                f"P4: group {group.id} has ended {after}, its deadline is {group.deadline_s:g} s"
            )
        if code in ("pushed", "duplicate"):
            self._pipeline.acknowledged.setdefault((group.id, index), []).append(
                Acknowledged(life, asked, now, code)
            )
            self._world.moment()

    def touched(self, life: Life, asked: float, group: Group) -> None:
        """The server has put the deadline of a group off."""
        if not life.process.dead:
            group.deadline_s = max(group.deadline_s, asked - group.begun + self._pipeline.scene.deadline_s)
            group.touches.append(Acknowledged(life, asked, self._world.time, "touched"))

    def look_at_played(self, group: Group) -> None:
        """Somebody has played a rollout: its group is open, or has ended."""
        store = self._world.server.store.data
        name = group.id.encode()
        has_ended = any(name in store.get(SHARD + kind, {}) for kind in (b"ended", b"ended_before"))
        fields = store.get(SHARD + b"group:" + name, {})
        is_there = fields and not (fields.get(b"holders") == b"" and not fields[b"slots"].strip(b"."))
        if not (has_ended or is_there or self._world.lost or self._world.process.dead):
            self._pipeline.violate(f"P4: group {group.id} is withdrawn, and somebody plays it")

    def note_scored(self, life: Life, asked: float, group: Group, codes: Sequence[str]) -> None:
        """The server has answered that it has the rewards of all members of a group: now it has to be trained on."""
        if life.process.dead or not {"scored", "duplicate"}.issuperset(codes):
            return
        group.whole = True
        group.scores.append(Acknowledged(life, asked, self._world.time, "scored"))

    def waited(self, life: Life, since: float) -> None:
        """A group was admitted, or a push of a new one."""
        calm = self._pipeline.scene.calm_s
        # Who makes room may have been kept from it: a grouper, the ranks of a job.
        kept_away = [process.disturbed_until for process in self._world.processes if not process.dead]
        since = max(
            since,
            self._world.disturbed_until,
            *kept_away,
            self._pipeline.all_back,
            calm if self._world.time > calm else 0.0,
        )
        seconds = self._world.time - since
        # Groups of a producer that nobody knows of, and those that nobody plays or scores, count until their deadline.
        are_open = any(each.leaves_open for each in self._pipeline.lives) or not all(
            each.whole for each in self._pipeline.groups.values()
        )
        if nobody_knew(self._pipeline) or are_open:
            seconds -= self._pipeline.scene.deadline_s
        # Free slots of groups that a lost producer has begun hold room until their deadline.
        if self._pipeline.scene.is_narrow:
            seconds -= max(self._pipeline.scene.deadline_s, SLOW_S)
        if seconds > ADMISSION_S and not life.process.dead:
            self._pipeline.violate(f"P9: {life.name} waited {seconds:.0f} s for admission")

    def played(self, kind: str, since: float) -> None:
        """An operation is over; one with groups begun ahead may have begun each of them at any time since."""
        is_ahead = kind in ("groups", "cancel")
        self._pipeline.played_late |= is_ahead and self._world.time > since + self._pipeline.scene.deadline_s
