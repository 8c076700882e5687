"""The training job: ranks that train together, save, and start again from the newest checkpoint."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch.distributed

from ..errors import BatchLostError, CheckpointError, EpochFencedError, SettingError, StarvedError
from ..trainer.microbatch import Batch
from ..trainer.queue import TrainerQueue
from .excuses import must_train
from .scene import RUN, SECOND_SCORE, Life, Place
from .strands import Process
from .world import URL

if TYPE_CHECKING:
    from .pipeline import Pipeline

CHAIN: Final = {"estimator": "reinforce"}
#: A step that needs a column which producers push.
KL: Final = {"kl": {"coefficient": 0.1}}
#: What a rank waits for the others: its process group's timeout.
COLLECTIVE_S: Final = 45.0
#: Seconds after which everybody has heard of a producer that nothing disturbs. A server that has died is no excuse: the
#: run waits until the next one has heard of everybody.
KNOWN_S: Final = 20.0
#: Seconds after its opening in which a trainer may not have heard of a producer yet.
HEARD_OF_S: Final = 5.0
#: In a checkpoint: what has been trained on, in the order of training.
WEIGHTS: Final = "weights.json"


def files_of(pipeline: Pipeline) -> SimpleNamespace:
    """`shutil` for checkpoints: who was killed removes nothing."""

    def rmtree(path: Path, ignore_errors: bool = False) -> None:
        if not pipeline.world.process.dead:
            shutil.rmtree(path, ignore_errors)

    return SimpleNamespace(rmtree=rmtree)


class Job:
    """One start of the training job: its ranks meet before each step, as in a collective call."""

    def __init__(self, pipeline: Pipeline, number: int, weights: list[Place]) -> None:
        self.pipeline = pipeline
        scene = pipeline.scene
        self._stops_after = 0 if scene.prompts or scene.successor_s else scene.stops_after
        self._is_stateless = scene.stateless and scene.each_batch and not scene.successor_s
        self.number = number
        self.weights = weights
        self.store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # of its process group
        self.store.set_timeout(timedelta(seconds=COLLECTIVE_S))
        self.processes: list[Process] = []
        self._has_ended = False
        self._met: list[dict[int, Any]] = []
        self._steps: Counter[int] = Counter()
        self._apart: int | None = None  # the step in which ranks had different batches

    def _meet(self, rank: int, what: Any) -> list[Any]:
        """What each rank has brought to this meeting. Ends the job when one does not come."""
        number = self._steps[rank]
        self._steps[rank] += 1
        while len(self._met) <= number:
            self._met.append({})
        here = self._met[number]
        here[rank] = what
        world = self.pipeline.world
        until = world.time + COLLECTIVE_S
        while len(here) < self.pipeline.scene.ranks:
            if world.time > until:
                raise TimeoutError("the process group timed out")
            world.sleep(0.05)
        return [here[each] for each in sorted(here)]

    def _train(self, rank: int, k: int, members: tuple[Place, ...]) -> None:
        """All ranks have a batch and train it together."""
        if self._apart is not None and rank:
            self.pipeline.violate(f"P1: ranks trained different batches {self._apart}, and go on untold")
        brought = self._meet(rank, (k, members))
        if any(each[0] == "end" for each in brought):
            raise TimeoutError("ranks do different things")
        if any(each != brought[0] for each in brought):
            self._apart = k
        if not rank:
            self.weights += members
            self.pipeline.trained.update(members)
            self.pipeline.named[k] = members

    def end(self) -> None:
        """One rank has died, so the launcher ends the others and starts anew."""
        if self._has_ended:
            return
        self._has_ended = True
        self.pipeline.job_ends.append(self.pipeline.world.time)
        for process in self.processes:
            process.kill()
        if self.number == self.pipeline.jobs:  # else another one is there already
            self.pipeline.restart_job()

    def failed(self, process: Process, error: BaseException) -> None:
        timed_out = (TimeoutError, CheckpointError)
        expected = (BatchLostError, EpochFencedError, *timed_out)
        has_cause = (
            self.pipeline.world.lost or self.pipeline.scene.successor_s or isinstance(error, timed_out)
        )
        # While the server has forgotten its successor, an older job may save: the other one may not save beside that.
        are_two = self.pipeline.jobs > 1 and self.pipeline.scene.successor_s and self.pipeline.world.lost
        may_not_save = are_two and self.pipeline.scene.folder and isinstance(error, SettingError)
        if not (may_not_save or (isinstance(error, expected) and has_cause)):
            self.pipeline.violate(f"{process.name} raised {type(error).__name__}: {error}")
        process.kill()
        self.end()

    def run_rank(self, rank: int) -> None:
        pipeline, scene = self.pipeline, self.pipeline.scene
        queue = TrainerQueue(
            URL,
            RUN,
            rank=rank,
            world_size=scene.ranks,
            job=f"job{self.number}",
            batch_groups=scene.batch_groups,
            max_staleness=None if scene.max_staleness < 0 else scene.max_staleness,  # type: ignore[operator]
            drop_after=100_000 if scene.max_staleness >= 0 else None,  # type: ignore[operator]
            prefetch=scene.prefetch,
            chain=CHAIN | (KL if scene.needs else {}),
            pushed=("ref_log_probs",) if scene.needs else (),
            commit="each_batch" if scene.each_batch else "manual",
            keep_rolled_back=True,
            max_filtered_batches=None,
            settings=pipeline.settings,
        )
        if scene.folder and not scene.each_batch:
            path = queue.resume(pipeline.folder)
            if not rank:
                weights = json.loads((path / WEIGHTS).read_text()) if path else []
                self.weights = [(group_id, index) for group_id, index in weights]
        elif not self._is_stateless and (checkpoint := self._newest_checkpoint(queue, rank)) is not None:
            queue.load_state_dict(checkpoint[1])
        elif not rank:  # it goes on after the last commit
            queue.open()
            version, named = queue._progress.version, pipeline.named
            self.weights = [place for k in sorted(named) if k < version for place in named[k]]
            pipeline.was_stateless |= bool(self.weights)
            is_newest = self.number == pipeline.jobs  # an older one may hear late that it had opened the run
            if is_newest and version < pipeline.committed and not pipeline.world.lost:
                pipeline.violate(
                    f"P1: a trainer goes on at version {version}, {pipeline.committed} batches are committed"
                )
        is_unsaved, trained = True, 0
        while True:
            have_left = len(pipeline.done) == len(scene.producers)
            try:
                batch = queue.next_batch()
            except StarvedError:  # the run has ended as well
                if self.weights:
                    raise
                batch = None
            if trained and scene.each_batch and not rank and not pipeline.world.process.dead:
                pipeline.committed = max(pipeline.committed, trained)
            if batch is None:
                if scene.prompts and is_unsaved:  # which the producers wait for
                    self._save(queue, rank)
                    is_unsaved = False
                if self._is_over(rank, have_left):
                    break
                continue
            members = tuple((each.group_id, each.rollout_index) for each in batch.references)
            # A second score that was under way when the server lost the first one counts.
            rewards = (SECOND_SCORE,) if pipeline.world.lost else ()
            if wrong := [
                each for each in batch.references if each.reward not in (float(each.rollout_index), *rewards)
            ]:
                pipeline.violate(
                    f"P5: {wrong[0].group_id}/{wrong[0].rollout_index} has reward {wrong[0].reward}"
                )
            self._train(rank, batch.version, members)
            self._look(batch)
            queue.trained(batch)
            trained = batch.version + 1
            is_unsaved = (batch.version + 1) % scene.save_every != 0
            if not is_unsaved:
                self._save(queue, rank)
            if 0 < self._stops_after <= batch.version + 1:
                self._save(queue, rank)
                queue.finish()
                if not rank:
                    pipeline.stopped_at = pipeline.world.time
                break
        pipeline.closing_at = pipeline.world.time
        self._save(queue, rank)
        pipeline.ended |= not rank

    def _look(self, batch: Batch) -> None:
        """Rows of groups that were begun with an image have it."""
        for mb in batch:
            images = mb.extras.get("image", [None] * mb.num_rows)
            for reference, image in zip(mb.references, images, strict=True):
                group = self.pipeline.groups.get(reference.group_id)
                if group is not None and group.image != (image is not None):
                    self.pipeline.violate(
                        f"P1: group {group.id} was begun with image={group.image}, not so trained"
                    )

    def _save(self, queue: TrainerQueue, rank: int) -> None:
        if self.pipeline.scene.folder and not self.pipeline.scene.each_batch:
            with queue.checkpoint(self.pipeline.folder) as path:
                if not rank:
                    (path / WEIGHTS).write_text(json.dumps(self.weights))
            if not rank:
                self._note_saved(queue.epoch, {})
        elif not rank:
            state = queue.state_dict()
            self._note_saved(queue.epoch, state)
            queue.commit(state)
        self.pipeline.world.moment()

    def _note_saved(self, epoch: int, state: dict[str, Any]) -> None:
        """What an older job still saves is in nobody's past once a newer one has saved."""
        if epoch >= self.pipeline.saved_in:
            self.pipeline.checkpoint, self.pipeline.saved_in = (list(self.weights), state), epoch

    def _newest_checkpoint(self, queue: TrainerQueue, rank: int) -> tuple[list[Place], dict[str, Any]] | None:
        """What all ranks load. Where an older job may be at work, rank 0 fences it first."""
        if not self.pipeline.scene.successor_s:
            return self.pipeline.checkpoint
        if not rank:
            assert queue.epoch
        found: tuple[list[Place], dict[str, Any]] | None = self._meet(rank, self.pipeline.checkpoint)[0]
        if not rank:
            self.weights = list(found[0]) if found else []
        return found

    def _is_over(self, rank: int, have_left: bool) -> bool:
        """All ranks were told that the run has ended: whether it is over.

        have_left: whether all producers had left before this rank asked. Rank 0 decides: if not, more may come.
        """
        if not rank:
            self._check_end()
        brought = self._meet(rank, ("end", have_left))
        if any(each[0] != "end" for each in brought):
            raise TimeoutError("ranks do different things")
        is_over: bool = brought[0][1]
        if not is_over:
            self.pipeline.world.sleep(2.0)
        return is_over

    def _check_end(self) -> None:
        """While a producer is alive that has been heard of, the run may not end without what it has pushed."""
        pipeline, world = self.pipeline, self.pipeline.world
        if any(world.time < at + KNOWN_S for at in pipeline.forgotten):
            return  # nothing tells a trainer whose first session comes after the loss
        # With each_batch a batch counts as trained when the next one is asked for, whatever was saved.
        weights = {*self.weights, *(pipeline.trained if pipeline.scene.each_batch else ())}
        for life in pipeline.lives:
            is_well = (
                not life.process.dead
                and life.left is None
                and world.time - max(life.process.disturbed_until, world.refused_until) > KNOWN_S
            )
            if not is_well or self._came_meanwhile(life):
                continue
            # With prompts a producer has finished while it waits for what others play.
            is_here = life.closed is None
            if (
                is_here
                and not life.finishes
                and not pipeline.scene.prompts
                and world.time - life.opened > HEARD_OF_S
            ):
                pipeline.violate(
                    f"P3: the run has ended, and producer {life.name} is alive and has not finished"
                )
            if missing := [
                place
                for place in must_train(pipeline)
                if place not in weights
                and any(each.life is life for each in pipeline.acknowledged.get(place, ()))
            ]:
                pipeline.violate(
                    f"P3: the run has ended without {missing[:4]} of {life.name}, which is alive"
                )

    def _came_meanwhile(self, life: Life) -> bool:
        """Whether the producer may have come after this rank's request that ended the run, whose answer came late."""
        disturbances = self.pipeline.world.process.disturbances
        return any(first <= life.opened + HEARD_OF_S and life.opened <= last for first, last in disturbances)
