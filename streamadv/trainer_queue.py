"""The trainer queue: what a training job iterates over, and what tells the pipeline what was trained.

It is a log read by rank, not a work queue: rank 0 names batches, every rank reads the same record and takes its
part of the same plan. The trainer's checkpoint decides what was trained: save `state_dict()` with the weights,
then `commit` it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

from . import batches, metrics
from .advantage import Device, choose_device
from .algorithms.chain import Chain, build_chain
from .algorithms.config import ChainConfig
from .batches import BatchRecord, NamingRules
from .connection import RETRYABLE, Backoff, Connection
from .delivery import Chunk, LateColumn, assign, deliver, parse_chunk
from .errors import EpochFencedError, NoBatchError, SettingError
from .manifest import RunSettings
from .microbatch import Batch
from .producing import PRODUCER_TIMEOUT_S
from .run import Run, open_run

logger = logging.getLogger(__name__)

STAGE = "trainer"
BLOCK_MS = 500
#: Columns only the weights being trained can fill: they need a supplier, or producers that push them.
LATE_COLUMNS = frozenset({"old_log_probs", "values"})


class TrainerQueue(IterableDataset[Batch]):
    """Iterate over it for batches: `for batch in queue: for mb in batch: ...`.

    chain: preset name or configuration of the advantage chain. late: suppliers of columns made with the weights
    being trained, called on every micro-batch before the batch is yielded. pushed: late columns that producers
    push instead. min_groups: name a batch as soon as so many groups are there (default batch_groups).
    max_staleness: producers are admitted so far ahead, in batches (None = not paced). drop_after: groups staler
    than this are dropped when a batch is named (default 2 x max_staleness). tokens_per_micro_batch: None = each
    rank runs its part at once. commit: "each_batch" commits when the next batch is asked for; with "manual"
    nothing is committed but by `commit`. epoch: of rank 0, for other ranks without torch.distributed.
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
        settings: RunSettings | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise SettingError(f"rank is {rank}, needs 0 <= rank < world_size ({world_size})")
        if batch_groups < 1 or prefetch < 0:
            raise SettingError(f"batch_groups is {batch_groups}, prefetch {prefetch}: need >= 1 and >= 0")
        if commit not in ("each_batch", "manual"):
            raise SettingError(f"commit is {commit!r}, needs 'each_batch' or 'manual'")
        self._late = dict(late or {})
        self._chain = build_chain(chain)
        self._needs = _check_suppliers(self._chain, self._late, pushed)
        self._connection = Connection(connection) if isinstance(connection, str) else connection
        self._owned = isinstance(connection, str)
        self._run_name, self._settings = run, settings
        self._rank, self._world_size = rank, world_size
        self._batch_groups = batch_groups
        self._min_groups = min_groups or batch_groups
        self._tokens_per_micro_batch = tokens_per_micro_batch
        self._max_staleness = max_staleness
        self._drop_after = drop_after
        if drop_after is None and max_staleness is not None:
            self._drop_after = 2 * max_staleness
        self._prefetch = prefetch
        self._commit_mode = commit
        self._device = choose_device(device)
        self._keep_rolled_back = keep_rolled_back
        self._stop = threading.Event()

        self._run: Run | None = None
        self._epoch = epoch
        self._version = 0  # of the weights: batches below it are trained
        self._next = 0  # k of the batch to be delivered next
        self._committed = 0
        self._restored: int | None = None  # version given by load_state_dict
        self._lineage: dict[str, None] = {}  # ids of groups trained, kept in order
        self._records: dict[int, BatchRecord] = {}
        self._applied: set[str] = set()
        self._cursors: dict[int, str] = {}  # last log entry a record covers, by shard
        self._seen: dict[int, str] = {}  # last log entry looked at, by shard
        self._read_ready: dict[int, str] = {}
        self._chunks: dict[str, dict[int, Chunk]] = {}
        self._current: Batch | None = None

    # Iteration

    def __iter__(self) -> Iterator[Batch]:
        if get_worker_info() is not None:
            raise SettingError(
                "num_workers of the DataLoader is above 0: use 0, the queue reads ahead itself"
            )
        while (batch := self.next_batch()) is not None:
            yield batch

    @property
    def batches_waiting(self) -> int:
        """Batches that are named and not yet delivered: after a restart, those that come again."""
        self._start()
        return sum(k >= self._next for k in self._records)

    def next_batch(self, timeout: float | None = None, max_groups: int | None = None) -> Batch | None:
        """The next batch, or None when the run has ended. Marks the one before as trained.

        max_groups: a batch that is named now gets no more groups than this (default batch_groups).
        Raises NoBatchError after `timeout` seconds without a new group, EpochFencedError when a newer trainer
        has taken over, BatchLostError when the server lost a named batch.
        """
        started = time.monotonic()
        backoff = Backoff(sleep=self._stop.wait)
        progress = started
        while True:
            try:
                run = self._start()
                if self._current is not None:
                    self._finish_current()
                ended = self._has_ended(run)
                if self._look_ahead(run, ended, max_groups):
                    progress = time.monotonic()
                if (batch := self._collect(run)) is not None:
                    with suppress(*RETRYABLE):  # the next call does it again
                        self._look_ahead(run, False)
                    self._current = batch
                    if self._rank == 0:
                        _observe(batch, time.monotonic() - started)
                    return batch
                if ended and self._next not in self._records:
                    if self._rank == 0:
                        home = run.keys.home
                        run.call("end_run", [home.void, home.lineage], [self._epoch, self._next])
                    return None
                if timeout is not None and time.monotonic() - progress > timeout:
                    raise NoBatchError(
                        f"no new group for {timeout:g} s (run {run.name}, batch {self._next}): "
                        f"see `streamadv status`"
                    )
                self._wait(run, BLOCK_MS if timeout is None else min(BLOCK_MS, max(1, round(timeout * 500))))
            except RETRYABLE as error:
                metrics.retried(STAGE)
                level = logging.DEBUG if backoff.failures else logging.WARNING
                logger.log(level, "%s: to be repeated: %s", STAGE, error)
                backoff.wait()
            else:
                backoff.reset()

    # What the training loop says

    def trained(self, batch: Batch) -> None:
        """The batch has been trained on: the version moves to batch.version + 1, admission is freed."""
        record = self._records.get(batch.version)
        if record is None or record.id != batch.id:
            raise SettingError(f"batch {batch.version} is not one this queue has delivered and not committed")
        if self._rank == 0:
            self._advance(self._start(), record)
        self._version = max(self._version, batch.version + 1)
        self._lineage.update((pointer.group_id, None) for pointer in record.groups)

    def state_dict(self) -> dict[str, Any]:
        """What to save beside the weights: JSON-serialisable; pass it to `commit` after saving."""
        self._start()
        return {
            "run": self._run_name,
            "epoch": self._epoch,
            "version": self._version,
            "groups": list(self._lineage),
        }

    def commit(self, state: Mapping[str, Any]) -> None:
        """The checkpoint holding `state` is saved: its batches are trained for good and deleted here.

        Repeating it changes nothing. On ranks other than 0 it does nothing.
        """
        run = self._start()
        version = int(state["version"])
        if version > self._version:
            raise SettingError(
                f"state has version {version}, this queue is at {self._version}: load it first"
            )
        if self._rank == 0:
            home = run.keys.home
            batches.check_fence(
                run, run.call("commit_lineage", [home.void, home.lineage], [self._epoch, version])
            )
        self._committed = max(self._committed, version)
        self._finish_commits(run)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: take over the run, repeat its commit, set the version back.

        Batches recorded after it come again, in their order and composition, before new ones.
        """
        if state.get("run", self._run_name) != self._run_name:
            raise SettingError(f"state is of run {state['run']!r}, this queue reads {self._run_name!r}")
        self._restored = int(state["version"])
        self._lineage = dict.fromkeys(state["groups"])
        self._run = None
        self._current = None
        self._start()

    def close(self) -> None:
        """Disconnect. What was delivered and not marked as trained comes again."""
        self._stop.set()
        if self._owned:
            self._connection.close()

    # Taking over

    def _start(self) -> Run:
        """Join the run; rank 0 takes a new epoch and finishes what an older trainer left half done."""
        if self._run is not None:
            return self._run
        run = open_run(self._connection, self._run_name, self._settings)
        home = run.keys.home
        if self._rank == 0:
            version = "" if self._restored is None else self._restored
            reply = run.call("take_epoch", [home.void, home.lineage], [version])
            self._epoch, self._version, self._committed = (int(number) for number in reply)
            if self._restored is not None and self._restored > self._committed:
                run.call("commit_lineage", [home.void, home.lineage], [self._epoch, self._restored])
                self._committed = self._restored
        self._epoch = _agree_on_epoch(self._epoch, self._rank)
        if self._rank != 0:
            fields = run.connection.scripts.hmget(home.lineage, ["version", "committed"])
            self._version, self._committed = (int(value or 0) for value in fields)
        self._next = self._version
        self._records = batches.read_records(run)
        self._read_ready, self._chunks, self._applied = {}, {}, set()
        lineage: Any = run.connection.scripts.hgetall(home.lineage)
        self._cursors = {
            shard: lineage.get(f"cursor:{shard}".encode(), b"0-0").decode()
            for shard in range(len(run.keys.salts))
        }
        self._seen = dict(self._cursors)
        self._run = run
        if self._rank == 0:
            self._tell_shards(run)
            self._finish_commits(run)
        return run

    def _tell_shards(self, run: Run) -> None:
        held = [record for k, record in self._records.items() if self._committed <= k < self._version]
        pacing = "" if self._max_staleness is None else self._max_staleness
        for shard, keys in enumerate(run.keys.shards):
            groups = sum(len(record.in_shard(shard)) for record in held)
            args = [self._epoch, self._version, pacing, self._batch_groups, groups]
            batches.check_fence(run, run.call("set_trainer", [keys.void, keys.trainer], args))

    # Naming (rank 0)

    def _look_ahead(self, run: Run, ended: bool, max_groups: int | None = None) -> bool:
        """Name every batch that may be named now and make the shards know it. True if groups were found."""
        if self._rank != 0:
            return False
        found = False
        k = self._version
        while k <= self._version + self._prefetch:
            if k not in self._records and not self._name(run, k, ended, max_groups):
                break
            record = self._records[k]
            if record.id not in self._applied:
                batches.apply(run, record, self._batch_scope(record), self._require_epoch())
                self._applied.add(record.id)
                found = True
            k += 1
        return found

    def _name(self, run: Run, k: int, ended: bool, max_groups: int | None) -> bool:
        scan = self._batch_groups * batches.SCAN_FACTOR
        found = [
            group
            for shard in range(len(run.keys.salts))
            for group in batches.read_log(run, shard, self._cursors[shard], scan)
        ]
        for group in found:
            self._seen[group.shard] = group.entry
        candidates = sorted(found, key=lambda group: (group.logged_ms, group.shard, group.entry))
        chosen, refused = batches.choose(candidates, k, max_groups or self._batch_groups, self._rules())
        if refused:
            batches.drop(run, refused, self._require_epoch())
            for group, reason in refused:
                logger.warning("group %s is not trained on: %s", group.group_id, reason)
                metrics.group_ended(reason, group.data_source)
        if len(chosen) < (1 if ended else min(self._min_groups, max_groups or self._min_groups)):
            return False
        record = batches.make_record(
            k,
            self._require_epoch(),
            chosen,
            chain=self._chain.config.model_dump(mode="json"),
            late=sorted(self._late),
            tokens_per_micro_batch=self._tokens_per_micro_batch,
            short=len(chosen) < self._batch_groups,
        )
        cursors = dict(self._cursors)
        for group in candidates:
            if group in chosen or any(group is other for other, _ in refused):
                cursors[group.shard] = group.entry
        if not batches.name(run, record, cursors):
            # The reply to an earlier try was lost: what stands there is ours, the epoch says so.
            record = batches.read_records(run)[k]
        self._cursors = cursors
        self._records[k] = record
        return True

    def _rules(self) -> NamingRules:
        return NamingRules(
            drop_after=self._drop_after,
            needs=self._needs,
            trained=frozenset(self._lineage),
            rolled_back_above=None if self._keep_rolled_back else self._restored,
            epoch=self._require_epoch(),
        )

    def _batch_scope(self, record: BatchRecord) -> bool:
        return build_chain(record.chain).cut(set(record.late))[0].scope == "batch"

    def _has_ended(self, run: Run) -> bool:
        """Whether nothing more can come: a producer has finished, no other is alive, no group is open."""
        scripts, home = run.connection.scripts, run.keys.home
        if self._rank != 0:
            end = scripts.hget(home.lineage, "end")
            return end is not None and int(end) == self._next
        producers: Any = scripts.hgetall(home.producers)
        states = [value.decode().split(" ") for value in producers.values()]
        if not any(state == "finished" for _, state in states):
            return False
        now_ms = scripts.time()[0] * 1000
        if any(state == "open" and now_ms - int(seen) < PRODUCER_TIMEOUT_S * 1000 for seen, state in states):
            return False
        return not any(
            scripts.zcard(keys.open)
            or scripts.xlen(keys.rollouts)
            or int(scripts.hget(keys.ledger, "scoring") or 0)
            for keys in run.keys.shards
        )

    # Delivery

    def _collect(self, run: Run) -> Batch | None:
        """The next batch if all its results are there."""
        record = self._records.get(self._next)
        if record is None:
            if self._rank == 0:
                return None
            text = run.connection.scripts.hget(run.keys.home.batches, str(self._next))
            if text is None:
                return None
            record = self._records[self._next] = BatchRecord.model_validate_json(text)
        units = batches.work_units(record, self._batch_scope(record))
        self._read_chunks(run)
        chunks = self._chunks.get(record.id, {})
        if len(chunks) < len(units):
            return None
        groups = batches.read_groups(run, record.groups)
        batch = deliver(
            run,
            record,
            groups,
            assign(units, chunks, groups),
            [chunks[unit.chunk] for unit in units],
            rank=self._rank,
            world_size=self._world_size,
            device=self._device,
            late=self._late,
        )
        del self._chunks[record.id]
        self._next += 1
        return batch

    def _read_chunks(self, run: Run) -> None:
        for shard, keys in enumerate(run.keys.shards):
            after = self._read_ready.get(shard, "0-0")
            entries: Any = run.connection.scripts.xrange(keys.ready, f"({after}", "+")
            for entry, fields in entries:
                chunk = parse_chunk(fields)
                self._chunks.setdefault(fields[b"batch"].decode(), {})[chunk.number] = chunk
                self._read_ready[shard] = entry.decode()

    def _wait(self, run: Run, block_ms: int) -> None:
        """Until something arrives in a groups or ready log, or the block is over."""
        share = block_ms if len(run.keys.salts) == 1 else max(1, block_ms // len(run.keys.salts))
        started = time.monotonic()
        for shard, keys in enumerate(run.keys.shards):
            streams = {keys.ready: self._read_ready.get(shard, "0-0")}
            if self._rank == 0:
                streams[keys.groups] = self._seen[shard]
            reply: Any = run.connection.blocking(share).xread(streams, count=1, block=share)  # type: ignore[arg-type]
            if reply:
                return
        if time.monotonic() - started < share / 2000:
            self._stop.wait(share / 1000)  # a server that does not block must not be asked in a loop

    # Trained and committed

    def _finish_current(self) -> None:
        batch = self._current
        assert batch is not None
        if batch.version >= self._version:
            self.trained(batch)
        if self._commit_mode == "each_batch":
            self.commit(self.state_dict())
        self._current = None

    def _advance(self, run: Run, record: BatchRecord) -> None:
        """First the lineage, then every shard's copy."""
        home = run.keys.home
        version = record.k + 1
        batches.check_fence(
            run, run.call("trained", [home.void, home.lineage], [self._epoch, version, len(record.groups)])
        )
        for shard, keys in enumerate(run.keys.shards):
            args = [self._epoch, version, len(record.in_shard(shard))]
            batches.check_fence(run, run.call("trained", [keys.void, keys.trainer], args))

    def _finish_commits(self, run: Run) -> None:
        for k in [k for k in self._records if k < self._committed]:
            if self._rank == 0:
                batches.commit(run, self._records[k], self._require_epoch())
            for pointer in self._records[k].groups:
                self._lineage.pop(pointer.group_id, None)
            del self._records[k]

    def _require_epoch(self) -> int:
        if self._epoch is None:
            raise EpochFencedError("this rank has no epoch: pass epoch=, or initialise torch.distributed")
        return self._epoch


