"""Which job owns a run: rank 0 writes it into the session hash when it takes the run, and the other ranks read it.

Ranks do not agree with each other: each finds its job's session by the job's id and then keeps to that session. If
two sessions claim the run, the one founded under the higher fencing epoch wins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from .. import doors
from ..errors import StreamadvError
from ..run import Run
from ..run.run import fenced
from ..store.replies import as_count
from .progress import Progress

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
    pipe = run.connection.scripts.pipeline(transaction=False)
    ask_hold(pipe, run)
    return as_hold(pipe.execute()[0])


def ask_hold(pipe: Any, run: Run) -> None:
    """Add to a pipeline the read whose reply `as_hold` takes."""
    pipe.hmget(run.keys.home.session, list(Hold._fields))


def as_hold(values: Sequence[bytes | None]) -> Hold:
    """What rank 0 has written, as it was read."""
    job, session, *numbers = ((value or b"").decode(errors="replace") for value in values)
    return Hold(job, session, *map(as_count, numbers))


def take(run: Run, progress: Progress) -> tuple[int, bool]:
    """Rank 0 takes the run, or takes it again after the server came back. Raises EpochFencedError.

    Returns the version that the run said was committed, and whether this begins a branch: a session, or a checkpoint.
    """
    begins = progress.branch == 0
    args: list[Any] = [
        "" if progress.began is None else progress.version,
        progress.epoch,
        progress.job,
        progress.session,
        founding_epoch(progress.session) if progress.session else "",
        doors.random_bytes(6).hex(),
        "" if begins else progress.branch,
        "" if progress.began is None else progress.began,
        "1" if progress.loaded else "0",
        progress.world_size,
    ]
    reply: Any = run.home.call("take_epoch", args)
    if reply == -1:
        raise fenced(run.name)
    epoch, version, committed, branch = int(reply[0]), int(reply[2]), int(reply[3]), int(reply[4])
    progress.epoch, progress.session = epoch, reply[1].decode()
    if branch == progress.branch > 0:
        progress.commit(min(committed, progress.version))  # the reply to that commit was lost
    if progress.began is None:
        progress.begin(version)
    if begins:
        progress.branch = epoch
    return committed, begins
