"""What has to hold while a schedule runs: whoever is alive is heard of, and no group stays open that nobody has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .pipeline import Pipeline

#: Seconds between two looks.
LOOK_S: Final = 5.0
#: Seconds without a heartbeat after which a producer counts as lost.
SILENCE_S: Final = 31.0
#: Seconds after which a group may no longer be open that nobody plays, once everybody has left.
NOBODY_S: Final = 12.0


class Lookout:
    """Looks at the server and the producers every few seconds of the world."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._quiet_since: float | None = None
        self._heartbeats: dict[bytes, tuple[bytes, float]] = {}

    def look(self) -> None:
        """Once, and again until the run has ended."""
        self._look_for_the_silent()
        self._look_for_nobodys_groups()
        self._look_for_turns_of_the_ended()
        if not self._pipeline.ended:
            self._pipeline.world.at(self._pipeline.world.time + LOOK_S, self.look)

    def _look_for_the_silent(self) -> None:
        pipeline, world = self._pipeline, self._pipeline.world
        stored = world.server.store.data.get(b"{r:0:0}:producers", {})
        for name, value in stored.items():
            if self._heartbeats.get(name, (b"", 0.0))[0] != value:
                self._heartbeats[name] = (value, world.time)
        for life in pipeline.lives:
            heard = self._heartbeats.get(life.name.encode(), (b"", life.opened))[1]
            quiet_from = max(heard, life.opened, life.process.disturbed_until, world.disturbed_until)
            if (
                life.closed is None
                and not life.process.dead
                and life is pipeline.last_of(life.name)
                and world.time - quiet_from > SILENCE_S
            ):
                silent = world.time - quiet_from
                pipeline.violate(f"P9: producer {life.name} is alive and has been silent for {silent:.0f} s")

    def _look_for_nobodys_groups(self) -> None:
        """Once all producers have left and were heard, no group stays open that nobody has begun to play."""
        pipeline, world = self._pipeline, self._pipeline.world
        are_unheard = any(life.process.dead or life.is_unheard for life in pipeline.lives)
        if len(pipeline.done) < len(pipeline.scene.producers) or world.lost or are_unheard:
            return
        groupers = [p for p in world.processes if p.name.startswith("grouper") and not p.dead]
        well_since = max((max(p.began, p.disturbed_until) for p in groupers), default=world.time)
        self._quiet_since = max(self._quiet_since or world.time, world.disturbed_until, well_since)
        data = world.server.store.data
        slots = [
            data.get(b"{r:0:0}:group:" + name, {}).get(b"slots")
            for name in data.get(b"{r:0:0}:open", {})
            if name.decode() not in pipeline.groups  # which somebody has been given
        ]
        open_groups = [each for each in slots if each is not None and not each.strip(b".")]
        if open_groups and world.time > self._quiet_since + NOBODY_S:
            pipeline.violate(
                f"P3: all producers have left, and {len(open_groups)} groups are open that nobody has"
            )

    def _look_for_turns_of_the_ended(self) -> None:
        """A slot that has ended keeps no turns."""
        data = self._pipeline.world.server.store.data
        for name in data.get(b"{r:0:0}:open", {}):
            fields = data.get(b"{r:0:0}:group:" + name, {})
            slots = fields.get(b"slots", b"")
            kept = [int(field.split(b":")[1]) for field in fields if field.startswith((b"turn:", b"turns:"))]
            if any(slots[slot : slot + 1] not in (b".", b"") for slot in kept):
                self._pipeline.violate(
                    f"accounting: group {name.decode()} keeps turns of a slot that has ended"
                )