def _observe(batch: Batch, wait_s: float) -> None:
    """Staleness is split into versions that passed while the rollout ran, and while it was queued."""
    in_flight = [None if r.versions is None else r.versions[1] - r.versions[0] for r in batch.references]
    metrics.batch_delivered(
        version=batch.version,
        staleness=batch.staleness,
        in_flight_lag=in_flight,
        in_queue_lag=[
            None if lag is None or total is None else max(0, total - lag)
            for total, lag in zip(batch.staleness, in_flight, strict=True)
        ],
        num_tokens=batch.num_tokens,
        num_trajectories=batch.num_trajectories,
        wait_s=wait_s,
        e2e_s=[time.time() - logged for logged in batch.logged_s],
    )


def _check_suppliers(chain: Chain, late: Mapping[str, LateColumn], pushed: Sequence[str]) -> frozenset[str]:
    """Columns that producers have to push. Raises SettingError when a needed column has no supplier."""
    made: set[str] = set()
    for step in chain.steps:
        for name in step.needs:
            if name in LATE_COLUMNS and name not in late and name not in pushed and name not in made:
                raise SettingError(
                    f"chain step {step.name} needs column {name}, nobody supplies it: "
                    f"pass late={{{name!r}: function}}, or pushed=[{name!r}] if producers push it"
                )
        made |= set(step.makes)
    return frozenset(name for name in chain.needs if name not in late)


def _agree_on_epoch(epoch: int | None, rank: int) -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        number = torch.tensor([epoch or 0], dtype=torch.int64)
        torch.distributed.broadcast(number, src=0)
        return int(number)
    if epoch is None:
        raise SettingError(
            f"epoch is not given on rank {rank}: pass rank 0's, or initialise torch.distributed"
        )
    return epoch
