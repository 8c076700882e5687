"""`streamadv consume`: a trainer that writes what it is given to a file."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from .. import metrics
from ..errors import NoBatchError
from ..extras import TO_COMPUTE
from ..logs import announce
from ..trajectory.interchange import recover, write_trajectory
from ..units import counted
from . import add_metrics_option, add_redis_options, connect, settings_from
from .compute import add_chain_options, chain_from
from .parser import count, seconds
from .progress import Advance, progress

if TYPE_CHECKING:
    from ..trainer.queue import TrainerQueue

BATCH_GROUPS: Final = 64


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "consume",
        help="takes finished trajectories out, with their advantages",
        description="A trainer of one rank that names what is there at once, writes it, and commits. Continues an "
        "existing output file: what stands in it is committed and not written again.",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: stdout")
    parser.add_argument(
        "--max-groups", type=count, metavar="N", help="stop after N groups (those in FILE count)"
    )
    parser.add_argument(
        "--timeout", type=seconds, metavar="S", help="fail after S seconds without a new group"
    )
    add_chain_options(parser)
    add_redis_options(parser)
    add_metrics_option(parser)
    parser.set_defaults(run=run, packages=TO_COMPUTE)


def run(arguments: argparse.Namespace) -> int:
    """Consume until N groups are written or the run has ended; 1 when neither happens."""
    from ..algorithms import build_chain  # torch: only commands that compute load it
    from ..trainer.queue import TrainerQueue

    settings = settings_from(arguments)
    chain = build_chain(chain_from(arguments.preset, arguments.config)).config
    output: Path | None = arguments.output
    written = {} if output is None else recover(output)
    with connect(settings) as connection:
        queue = TrainerQueue(
            connection,
            settings.run,
            batch_groups=BATCH_GROUPS,
            min_groups=1,
            prefetch=0,
            max_staleness=None,
            chain=chain,
            commit="manual",
        )
        metrics.serve(settings.metrics_port, settings.run, settings.metrics_host)
        file = sys.stdout.buffer if output is None else output.open("ab")
        done: Counter[str] = Counter()
        try:
            with progress("consumed") as advance:
                consume(queue, file, written, arguments.max_groups, arguments.timeout, done, advance)
        finally:
            _print_summary(done, output)
            if output is not None:
                file.close()
            queue.close()
    return 0


def _print_summary(done: Counter[str], output: Path | None) -> None:
    trajectories = counted(done["trajectories"], "trajectory", "trajectories")
    groups, batches = counted(done["groups"], "group"), counted(done["batches"], "batch", "batches")
    where = "stdout" if output is None else output
    announce(f"consumed {trajectories} of {groups} in {batches}: {where}", "consumed")


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
        trajectories = list(batch.trajectories())
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
        advance(len(trajectories))
