"""A whole pipeline in a world: production code of every role, driven by a small plan, killed and started again.

`Pipeline(world).play()` runs it to its end. What its producers were told and its trainer saved is the model that
`judge` compares the run with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from unittest.mock import patch

from .. import doors
from ..advantage import worker
from ..archive import follow
from ..errors import StreamadvError
from ..grouping.scorer import Scorer
from ..producer import Producer
from ..prompts import Prompts, TriesSeen
from ..run.dead_letters import list_dead, purge
from ..run.manifest import KEPT_KINDS, RunSettings
from ..store.retry import RETRYABLE
from ..trainer import checkpoints, together
from .answers import Answers
from .archiver import STEP_S, Record, archiver, read_records
from .constants import PARTS, POLLS, Change
from .excuses import lost_for_good
from .inspection import SHARD, problems
from .job import Job, files_of
from .lookout import LOOK_S, Lookout
from .producing import Producing
from .roles import advantage_worker, grouper, opened
from .scene import RUN, SLOW_S, Acknowledged, Group, Life, Place, Scene, Violation, draw_scene
from .world import URL, World

SCORER: Final = "judge"
#: For which the prompts of a scene are played.
EPOCHS: Final = 2

#: Looks at all that is stored while a schedule runs.
INSPECTIONS: Final = 2

#: When an operator looks at the dead letters.
PURGE_S: Final = 25.0
#: Seconds in which a run that nothing disturbs ends, beyond the deadline of its groups.
END_S: Final = 150.0
#: Seconds in which what is left to do after the end of a run is done.
QUIET_S: Final = 8.0
#: When the server's clock is set back in a scene that is `behind`, and by how many seconds.
BEHIND_AT_S: Final = 2.0
BEHIND_S: Final = 7200.0

#: What `trim_kept` writes behind the bytes in a run that keeps everything.
KEEP: Final = "1.0 1.0 1.0 1.0"
#: What a run with an archive may keep: little, so that the archive holds up new groups.
ARCHIVE_BYTES: Final = 12_000


def prompts_of(scene: Scene) -> list[Prompts]:
    """The sets of prompts of a scene.

    The first has two sources whose shares are selected after each batch; in some scenes every group solves its prompt.
    """

    def select(seen: Mapping[str, TriesSeen]) -> Mapping[str, float]:
        return {"a": 1 + seen["b"].tries % 2, "b": seen["a"].tries % 2}

    of, skip_solved = range(max(3, scene.prompts)), int(scene.save_every == 2)
    options: dict[str, Any] = {
        "skip_solved": skip_solved,
        "best_reward": 0.0,
        "select": select,
        "select_every": 1,
    }
    first = Prompts({"a": of[:-2], "b": of[-2:]}, epochs=EPOCHS, **options)
    more = range(scene.more_prompts)
    return [first, Prompts(more, epochs=1, name="more")] if more else [first]


class Pipeline:
    """One schedule. world: entered."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.scene = draw_scene(world)
        scorers = (SCORER,) if self.scene.scored else ()
        self.settings = RunSettings(
            max_trajectory_bytes=1 << (17 if self.scene.is_narrow else 14),
            max_bytes=1 << (20 if self.scene.is_narrow else 26),
            group_deadline_s=self.scene.deadline_s,
            redundancy=self.scene.redundancy,
            scorers=scorers,
            keep=dict.fromkeys(KEPT_KINDS, 1.0),
            archive=self.scene.archive,
            keep_bytes=ARCHIVE_BYTES if self.scene.archive else 1 << 28,
        )
        self.prompts = prompts_of(self.scene)
        self.answers = Answers(self)
        self.groups: dict[str, Group] = {}
        self.acknowledged: dict[Place, list[Acknowledged]] = {}
        self.lives: list[Life] = []
        self.done: set[int] = set()  # producers that have carried everything out
        self.checkpoint: tuple[list[Place], dict[str, Any]] | None = None
        self.saved_in = 0  # the epoch of its job
        self.trained: Counter[Place] = Counter()  # by all jobs
        self.violations: list[str] = []
        self.folder = Path()  # of checkpoints and the archive, while it plays
        self.archived: list[Record] = []
        self.forgotten: list[float] = []  # when the server lost writes, and the run has not noted its servers
        self.prompts_over: list[float] = []  # when producers were told that all prompts have ended
        self.left: list[Any] = []  # iterators over prompts that their producers have left, and nobody closes
        self.played_late = False  # whether a group begun ahead had to wait for longer than its deadline
        self.ended = False
        self.named: dict[int, tuple[Place, ...]] = {}  # batch -> what was trained as it last
        self.stopped_at = math.inf  # when the trainer had ended the run before its time
        self.committed = 0
        """Batches below this one are committed, where each is when the next one is asked for."""
        self.was_stateless = False  # whether a job has begun without a checkpoint after there were commits
        self.end_is_lost = False
        """Whether the server has lost that the trainer has ended the run: the next trainer finds what comes then."""
        self.closing_at = math.inf
        """When the trainer saved its last checkpoint, after which it names nothing more."""
        self.job_ends: list[float] = []
        self.jobs = 0
        self.all_back = 0.0  # when the last of those who were killed starts again
        self._jobs: list[Job] = []

    # The whole

    def play(self) -> None:
        """Run to the end of the run. Raises Violation."""
        world = self.world
        with TemporaryDirectory(prefix="streamadv-world-") as folder, ExitStack() as stack:
            for change in self._changes():
                stack.enter_context(patch.object(*change))
            self.folder = Path(folder)
            # As if a grouper had been here before: what it says first is not lost.
            keeping = f"{self.settings.keep_bytes} {KEEP}{' archive' if self.scene.archive else ''}"
            world.server.store.data[SHARD + b"trainer"] = {b"keep": keeping.encode()}
            for number in range(self.scene.groupers):
                self._supervise(f"grouper{number or ''}", lambda: grouper(RUN, self.settings))
            for number in range(self.scene.workers):
                self._supervise(f"worker{number}", lambda: advantage_worker(RUN, self.settings))
            if self.scene.scored:
                self._supervise("scorer", self._scorer)
            if self.scene.archive:
                path = self.folder / "archive"
                self._supervise("archiver", lambda: archiver(RUN, self.settings, path, world.moment))
            for number, plan in enumerate(self.scene.producers):
                self._supervise(f"p{number}", Producing(self, number, plan).run)
            world.at(self.scene.trainer_late_s, self._start_job)
            if self.scene.successor_s:
                world.at(self.scene.successor_s, self._start_successor)
            if self.scene.needs:
                world.at(PURGE_S, lambda: self._supervise("operator", self._purge))
            if self.scene.behind:
                world.at(BEHIND_AT_S, lambda: world.jump(-BEHIND_S))
            world.at(self.scene.calm_s, self._calm)
            world.at(LOOK_S, Lookout(self).look)
            for number in range(INSPECTIONS):
                when = world.plan.choose(
                    f"inspection/{number}", lambda source: source.uniform(0.5, self.scene.calm_s)
                )
                if when is not None:
                    world.at(when, self._inspect)
            world.at_loss.append(self._note_forgotten)
            for wait in (40.0, 80.0, 120.0):
                world.at(self.scene.calm_s + wait, self._finish_for_the_lost)
                world.at(self.scene.calm_s + wait, self._come_back)
            # Where room is scarce, groups of lost producers keep others out until their deadline.
            deadlines = 1 + self.scene.is_narrow
            longest = deadlines * max(self.scene.deadline_s, SLOW_S) + END_S
            limit = self.scene.calm_s + longest
            world.run(lambda: self.ended or bool(self.violations) or world.time > limit)
            self._raise()
            if not self.ended:
                raise Violation(
                    f"P3: the run has not ended {longest:.0f} s after the last fault: {self._state()}"
                )
            if self.stopped_at < math.inf:  # nothing more is trained on: what is open ends by its deadline
                limit += world.time
                world.run(lambda: self._is_left() or bool(self.violations) or world.time > limit)
                self._raise()
                self.end_is_lost = any(since <= self.stopped_at <= at for at, since in world.lost)
                if not (self._is_left() or self.end_is_lost):
                    raise Violation(f"P3: the trainer has ended the run, and it goes on: {self._state()}")
            alive = [process.disturbed_until for process in world.processes if not process.dead]
            purged = PURGE_S if self.scene.needs else 0.0
            # Nothing is under way any more.
            until = max(world.time, self.all_back, purged, *alive) + QUIET_S
            if any(process.dead and process.name.startswith("worker") for process in world.processes):
                until += worker.LEASE_S  # then others take over what it had in hand
            if self.scene.archive:  # it may be behind by all groups, a file for each
                until += len(self.groups) * 4 * STEP_S + follow.FILE_S + 2 * follow.POLL_S
            self._calm()
            world.run(lambda: bool(self.violations) or world.time > until)
            self._raise()
            self.archived = read_records(self.folder / "archive")

    def _changes(self) -> Iterator[Change]:
        """Polls are rarer, slices small; ranks find the store of their job, and only those that live remove files."""
        yield from POLLS
        if self.scene.in_parts:
            yield from PARTS
        yield together, "_store", lambda _: self._job_here().store
        yield checkpoints, "shutil", files_of(self)

    def _is_left(self) -> bool:
        """Whether no producer and no open group is left."""
        has_open = bool(self.world.server.store.data.get(SHARD + b"open"))
        return not has_open and len(self.done) == len(self.scene.producers)

    def _raise(self) -> None:
        if self.violations:
            raise Violation(self.violations[0])

    def violate(self, text: str) -> None:
        self.violations.append(f"{text} (at {self.world.time:.3f} s)")

    def _calm(self) -> None:
        self.world.is_calm = True
        self.world.server.refusal = None

    def _inspect(self) -> None:
        """Between two scripts the run adds up, whatever is under way."""
        for text in problems(self.world, RUN):
            self.violate(f"accounting in between: {text}")

    def _note_forgotten(self) -> None:
        if b"servers" not in self.world.server.store.data.get(SHARD + b"session", {}):
            self.forgotten.append(self.world.time)

    def _state(self) -> str:
        done, all_ = sorted(self.done), len(self.scene.producers)
        return f"producers done {done} of {all_}, trained {len(self.trained)}, time {self.world.time:.1f}"

    def _supervise(self, name: str, main: Callable[[], object], life: int = 1) -> None:
        """Start a process, and again after it was killed."""
        process = self.world.start(f"{name}.{life}", main)

        def again() -> None:
            label = f"{process.name}/back"
            if not self.world.is_over:
                delay = self.world.plan.choose(label, lambda source: source.choice((0.1, 1.0, 6.0, 20.0)))
                back = self.world.time + (delay or 1.0)
                self.all_back = max(self.all_back, back)
                self.world.at(back, lambda: self._supervise(name, main, life + 1))

        process.at_death.append(again)
        process.at_error = lambda process, error: self.violate(
            f"{process.name} raised {type(error).__name__}: {error}"
        )

    def _scorer(self) -> None:
        Scorer(URL, RUN, SCORER, settings=self.settings).run(_score, doors.Event())

    # Operators

    def _finish_for_the_lost(self) -> None:
        """An operator ends a run whose producers have left unheard, or said so to a server that has lost it since."""
        finished = [
            life
            for life in self.lives
            if life.finished is not None and life.closed is not None and life is self.last_of(life.name)
        ]
        if (
            not self.ended
            and len(self.done) == len(self.scene.producers)
            and all(
                life.is_unheard
                or any(lost_for_good(self, life, said, said) for said in (life.finished or 0.0, life.end))
                for life in finished
            )
        ):
            self._supervise("operator", self._finish)

    def _come_back(self) -> None:
        """An operator starts a producer again that had finished when the trainer went on from an older checkpoint."""
        store = self.world.server.store.data
        are_back = any(
            store.get(SHARD + b"prompt_state:" + name, {}).get(b"is_back")
            for name in store.get(SHARD + b"prompts", {})
        )
        if are_back and not self.ended and len(self.done) == len(self.scene.producers):
            self.done.discard(0)
            plan = self.scene.producers[0] | {"kind": "blocking", "hands": [], "ends": "finish"}
            self._supervise("p0.back", Producing(self, 0, plan).run)

    def _purge(self) -> None:
        """An operator deletes the dead letters that there are, if the server answers."""
        run = opened(RUN, self.settings)
        with suppress(StreamadvError, *RETRYABLE):
            for dead in list(list_dead(run)):
                purge(run, dead.group_id)

    def _finish(self) -> None:
        with Producer(URL, RUN, settings=self.settings) as producer:
            producer.finish()

    def last_of(self, name: str) -> Life:
        return [life for life in self.lives if life.name == name][-1]

    def plan_group(
        self,
        group_id: str,
        size: int = 2,
        deadline_s: float | None = None,
        begun: float | None = None,
        **fields: Any,
    ) -> Group:
        """Note what is meant to be pushed; an earlier life may have begun it."""
        group = self.groups.get(group_id)
        if group is None:
            deadline = self.scene.deadline_s if deadline_s is None else deadline_s
            begun = self.world.time if begun is None else begun
            group = self.groups[group_id] = Group(group_id, size, begun, deadline, **fields)
        return group

    # Trainers

    def _start_job(self) -> None:
        self.jobs += 1
        self.stopped_at = math.inf  # it opens the run again
        job = Job(self, self.jobs, list(self.checkpoint[0]) if self.checkpoint else [])
        self._jobs.append(job)
        for rank in range(self.scene.ranks):
            process = self.world.start(f"trainer{rank}.{self.jobs}", lambda r=rank: job.run_rank(r))  # type: ignore[misc]
            job.processes.append(process)
            process.at_death.append(job.end)
            process.at_error = job.failed

    def _start_successor(self) -> None:
        if not self.ended and self.jobs:
            self._start_job()

    def _job_here(self) -> Job:
        """The job of the process that has its turn."""
        here = self.world.process
        return next((job for job in self._jobs if here in job.processes), self._jobs[-1])

    def restart_job(self) -> None:
        """The launcher starts the job again, from its newest checkpoint."""
        label = f"job{self.jobs}/back"
        if not self.world.is_over and not self.ended:
            delay = self.world.plan.choose(label, lambda source: source.choice((0.1, 1.0, 6.0))) or 1.0
            self.world.at(self.world.time + delay, self._start_job)


def _score(trajectories: Sequence[Any]) -> list[float]:
    return [float(each.rollout_index) for each in trajectories]
