"""`streamadv consume`: a trainer that writes what it is given to a file."""

from __future__ import annotations

import argparse
import fcntl
import os
import stat
import sys
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from .. import metrics
from ..errors import NoBatchError, SettingError
from ..extras import TO_COMPUTE
from ..logs import announce
from ..messages import counted
from ..run import find_run
from ..status import read_status
from ..store.connection import Connection
from ..store.retry import patiently
from ..trajectory.interchange import recover, write_trajectory
from . import add_process_options, connect, settings_from
from .compute import add_chain_options, chain_from
from .files import Advance, progress
from .parser import count, seconds

if TYPE_CHECKING:
    from ..trainer.queue import TrainerQueue

BATCH_GROUPS: Final = 64


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "consume",
        help="takes finished trajectories out, with their advantages",
        description="The run's trainer, of one rank: it takes the run, names what is there at once, writes it, and "
        "commits it, so that nobody else trains on it. Refuses a run whose trainer is alive; to look at a run there is "
        "status. Continues an existing output file: what stands in it is committed and not written again.",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: stdout")
    parser.add_argument(
        "--max-groups",
        type=count,
        metavar="N",
        help="stop after N groups (those in FILE count; a batch that another trainer had named comes whole)",
    )
    parser.add_argument(
        "--timeout", type=seconds, metavar="S", help="fail after S seconds without a new group"
    )
    parser.add_argument(
        "--take-over", action="store_true", help="also from a trainer that is alive, which then ends"
    )
    add_chain_options(parser)
    add_process_options(parser)
    parser.set_defaults(run=run, packages=TO_COMPUTE)


def run(arguments: argparse.Namespace) -> None:
    """Consume until N groups are written or the run has ended; an error when neither happens."""
    from ..algorithms import build_chain  # torch: only commands that compute load it
    from ..trainer.queue import TrainerQueue

    settings = settings_from(arguments)
    chain = build_chain(chain_from(arguments.preset, arguments.config)).config
    output: Path | None = arguments.output

    def refuse(connection: Connection, job: str) -> None:
        if not arguments.take_over:
            patiently(lambda: _refuse_to_disturb(connection, settings.run, job), "consume", settings.run)

    def opened(connection: Connection) -> AbstractContextManager[IO[bytes]]:
        if output is None:
            return nullcontext(sys.stdout.buffer)
        if not output.exists():
            refuse(connection, "")  # before there is a file
        return output.open("ab")

    with connect(arguments) as connection, opened(connection) as file:
        job = _job_of(file, output)
        written = {} if output is None else recover(output)
        refuse(connection, job)
        queue = TrainerQueue(
            connection,
            settings.run,
            batch_groups=BATCH_GROUPS,
            min_groups=1,
            prefetch=0,
            max_staleness=None,
            chain=chain,
            commit="manual",
            job=f"{job}/{os.getpid()}",
        )
        metrics.serve(settings.metrics_port, settings.run, settings.metrics_host)
        done: Counter[str] = Counter()
        try:
            with progress("consumed") as advance:
                consume(queue, file, written, arguments.max_groups, arguments.timeout, done, advance)
        finally:
            _print_summary(done, output)
            queue.close()


def _job_of(file: IO[bytes], output: Path | None) -> str:
    """The id of the training job that writes this file, without the process: one that holds its lock is alone.

    Raises SettingError while another process holds it.
    """
    job = f"consume@{os.uname().nodename}"
    if output is None or not output.is_file():
        return f"{job}:{os.getpid()}"  # there is nothing to continue
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SettingError(
            f"{output} is being written by another process: wait for it, or give another file"
        ) from None
    except OSError:  # a file system without locks
        return f"{job}:{os.getpid()}"
    found = os.fstat(file.fileno())
    return f"{job}:{found.st_dev}:{found.st_ino}"


def _refuse_to_disturb(connection: Connection, name: str, job: str) -> None:
    """Raise SettingError if the run has a trainer that is alive, unless it was this job, killed before now."""
    try:
        run = find_run(connection, name)
    except SettingError:
        return  # it is created, or refused, when the queue opens it
    trainer = read_status(run).trainer
    if trainer.in_charge and not trainer.job.startswith(f"{job}/"):
        raise SettingError(
            f"run {name} is in use by {trainer.in_charge}, and consume is a trainer, which would end it: stop it first "
            "(one that was killed counts for 30 s), or use --take-over"
        )


def _print_summary(done: Counter[str], output: Path | None) -> None:
    trajectories = counted(done["trajectories"], "trajectory", "trajectories")
    groups, batches = counted(done["groups"], "group"), counted(done["batches"], "batch", "batches")
    where = "stdout" if output is None else output
    beyond = ""
    if done["beyond"]:
        beyond = f" ({done['beyond']} beyond --max-groups: a batch named by another trainer comes whole)"
    announce(f"consumed {trajectories} of {groups} in {batches}{beyond}: {where}", "consumed")


def consume(
    queue: TrainerQueue,
    file: IO[bytes],
    written: dict[str, set[int]],
    max_groups: int | None,
    timeout: float | None,
    done: Counter[str],
    advance: Advance,
) -> None:
    """Write, sync, mark as trained, commit: in this order, so that a crash repeats a batch and loses none.

    done: counts what was committed. advance: told how many trajectories more. Raises NoBatchError after `timeout`
    seconds without a new group, and when the run has ended before `max_groups` are written.
    """
    while max_groups is None or len(written) < max_groups or queue.batches_waiting:
        room = BATCH_GROUPS if max_groups is None else min(BATCH_GROUPS, max(1, max_groups - len(written)))
        batch = queue.next_batch(timeout, max_groups=room)
        if batch is None:
            if max_groups is None:
                return
            raise NoBatchError(f"the run ended after {len(written)} of --max-groups {max_groups}")
        trajectories, before = list(batch.trajectories()), len(written)
        for trajectory in trajectories:
            present = written.setdefault(trajectory.group_id, set())
            if trajectory.rollout_index not in present:
                write_trajectory(file, trajectory)
                present.add(trajectory.rollout_index)
        file.flush()
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fsync(file.fileno())
        queue.trained(batch)
        queue.commit(queue.state_dict())
        groups = {trajectory.group_id for trajectory in trajectories}
        done.update(trajectories=len(trajectories), groups=len(groups), batches=1)
        if max_groups is not None:
            done["beyond"] += max(0, len(written) - max(before, max_groups))
        advance(len(trajectories))
