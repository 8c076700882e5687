"""The trainer queue: a training job iterates over it, and tells the pipeline through it what was trained.

It is a log read by rank, not a work queue: rank 0 names batches, every rank reads the same record and takes its part
of the same plan. The trainer's checkpoint decides what was trained: `checkpoint` saves the queue's state with the
weights and commits, `resume` goes on from there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from torch.utils.data import IterableDataset, get_worker_info

from .. import metrics
from ..algorithms.chain import build_chain
from ..algorithms.chain.config import ChainConfig
from ..algorithms.device import Device, choose_device
from ..batch.progress import DURABILITY_WINDOW_S, Progress, check_state
from ..batch.record import NamingSettings, read_records
from ..batch.selection import check_quotas
from ..errors import SettingError
from ..messages import brief, check_number, log_fields, whole_number
from ..prompts.spec import is_number
from ..run.manifest import RunSettings, given_settings
from ..settings import run_name
from ..status.watchdog import Limits
from ..store.connection import Connection
from .checkpoints import find_start, folder_of, read_start, saving
from .collect import STAGE
from .late_columns import LateColumn, check_late, pushed_columns
from .loop import Loop
from .microbatch import Batch
from .plan import Rank
from .session import Commit, Mark, Sessions
from .together import Together

logger = logging.getLogger(__name__)

MAX_URI_CHARS: Final = 2048


class TrainerQueue(IterableDataset[Batch]):
    """Iterate over it for batches: `for batch in queue: for micro_batch in batch: ...`.

    connection: URL of the server, or a `Connection`, which `close` then leaves open.
    run: name of the run; None = STREAMADV_RUN, else `default`. Created if the server has none of that name.
    rank, world_size: of this process, 0 <= rank < world_size. Rank 0 leads: it names batches.
    batch_groups: groups of a batch.
    min_groups: name a batch as soon as so many groups are complete (default batch_groups).
    tokens_per_micro_batch: tokens of a micro-batch at most, prompts included. A trajectory with a longer row is not
        trained on, and logged (`oversize`). None makes one micro-batch of all that a rank has.
    keep_groups: rows of a group come in one micro-batch, side by side, where they fit into its tokens, so that a
        shared prefix is computed once. Groups then stay on one rank, and ranks are less even.
    max_staleness: producers are admitted so many versions ahead of the trainer; None does not pace them.
    drop_after: groups staler than so many versions are dropped instead of named (default 2 x max_staleness; None for
        both keeps them all).
    prefetch: batches that are named and computed before they are asked for.
    chain: preset name or configuration of the advantage chain.
    late: column -> supplier. The queue calls it with every micro-batch before it returns a batch; it returns one
        number per token, [N] of any real dtype, computed with the weights being trained.
    pushed: columns usually supplied late that producers push instead.
    mark: "auto" marks a batch as trained when the next one is asked for, if `trained` did not; "explicit" leaves it to
        `trained`, for a trainer that reads ahead, from another thread if it likes. `prefetch` says how far: the queue
        delivers that many batches beyond the first one that is not marked.
    commit: "manual" leaves it to `checkpoint`, or to `commit` after a checkpoint is saved: then a batch counts as
        trained, and is deleted. "each_batch" does that when the next one is asked for (mark "explicit": when it is
        marked). It is for those who keep weights elsewhere: after a crash the run goes on behind the last batch that
        was asked for, so what weights loaded from before have not learned from batches since does not come again.
    device: of the micro-batches: "cpu", "cuda", or "auto" for cuda if there is one.
    job: id of this start of the training job, the same on all its ranks and of no other start. Default: torchrun's or
        SLURM's id with the count of restarts, else one that the ranks find in torch.distributed's store.
    durability_window: seconds after which a server has its writes safe (with `appendfsync everysec` and failovers
        about 2). Until then `state_dict` keeps groups that were committed.
    keep_rolled_back: train on groups played with a version above a loaded checkpoint's instead of dropping them.
    min_kept_ratio: warn if filters keep a smaller share of groups.
    max_filtered_batches: raise StarvedError after so many batches' worth of groups were filtered, stale, rolled back
        or dead since the last batch; None never does.
    settings: of the run, see `RunSettings`.
    quotas: data source -> weight, above 0: of the complete groups of up to four batches each batch takes from each
        source that is there its share, rounded down, and the oldest others; a source without a weight has the
        smallest. So every batch has the oldest group, and no source waits for ever. None takes the oldest groups.

    Which calls each rank makes: every rank iterates, or calls `next_batch`, and calls `checkpoint`, `resume` and
    `load_state_dict`, these with the same folder or state. `trained`, `state_dict` and `commit` count on rank 0 alone;
    on the other ranks they change nothing in the run, so all ranks may run the same code. None of them is a collective
    call. If several ranks save parts of a checkpoint themselves, a barrier belongs between their saving and `commit`.

    Calls are safe from several threads. The constructor asks no server. Raises SettingError for an argument out of
    range. Every other call waits for a server that does not answer, and raises EpochFencedError when a newer trainer
    has taken over.
    """

    def __init__(
        self,
        connection: str | Connection,
        run: str | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        batch_groups: int = 64,
        min_groups: int | None = None,
        tokens_per_micro_batch: int | None = None,
        keep_groups: bool = False,
        max_staleness: int | None = 4,
        drop_after: int | None = None,
        prefetch: int = 1,
        chain: str | ChainConfig | Mapping[str, Any] = "grpo",
        late: Mapping[str, LateColumn] | None = None,
        pushed: Sequence[str] = (),
        mark: Mark = "auto",
        commit: Commit = "manual",
        device: Device = "cpu",
        job: str | None = None,
        durability_window: float = DURABILITY_WINDOW_S,
        keep_rolled_back: bool = False,
        min_kept_ratio: float = 0.05,
        max_filtered_batches: int | None = 10,
        settings: RunSettings | None = None,
        quotas: Mapping[str, float] | None = None,
    ) -> None:
        rank, world_size = whole_number("rank", rank), whole_number("world_size", world_size, 1)
        batch_groups = whole_number("batch_groups", batch_groups, 1)
        min_groups = whole_number("min_groups", min_groups, 1, or_none=True)
        tokens_per_micro_batch = whole_number(
            "tokens_per_micro_batch", tokens_per_micro_batch, 1, or_none=True
        )
        max_staleness = whole_number("max_staleness", max_staleness, or_none=True)
        drop_after = whole_number("drop_after", drop_after, or_none=True)
        prefetch = whole_number("prefetch", prefetch)
        max_filtered_batches = whole_number("max_filtered_batches", max_filtered_batches, 1, or_none=True)
        if rank >= world_size:
            raise SettingError(f"rank is {rank}, needs 0 <= rank < world_size ({world_size})")
        if min_groups is not None and min_groups > batch_groups:
            raise SettingError(f"min_groups is {min_groups}, needs batch_groups ({batch_groups}) or less")
        numbers = {"durability_window": durability_window, "min_kept_ratio": min_kept_ratio}
        flags = {"keep_groups": keep_groups, "keep_rolled_back": keep_rolled_back}
        _check_choices(mark, commit, numbers, flags)
        quotas = check_quotas(quotas)
        late = check_late(late)
        settings = given_settings(settings)
        built = build_chain(chain)
        naming = NamingSettings(
            batch_groups=batch_groups,
            min_groups=min_groups or batch_groups,
            prefetch=prefetch,
            max_staleness=max_staleness,
            drop_after=2 * max_staleness if drop_after is None and max_staleness is not None else drop_after,
            keep_rolled_back=keep_rolled_back,
            needs=pushed_columns(built, late, pushed),
            chain=built.config.model_dump(mode="json"),
            late=tuple(sorted(late)),
            tokens_per_micro_batch=tokens_per_micro_batch,
            keep_groups=keep_groups,
            quotas=quotas,
        )
        run = run_name(run)
        if max_staleness is not None and naming.drop_after is not None and naming.drop_after < max_staleness:
            logger.warning(
                "drop_after is %d, max_staleness %d: producers are admitted %d versions ahead, and what is older than "
                "%d is dropped; lower max_staleness or raise drop_after",
                *(naming.drop_after, max_staleness, max_staleness, naming.drop_after),
                extra=log_fields("drops_early", run=run, role=STAGE),
            )
        self._connection = Connection.of(connection)
        self._owns_connection = isinstance(connection, str)
        self._run_name = run
        self._rank = Rank(rank, world_size, choose_device(device))
        metrics.begin_stage(STAGE, "trainer" if rank == 0 else "rank")
        self._progress = Progress(durability_window, world_size)
        self._sessions = Sessions(
            *(self._connection, run, settings, naming, self._rank, job, self._progress, mark, commit)
        )
        limits = Limits(batch_groups, min_kept_ratio, max_filtered_batches, naming.min_groups)
        self._loop = Loop(self._sessions, late, limits)
        self._together = Together(run, self._rank, self._sessions.number, self._loop.pause)
        self._callbacks: list[Callable[[Batch], None]] = []
        self._saves = threading.Lock()  # held for a checkpoint, never waited for

    def __repr__(self) -> str:
        progress, rank = self._progress, self._rank
        return (
            f"TrainerQueue(run={self._run_name!r}, rank={rank.number}, world_size={rank.world_size}, "
            f"version={progress.version}, committed={progress.committed}, delivered={progress.delivered})"
        )

    @property
    def rank(self) -> int:
        """Of this process in its training job."""
        return self._rank.number

    @property
    def world_size(self) -> int:
        """Processes of the training job."""
        return self._rank.world_size

    def open(self, *, weights: str | None = None) -> Self:
        """Join the run now: rank 0 takes it, and from then on no training group is begun unpaced.

        Otherwise the first call that needs the run does it, `next_batch` in most loops, and groups begun before know of
        no pacing unless the run's settings have some. A rank above 0 waits for rank 0. Calling it again changes
        nothing; after `finish` it opens the run again. Call `load_state_dict` first, if there is a state to load.

        Args:
            weights: where the weights of the present version lie, for `producer.weights`.

        Raises SettingError for what is no URI.
        """
        check_weights(weights)
        self._loop.check_open()
        with self._loop.lock:
            if self._progress.finished:
                self._progress.finished = False
                self._sessions.end()
        self._loop.patiently(self._sessions.open, weights)
        return self

    def finish(self) -> None:
        """End the run: producers begin no more training groups (`RunEndedError`), `producer.groups(...)` ends.

        Iteration ends here too: call it on every rank. Batches marked as trained are committed if commit is
        "each_batch". Whatever else was pushed stays where it is, queued or in flight: a trainer that takes the run
        later goes on with it, and says that it has opened the run again.
        """
        self._loop.patiently(self._sessions.finish)

    # Iteration

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches until the run has ended, see `next_batch`. Raises SettingError in a DataLoader's worker."""
        if get_worker_info() is not None:
            raise SettingError(
                "num_workers of the DataLoader is above 0: use 0, the queue reads ahead itself"
            )
        while (batch := self.next_batch()) is not None:
            yield batch

    def next_batch(self, timeout: float | None = None, max_groups: int | None = None) -> Batch | None:
        """Return the next batch, or None when the run has ended. Marks the batch before as trained, unless mark is
        "explicit". Every rank calls it equally often.

        timeout: seconds without a new group after which NoBatchError is raised; None waits for ever.
        max_groups: a batch that is named now gets no more groups than this (default batch_groups).

        Raises BatchLostError if the server lost a named batch, LateColumnError for a supplier that fails, and where
        waiting cannot end StarvedError, UncommittedBudgetError or BatchBudgetError; StarvedError also at the end of a
        run of which nothing was trained because all groups were dropped. After an error the next call gives
        the same batch.
        """
        take_back: list[Callable[[], None]] = []
        check_number("timeout", timeout, "seconds", zero=True, or_none=True)
        max_groups = whole_number("max_groups", max_groups, 1, or_none=True)
        self._loop.check_open()
        try:
            with metrics.wait(STAGE):
                batch = self._loop.next_batch(timeout, max_groups, take_back)
            if batch is not None:
                for callback in self._callbacks:
                    callback(batch)
        except BaseException as error:
            for undo in take_back:
                undo()
            if isinstance(error, KeyboardInterrupt):
                self._loop.stop_reading()
                raise KeyboardInterrupt from None  # without the frames of the client that it has interrupted
            raise
        return batch

    def on_batch(self, callback: Callable[[Batch], None]) -> None:
        """Show every batch to `callback`, in the thread that asks for it, before `next_batch` returns it.

        What it raises, `next_batch` raises; the next call gives the same batch.
        """
        self._callbacks.append(callback)

    @property
    def batches_waiting(self) -> int:
        """Batches that are named and not delivered: after a restart, those that are delivered again."""
        return self._loop.patiently(
            lambda: sum(k >= self._progress.delivered for k in read_records(self._sessions.current().run))
        )

    @property
    def epoch(self) -> int:
        """The fencing epoch of this job (no pass over the data); reading it opens the run."""
        self._loop.patiently(self._sessions.current)
        return self._progress.epoch

    # What the training loop says

    def trained(self, batch: Batch, weights: str | None = None) -> None:
        """Mark a batch as trained: the version moves to batch.version + 1, and producers are admitted further.

        weights: URI of the weights of that version, for `producer.weights`; it is published together with the version,
        so the weights have to lie there. None: producers keep to the URI before.

        `next_batch` does it for the batch before if the loop did not, unless mark is "explicit": then every rank calls
        this, in the order of the batches. In the run only rank 0's call counts. Raises SettingError for a batch that
        this queue has not delivered, or has committed, or that comes before its turn.
        """
        check_weights(weights)
        if not isinstance(batch, Batch):
            raise SettingError(f"batch is {brief(batch)}, needs what next_batch has returned")
        self._loop.patiently(self._sessions.trained, batch, weights, [])

    @contextmanager
    def checkpoint(self, folder: str | Path, *, keep: int = 2) -> Iterator[Path]:
        """Save a checkpoint: `with queue.checkpoint(folder) as path:` gives an empty folder to write the weights to.

        Leaving the block writes the queue's state there, renames it to `folder/<version>`, which is there whole or not
        at all, commits, and removes all but the `keep` newest. An exception leaves nothing, and commits nothing.
        The version is that of `state_dict()` at the beginning of the block: batches below it are in the weights.

        Every rank calls it after the same batch, and writes into the same folder, on a disk that all see. The ranks
        wait for each other, by the key-value store of torch.distributed's process group; no collective call is made.

        Args:
            folder: of one run; is made if need be. What has other names than numbers in it is left alone.
            keep: checkpoints that stay, at least 1.

        Raises SettingError for a folder of another run, with a later checkpoint, inside another block of this queue or
        without a process group for several ranks, CheckpointError if the disk or another rank fails, BatchLostError and
        EpochFencedError.
        """
        keep = whole_number("keep", keep, 1)
        path = folder_of(folder)
        state = self.state_dict()
        self._sessions.warn_of_batch_in_hand()
        if not self._saves.acquire(blocking=False):
            raise SettingError("a checkpoint is being saved: leave its block before the next one")
        try:
            # Raises if another trainer has the run, or this rank's last batch is named again.
            look = partial(self._loop.patiently, self._sessions.at_hand)
            with saving(path, keep, state, self._together, look, self.commit) as unfinished:
                yield unfinished
        finally:
            self._saves.release()

    def resume(self, folder: str | Path) -> Path | None:
        """Go on from the newest checkpoint in `folder`, as `load_state_dict`. Returns its path, to load the weights.

        None if there is none: the run begins at version 0, and batches delivered before and never committed come again.
        Call it on every rank, before the first batch; all take the checkpoint that rank 0 finds.

        Raises SettingError for a run that has committed batches while the folder has no checkpoint, for a checkpoint of
        another run or of a later release, or one that cannot be read, and CheckpointError if another rank fails.
        """
        folder, together = folder_of(folder), self._together
        together.begin()
        while True:
            with together.step(alone=True) as found:
                if together.leads:
                    found.says = self._find_start(folder)
            with together.step():  # a rank that cannot read it keeps all from taking the run
                path, state = read_start(folder, self._run_name, found.heard[0])
            with together.step(alone=True) as taken:
                if together.leads:
                    self._go_on(state)
                    # The trainer before could save one more until the run was taken.
                    taken.says = self._find_start(folder)
            if taken.heard[0] == found.heard[0]:
                break
        if not together.leads:
            self._go_on(state)
        return path

    def _find_start(self, folder: Path) -> str:
        versions = self._loop.patiently(self._sessions.stored_versions)
        return find_start(folder, self._run_name, *versions)

    def _go_on(self, state: Mapping[str, Any] | None) -> None:
        """From this state, None for a run that nobody has trained. Rank 0 takes the run."""
        if state is not None:
            with self._loop.lock:
                self._progress.load(state)
                self._sessions.end()
                self._sessions.in_hand = None
                self._loop.stop_reading()
        if self._rank.number == 0:
            self._loop.patiently(self._sessions.current)

    def state_dict(self) -> dict[str, Any]:
        """Return what to save beside the weights, JSON-serialisable. Pass it to `commit` after saving.

        `checkpoint` does both; this is for trainers with checkpoints of their own.

        Rank 0 calls it. It has the ids of all groups in the weights that the server may still have, or get back after
        data loss: groups of batches that are not committed, or were committed within `durability_window`. So it grows
        with the batches between two commits, by about 40 bytes a group.
        """
        if self._progress.began is None:
            self._loop.patiently(self._sessions.current)
        if self._rank.number == 0 and self._progress.has_prompts:
            self._loop.patiently(self._sessions.save_prompts)
        with self._loop.lock:
            return self._progress.state(self._run_name)

    def commit(self, state: Mapping[str, Any]) -> None:
        """Say that the checkpoint holding `state` is saved: its batches count as trained and are deleted.

        Rank 0 calls it, after every rank has saved its part. Repeating it changes nothing. Raises SettingError for a
        state of a later version or of another run, and for what is no state.
        """
        check_state(state, self._run_name)
        self._loop.patiently(self._sessions.commit, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: take over the run, repeat its commit, set the version back.

        Batches named after it are delivered again before new ones, in their order and with the same groups. Call it on
        every rank with the same state; `next_batch` of a rank above 0 waits for rank 0's call. Raises SettingError for
        the state of another run, or none.
        """
        check_state(state, self._run_name)
        self._go_on(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect: the run hears that this trainer has left.

        Batches that were delivered and not marked as trained are delivered again by the next queue.
        """
        self._loop.close()
        self._sessions.close()
        if self._owns_connection:
            self._connection.close()


def check_weights(uri: str | None) -> None:
    """Raise SettingError unless it is None or a URI that fits into one line."""
    if uri is not None and not (isinstance(uri, str) and 0 < len(uri) <= MAX_URI_CHARS and uri.isprintable()):
        raise SettingError(f"weights is {brief(uri)}, needs a URI of at most {MAX_URI_CHARS} characters")


def _check_choices(
    mark: object, commit: object, numbers: Mapping[str, object], flags: Mapping[str, object]
) -> None:
    """Raise SettingError unless each is one of its values. numbers, flags: by the names of their arguments."""
    if mark not in ("auto", "explicit"):
        raise SettingError(f"mark is {brief(mark)}, needs 'auto' or 'explicit'")
    if commit not in ("each_batch", "manual"):
        raise SettingError(f"commit is {brief(commit)}, needs 'each_batch' or 'manual'")
    for name, number in numbers.items():
        if not is_number(number) or number < 0:
            raise SettingError(f"{name} is {brief(number)}, needs a number, 0 or more")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise SettingError(f"{name} is {brief(flag)}, needs True or False")
