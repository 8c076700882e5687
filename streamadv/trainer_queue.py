"""The trainer queue: what a training job iterates over, and what tells the pipeline what was trained.

It is a log read by rank, not a work queue: rank 0 names batches, every rank reads the same record and takes its
part of the same plan. The trainer's checkpoint decides what was trained: save `state_dict()` with the weights,
then `commit` it.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

from . import batches
from .algorithms.chain import build_chain
from .algorithms.config import ChainConfig
from .batch_report import observe, passed_over
from .batches import BatchRecord, Unit
from .computing import Device, choose_device
from .connection import Connection
from .delivery import Fetched, deliver
from .errors import BatchLostError, EpochFencedError, NoBatchError, SettingError, UndecodableGroupError
from .isolation import Death
from .lineage import Lineage, NamingSettings, Start, returning_since
from .manifest import RunSettings
from .microbatch import Batch
from .outages import RETRYABLE, Backoff, T, patiently, retried
from .read_ahead import ReadAhead
from .ready import ReadyLogs
from .results import Result, assign, batch_scope, misfit
from .run import Run, open_run
from .suppliers import LateColumn, check_late, pushed_columns
from .watchdog import Limits, Watchdog

logger = logging.getLogger(__name__)

STAGE = "trainer"
BLOCK_MS = 500


class TrainerQueue(IterableDataset[Batch]):
    """Iterate over it for batches: `for batch in queue: for mb in batch: ...`.

    chain: preset name or configuration of the advantage chain. late: suppliers of columns made with the weights
    being trained, called on every micro-batch before the batch is yielded. pushed: late columns that producers
    push instead. min_groups: name a batch as soon as so many groups are there (default batch_groups).
    max_staleness: producers are admitted so far ahead, in batches (None = not paced). drop_after: groups staler
    than this are dropped when a batch is named (default 2 x max_staleness). tokens_per_micro_batch: None = each
    rank runs its part at once. commit: "each_batch" commits when the next batch is asked for; with "manual"
    nothing is committed but by `commit`. min_kept_ratio, max_filtered_batches: warn when filters keep fewer groups,
    raise StarvedError when they drop so many batches' worth since the last batch (None = never). epoch: of
    rank 0, for other ranks without torch.distributed.
    """

    def __init__(
        self,
        connection: str | Connection,
        run: str = "default",
        *,
        rank: int = 0,
        world_size: int = 1,
        batch_groups: int = 64,
        min_groups: int | None = None,
        tokens_per_micro_batch: int | None = None,
        max_staleness: int | None = 4,
        drop_after: int | None = None,
        prefetch: int = 1,
        chain: str | ChainConfig | Mapping[str, Any] = "grpo",
        late: Mapping[str, LateColumn] | None = None,
        pushed: Sequence[str] = (),
        commit: Literal["each_batch", "manual"] = "each_batch",
        device: Device = "cpu",
        epoch: int | None = None,
        keep_rolled_back: bool = False,
        min_kept_ratio: float = 0.05,
        max_filtered_batches: int | None = 10,
        settings: RunSettings | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise SettingError(f"rank is {rank}, needs 0 <= rank < world_size ({world_size})")
        for name, value, least in (
            ("batch_groups", batch_groups, 1),
            ("min_groups", min_groups, 1),
            ("tokens_per_micro_batch", tokens_per_micro_batch, 1),
            ("max_staleness", max_staleness, 0),
            ("drop_after", drop_after, 0),
            ("prefetch", prefetch, 0),
            ("max_filtered_batches", max_filtered_batches, 1),
        ):
            if value is not None and value < least:
                raise SettingError(f"{name} is {value}, needs {least} or more")
        if commit not in ("each_batch", "manual"):
            raise SettingError(f"commit is {commit!r}, needs 'each_batch' or 'manual'")
        self._late = dict(late or {})
        check_late(self._late)
        built = build_chain(chain)
        self._settings = NamingSettings(
            batch_groups=batch_groups,
            min_groups=min_groups or batch_groups,
            prefetch=prefetch,
            max_staleness=max_staleness,
            drop_after=2 * max_staleness if drop_after is None and max_staleness is not None else drop_after,
            keep_rolled_back=keep_rolled_back,
            rolled_back_above=None,
            needs=pushed_columns(built, self._late, pushed),
            chain=built.config.model_dump(mode="json"),
            late=tuple(sorted(self._late)),
            tokens_per_micro_batch=tokens_per_micro_batch,
        )
        self._connection = Connection(connection) if isinstance(connection, str) else connection
        self._owned = isinstance(connection, str)
        self._run_name, self._run_settings = run, settings
        self._rank, self._world_size = rank, world_size
        self._epoch = epoch
        self._shared_epoch: int | None = None  # received, and not used yet
        self._commit_mode = commit
        self._device = choose_device(device)
        self._limits = Limits(batch_groups, min_kept_ratio, max_filtered_batches)
        self._stop = threading.Event()
        self._watchdog: Watchdog | None = None
        self._run: Run | None = None
        self._lineage: Lineage | None = None
        self._greeted = False
        self._ahead: ReadAhead | None = None  # of the batch to be delivered next
        self._job = secrets.token_hex(8)
        self._begin = Start(job=self._job)
        self._next = 0  # k of the batch to be delivered next
        self._current: Batch | None = None
        self._ready = ReadyLogs()

    # Iteration

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise SettingError(
                "num_workers of the DataLoader is above 0: use 0, the queue reads ahead itself"
            )
        while (batch := self.next_batch()) is not None:
            yield batch

    @property
    def epoch(self) -> int:
        """This job's epoch: rank 0 hands it to the other ranks."""
        return self._patiently(lambda: self._start().epoch)

    @property
    def batches_waiting(self) -> int:
        """Batches that are named and not yet delivered: after a restart, those that come again."""
        return self._patiently(lambda: sum(k >= self._next for k in self._start().records))

    def next_batch(self, timeout: float | None = None, max_groups: int | None = None) -> Batch | None:
        """The next batch, or None when the run has ended. Marks the one before as trained.

        max_groups: a batch that is named now gets no more groups than this (default batch_groups).
        Raises NoBatchError after `timeout` seconds without a new group, EpochFencedError when a newer trainer
        has taken over, BatchLostError when the server lost a named batch, and where waiting cannot end
        StarvedError and UncommittedBudgetError.
        """
        started = progress = time.monotonic()
        backoff = Backoff(sleep=self._stop.wait)
        while True:
            try:
                lineage = self._start()
                lineage.run.keep_up()
                lineage = self._recover(lineage)
                self._finish_current(lineage)
                ended = lineage.find(self._next) is None and lineage.has_ended(self._next)
                if lineage.look_ahead(ended, max_groups):
                    progress = time.monotonic()
                if (batch := self._collect(lineage)) is not None:
                    with suppress(*RETRYABLE):  # the next call does it again
                        lineage.look_ahead(False, max_groups)
                        self._read_ahead(lineage, lineage.find(self._next))
                    self._current = batch
                    if self._watchdog is not None:
                        self._watchdog.progress()
                    if self._rank == 0:
                        observe(batch, time.monotonic() - started)
                    return batch
                if ended and lineage.scanned and lineage.find(self._next) is None:
                    lineage.tell_end(self._next)
                    return None
                if timeout is not None and time.monotonic() - progress > timeout:
                    raise NoBatchError(
                        f"no new group for {timeout:g} s (run {self._run_name}, batch {self._next}): "
                        f"{Watchdog(lineage.run, self._limits).reasons()}"
                    )
                if self._watchdog is not None:
                    self._watchdog.look()
                block_ms = BLOCK_MS if timeout is None else min(BLOCK_MS, round(timeout * 500) or 1)
                self._ready.wait(lineage, block_ms, max_groups, self._stop)
            except RETRYABLE as error:
                retried(STAGE, error, backoff)
                backoff.wait()
            else:
                backoff.reset()

    # What the training loop says

    def trained(self, batch: Batch) -> None:
        """The batch has been trained on: the version moves to batch.version + 1, admission is freed.

        Called for the batch before by `next_batch` if the loop did not. Only rank 0's call counts. Waits for a
        server that does not answer, as all calls of this queue do.
        """
        self._patiently(lambda: self._trained(batch))

    def state_dict(self) -> dict[str, Any]:
        """What to save beside the weights: JSON-serialisable; pass it to `commit` after saving."""
        lineage = self._patiently(self._start)
        return {
            "run": self._run_name,
            "epoch": lineage.epoch,
            "version": lineage.version,
            "groups": list(lineage.trained),
            "kl": lineage.kl.to_json(),
        }

    def commit(self, state: Mapping[str, Any]) -> None:
        """The checkpoint holding `state` is saved: its batches are trained for good and deleted here.

        Repeating it changes nothing. Only rank 0's call counts.
        """
        self._patiently(lambda: self._commit(state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: take over the run, repeat its commit, set the version back.

        Batches recorded after it come again, in their order and composition, before new ones.
        """
        missing = {"run", "version", "groups"} - state.keys()
        if missing:
            raise SettingError(f"state has no {sorted(missing)[0]!r}: give what state_dict() returned")
        if state["run"] != self._run_name:
            raise SettingError(f"state is of run {state['run']!r}, this queue reads {self._run_name!r}")
        version = int(state["version"])
        self._settings = replace(self._settings, rolled_back_above=version)
        trained = dict.fromkeys(state["groups"], returning_since(time.monotonic()))
        self._begin = Start(
            version, version, trained, kl=state.get("kl"), epoch=int(state["epoch"]), job=self._job
        )
        self._lineage = self._current = None
        self._patiently(self._start)

    def close(self) -> None:
        """Disconnect. What was delivered and not marked as trained comes again."""
        self._stop.set()
        self._stop_reading()
        if self._owned:
            self._connection.close()

    # Inside

    def _patiently(self, call: Callable[[], T]) -> T:
        return patiently(call, STAGE, sleep=self._stop.wait)

    def _trained(self, batch: Batch) -> None:
        lineage = self._start()
        record = lineage.find(batch.version)
        if record is None or record.id != batch.id:
            raise SettingError(f"batch {batch.version} is not one this queue has delivered and not committed")
        lineage.advance(record, batch.metrics.get("critic/kl"))

    def _commit(self, state: Mapping[str, Any]) -> None:
        lineage = self._start()
        if state["version"] > lineage.version:
            raise SettingError(
                f"state has version {state['version']}, this queue is at {lineage.version}: load it first"
            )
        lineage.commit(state["version"])

    def _start(self) -> Lineage:
        """Join the run, once; rank 0 takes it over."""
        if self._lineage is None:
            if (
                not self._greeted
            ):  # later on a refusal may pass as well: a server that restarts without its users
                self._connection.check()
                self._greeted = True
            if self._run is None:
                self._run = open_run(self._connection, self._run_name, self._run_settings)
            else:
                self._run.refresh()  # a server that lost the manifest gets back what is known of it
            run = self._run
            leads = self._rank == 0
            # The other ranks wait until rank 0 has taken over before they read where to go on, and only once.
            if not leads and self._shared_epoch is None:
                self._shared_epoch = _share_epoch(self._epoch, self._rank)
            alone = self._world_size == 1
            lineage = Lineage(
                run, self._settings, self._begin, leads=leads, alone=alone, epoch=self._shared_epoch
            )
            if leads:
                _share_epoch(lineage.epoch, self._rank)
            self._shared_epoch = None
            self._next = lineage.version
            self._ready = ReadyLogs()
            self._lineage = lineage
            self._watchdog = Watchdog(run, self._limits) if leads else None
        return self._lineage

    def _recover(self, lineage: Lineage) -> Lineage:
        """After a restart or failover of the server: repeat what it may have lost of this job."""
        if lineage.has_same_servers():
            return lineage
        logger.warning("%s: the server is not the one it was: repeating what it may have lost", STAGE)
        current = self._current
        if current is not None and current.version in lineage.records:  # else committed already
            lineage.note_trained(lineage.records[current.version])  # the loop asks for the next one
        self._begin, self._lineage = lineage.remember(), None
        try:
            return self._start()
        except EpochFencedError:
            self._lineage = lineage  # `state_dict` still tells what this job has trained
            raise

    def _finish_current(self, lineage: Lineage) -> None:
        batch = self._current
        if batch is None:
            return
        if batch.version >= lineage.version:
            self._trained(batch)
        if self._commit_mode == "each_batch":
            self._commit(self.state_dict())
        self._current = None

    def _collect(self, lineage: Lineage) -> Batch | None:
        """The next batch if all its results are there."""
        record = lineage.find(self._next)
        if record is None:
            return None
        self._read_ahead(lineage, record)
        units = batches.work_units(record, batch_scope(record))
        self._ready.read(lineage)
        results = self._ready.results_of(record, units)
        if results is None:
            return None
        try:
            batch = self._deliver(lineage, record, units, results)
        except BatchLostError:
            if lineage.has_same_servers():
                raise
            return None  # lost a moment ago, with the last moments of a server: to be recovered from
        if batch is None:
            return None
        batch.metrics.update(passed_over(lineage.passed_over, batch))
        lineage.passed_over.clear()
        self._ready.forget(record)
        self._stop_reading()
        self._next += 1
        return batch

    def _read_ahead(self, lineage: Lineage, record: BatchRecord | None) -> None:
        """Have the payloads fetched while results, or the trainer, are waited for. Errors are met again then."""
        if record is not None and (self._ahead is None or self._ahead.batch != record.id):
            self._stop_reading()
            with suppress(BatchLostError, *RETRYABLE):
                groups = lineage.read_groups(record, ())
                self._ahead = ReadAhead(
                    lineage.run,
                    record,
                    groups,
                    rank=self._rank,
                    world_size=self._world_size,
                    device=self._device,
                )

    def _stop_reading(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
        self._ahead = None

    def _deliver(
        self, lineage: Lineage, record: BatchRecord, units: Sequence[Unit], results: Sequence[Result]
    ) -> Batch | None:
        """This rank's part of the batch without the groups that turn out to be dead.

        A rank among several leaves out the trajectories only: the others do not know, and keep to the plan.

        None when results are not what their unit of work gives (they are forgotten), or a server is another one now.
        """
        deaths = {group_id: death for result in results for group_id, death in result.header.dead.items()}
        while True:
            dead, left_out = lineage.bury(record, deaths)
            groups = lineage.read_groups(record, dead)
            by_id = {group.group_id: group for group in groups}
            for unit, result in zip(units, results, strict=True):
                problem = misfit(result, unit, by_id)
                if problem is not None:
                    logger.error("%s: results of batch %d are not used: %s", STAGE, record.k, problem)
                    self._ready.refuse(record, unit)
                    return None
            try:
                return deliver(
                    lineage.run,
                    record,
                    groups,
                    assign(units, {result.header.unit: result for result in results}, groups),
                    results,
                    rank=self._rank,
                    world_size=self._world_size,
                    device=self._device,
                    late=self._late,
                    ahead=Fetched({}) if self._ahead is None else self._ahead.result(),
                    left_out=left_out,
                )
            except UndecodableGroupError as error:
                if not lineage.has_same_servers():
                    return None  # as in `_collect`: no fault of the data
                logger.error("%s: %s", STAGE, error)
                ids = {group_id for group_id, _ in error.problems}
                found = [pointer for pointer in record.groups if pointer.group_id in ids]
                batches.read_groups(lineage.run, found)  # lost with their payloads: BatchLostError
                if self._world_size > 1:
                    if not lineage.leave_out(record, error.problems):
                        return None
                    continue
                for (group_id, _), text in error.problems.items():
                    deaths.setdefault(group_id, Death("undecodable", text))


def _share_epoch(epoch: int | None, rank: int) -> int:
    """Rank 0's epoch, by torch.distributed or as given. Raises SettingError on a rank that has neither."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        number = torch.tensor([epoch or 0], dtype=torch.int64)
        torch.distributed.broadcast(number, src=0)
        return int(number)
    if epoch is None:
        raise SettingError(f"epoch is not given on rank {rank}: pass rank 0's, or use torch.distributed")
    return epoch
