"""Which job owns a run: rank 0 writes it into the session hash when it takes the run, and the other ranks read it.

Ranks do not agree with each other: each finds its job's session by the job's id and then keeps to that session. If
two sessions claim the run, the one founded under the higher fencing epoch wins.

All ranks of one start of a job have the same id, and no other start has it; every rank finds it by itself, before it
reads anything of the run. So a rank above 0 can tell its own rank 0's session from an older job's.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from .. import doors
from ..errors import StreamadvError
from ..extras import torch
from ..run import Run
from ..run.run import fenced
from ..store.replies import as_count
from .progress import Progress

JOB_ID: Final = re.compile(r"[!-~]{1,200}")
STORE_KEY: Final = "streamadv/job"

_made: Counter[tuple[str, int]] = Counter()


def count_queue(run: str, rank: int) -> int:
    """Number a new queue of this run and rank in this process, from 1. Ranks make their queues in the same order."""
    _made[run, rank] += 1
    return _made[run, rank]


def find_job(number: int) -> str | None:
    """The id that this job's ranks share: the launcher's, else the process group's; None without either.

    number: of the queue, see `count_queue`; one start of a job may read a run through several, one after another.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    # Every job without --rdzv-id has the id "none", on the same port as the job before.
    if run_id and run_id != "none":
        # A change of membership restarts workers with the same restart count, and on the same port while rank 0 stays.
        parts = ["torchrun", run_id]
        names = ["TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"]
    elif os.environ.get("SLURM_JOB_ID"):
        parts = ["slurm"]
        names = ["SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT"]
    elif torch.distributed.is_available() and torch.distributed.is_initialized():
        # What the first rank has put into the key-value store. No collective, so any backend will do.
        store = torch.distributed.distributed_c10d._get_default_store()
        parts, names = ["group", store.compare_set(STORE_KEY, "", random_job()).decode()], []
    else:
        return None
    job = "-".join([*parts, *(os.environ.get(name, "0") for name in names)])
    return f"{re.sub('[^!-~]', '_', job)[:180]}/{number}"


def random_job() -> str:
    """An id for a job of one rank."""
    return doors.random_bytes(8).hex()


_SESSION: Final = re.compile(r"([0-9]+)-[0-9a-f]+")


class NotHeldError(StreamadvError):
    """Rank 0 has not taken the run (again): one line that says what this rank waits for."""


class Hold(NamedTuple):
    """Who has the run: these fields of the session hash. Numbers are 0 where nothing is written."""

    job: str
    session: str
    epoch: int
    settled: int  # epoch whose taking over is complete
    branch: int  # epoch at which the session began, or last loaded a checkpoint
    loaded: int  # the same if it loaded a checkpoint
    began: int  # version the branch began at
    committed: int
    world_size: int  # of rank 0's job


def founding_epoch(session: str) -> int:
    """The epoch in which a session began."""
    match = _SESSION.fullmatch(session)
    return int(match[1]) if match else 0


def read_hold(run: Run) -> Hold:
    """What rank 0 has written."""
    values: Any = run.connection.scripts.hmget(run.keys.home.session, list(Hold._fields))
    return as_hold(values)


def as_hold(values: Sequence[bytes | None]) -> Hold:
    """What rank 0 has written, as it was read."""
    job, session, *numbers = ((value or b"").decode(errors="replace") for value in values)
    return Hold(job, session, *map(as_count, numbers))


def take(run: Run, progress: Progress) -> tuple[int, bool]:
    """Rank 0 takes the run, or takes it again after the server came back. Raises EpochFencedError.

    Returns the version that the run said was committed, and whether this begins a branch: a session, or a checkpoint.
    """
    begins = progress.branch == 0
    pipe = run.connection.scripts.pipeline(transaction=False)
    for keys in run.keys.shards:
        pipe.hget(keys.trainer, "epoch")
    # The home shard may have lost what another one knows.
    known = max(progress.epoch, *map(as_count, pipe.execute()))
    args: list[Any] = [
        "" if progress.began is None else progress.version,
        known,
        progress.job,
        progress.session,
        founding_epoch(progress.session) if progress.session else "",
        doors.random_bytes(6).hex(),
        "" if begins else progress.branch,
        "" if progress.began is None else progress.began,
        "1" if progress.loaded else "0",
        progress.world_size,
        progress.committed_before if progress.session else "",
    ]
    reply: Any = run.home.call("take_epoch", args)
    if reply == -1:
        raise fenced(run.name)
    epoch, version, committed, branch = int(reply[0]), int(reply[2]), int(reply[3]), int(reply[4])
    if not progress.session:
        progress.committed_before = committed
    progress.epoch, progress.session = epoch, reply[1].decode()
    if branch == progress.branch > 0:
        progress.commit(min(committed, progress.version))  # the reply to that commit was lost
    if progress.began is None:
        progress.begin(version)
    if begins:
        progress.branch, progress.begins_branch = epoch, True
    return committed, progress.begins_branch
