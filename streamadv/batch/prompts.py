"""What rank 0 does for prompts: carries ends of groups home, keeps their state in checkpoints, and sets it back.

A prompt whose group is in the weights counts as trained in the checkpoint that is saved next, and in the run once the
group is committed. A checkpoint has the prompts in play as they were, and the groups in the weights: which prompts
are trained in it follows from both, when prompts are set back to it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container
from typing import Any, Final

from .. import clock
from ..errors import SettingError
from ..messages import log_fields
from ..prompts.spec import PromptSet, identity
from ..prompts.steps import end, give_back
from ..prompts.stored import GONE, NOBODY, PAGE, Stored, carry_ends, read
from ..run import Run
from ..run.heartbeats import Attendance
from ..store.scripts import run_script
from .progress import Progress

logger = logging.getLogger(__name__)

#: Outcome of a group that is nowhere: a server has lost it.
LOST: Final = "lost"
#: Groups whose ends are carried at once: a shard remembers 4,096 (`lua/lib/prompt_end.lua`).
CARRIED: Final = 1024
TRAINED: Final = "trained"


class RunPrompts:
    """The prompts of a run, as rank 0 knows them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: list[Stored] = []
        self._unplayed: set[str] = set()  # sets with prompts that were begun, and are in no known group
        self._ended = 0  # groups, since ends were carried

    def carry(self, *, again: bool = False) -> list[PromptSet]:
        """Carry the ends of groups to their prompts. again: see `carry_ends`."""
        self._ended = 0
        return carry_ends(self._run, again=again)

    def note_ended(self, groups: int) -> None:
        """This process has ended so many: carry their ends before a shard forgets the first ones."""
        self._ended += groups
        if self._ended >= CARRIED:
            self.carry()

    def save(self, progress: Progress) -> None:
        """Note in the progress what belongs into a checkpoint of the present version."""
        for prompts in self.carry():
            stored = read(self._run, prompts)
            progress.prompts[prompts.name] = {
                "set": stored.prompts.text,
                "born": stored.born,
                "next": stored.following,
                "left": sorted(stored.entries),
                "ended": sorted(stored.ended),
                "counts": stored.counters,
                "given_up": stored.given_up,
                "is_back": stored.is_back,
            }
        progress.groups_saved = progress.groups

    def restore(self, progress: Progress) -> None:
        """After the run was taken: set prompts back to an older checkpoint, or to the last one if the run lost them.

        Raises SettingError if the run has other prompts under the name of some in the checkpoint.
        """
        sets = {prompts.name: prompts for prompts in self.carry(again=True)}
        for name, saved in progress.prompts.items():
            try:
                known = PromptSet.from_text(str(saved["set"]))
            except (ValueError, KeyError):
                continue
            if difference := known.difference(sets.setdefault(name, known)):
                raise SettingError(
                    f"prompts {name} of the checkpoint are not those of the run: {difference}: give what producers "
                    "play now another name=, or start the trainer without the checkpoint"
                )
        # Without a checkpoint it goes on after the last commit: the weights have what others have trained on.
        progress.has_prompts |= bool(sets) and not progress.loaded and progress.version > 0
        if progress.sets_of_branch[0] != progress.branch:  # however often the run has to be taken
            progress.sets_of_branch = (progress.branch, set(sets))
        for prompts in sets.values():
            saved = progress.prompts.get(prompts.name, {})
            if self._set_back(prompts, saved, progress):
                progress.set_back_at = clock.now()
                text = "run %s: prompts %s are those of checkpoint %d: what has ended since is played again"
                fields = log_fields("prompts_set_back", run=self._run.name, role="trainer")
                logger.warning(text, self._run.name, prompts.name, progress.version, extra=fields)

    def _set_back(self, prompts: PromptSet, saved: dict[str, Any], progress: Progress) -> bool:
        following = saved.get("next", [0] * len(prompts.sources))
        # What was begun and had not ended in the checkpoint, what had ended above `following`, and its counters.
        begun, ended, counters = [], list(saved.get("ended", [])), Counter(saved.get("counts", {}))
        trained = set(map(identity, progress.groups_saved))
        for item in saved.get("left", []):
            source, position = map(int, item.split())
            _, epoch, _ = place = prompts.locate(source, position)
            if identity(prompts.id_of(place, 0)) not in trained:
                begun.append(item)
                continue
            counters[f"{TRAINED} {source} {epoch}"] += 1
            if position >= following[source - 1]:
                ended.append(item)
        args = [progress.fence, prompts.name, prompts.text, saved.get("born", ""), progress.branch]
        saved_in = progress.loaded_epoch if progress.loaded else progress.epoch
        is_older = progress.is_set_back and prompts.name in progress.sets_of_branch[1]
        args += [-1 if is_older else saved_in, saved.get("given_up", 0), int(saved.get("is_back", False))]
        args += [len(following), len(counters), len(begun), *following]
        args += [part for pair in counters.items() for part in pair]
        kinds = {f"prompt_{kind}": prompts.name for kind in ("state", "entries", "again", "given_up")}
        return bool(self._run.home.call("set_back_prompts", [*args, *begun, *ended], **kinds))

    # The end of a run

    def look(self) -> bool:
        """Note what there is, for what follows. Returns whether some were begun and have not ended."""
        self._seen, self._unplayed = [read(self._run, prompts) for prompts in self.carry()], set()
        return any(stored.entries for stored in self._seen)

    def are_left(self, known: Container[str], progress: Progress, attendance: Attendance) -> bool:
        """Whether of the prompts of the last look some are still to be played, though no group was open since.

        known: all groups in the weights, named or candidates, by `identity`. A prompt of no such group was leased and
        not begun, or a server has lost its group, or how that has ended. In the first cases somebody else plays it
        under the same try, whom the server tells in the last case that the group has ended; so then it is lost.
        """
        is_left = False
        for stored in self._seen:
            groups = {item: identity(stored.group_id(item)) for item in stored.entries}
            self._end(
                stored, [item for item, group in groups.items() if progress.has_committed(group)], TRAINED
            )
            unknown = {item for item, group in groups.items() if group not in known}
            if unknown:
                self._unplayed.add(stored.prompts.name)
                is_left = is_left or attendance.has_loop(stored.prompts.name)
            gone = unknown.intersection(stored.of(GONE))
            self._end(stored, sorted(gone), LOST)
            if held := sorted(unknown - gone - set(stored.of(NOBODY))):
                call = give_back(self._run.keys.home, stored.prompts.name, stored.leases(held))
                run_script(self._run.connection.scripts, call)
        return is_left

    @property
    def left(self) -> int:
        """How many had not ended at the last look."""
        return sum(stored.unbegun + len(stored.entries) for stored in self._seen)

    def will_begin(self, attendance: Attendance) -> bool:
        """Whether somebody loops over prompts that were not begun at the last look."""
        return any(stored.unbegun and attendance.has_loop(stored.prompts.name) for stored in self._seen)

    def will_go_on(self, attendance: Attendance) -> bool:
        """Whether some are left that nobody has begun since, though no more groups for the next batch can come.

        Who loops over them may wait for a batch. Once they were set back the run waits for somebody, because those who
        had played them may have finished before.
        """
        return any(
            (stored.is_back and (stored.unbegun or stored.prompts.name in self._unplayed))
            or (stored.unbegun and attendance.has_loop(stored.prompts.name))
            for stored in self._seen
        )

    def _end(self, stored: Stored, items: list[str], outcome: str) -> None:
        """End prompts of which the server has lost that their groups have ended, and how."""
        if not items:
            return
        self.carry()
        fields = log_fields("prompts_lost", run=self._run.name, role="trainer", count=len(items))
        text = (
            "run %s: a server has lost how groups of %d prompts have ended, %s among them: they count as %s"
        )
        logger.warning(text, self._run.name, len(items), stored.group_id(items[0]), outcome, extra=fields)
        for start in range(0, len(items), PAGE):
            ends = "\n".join(f"{stored.group_id(item)} {outcome} " for item in items[start : start + PAGE])
            # Under a shard of its own: no cursor of a real one moves.
            call = end(self._run.keys.home, stored.prompts, ends, (-1, "", ""), True)
            run_script(self._run.connection.scripts, call)
