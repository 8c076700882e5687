"""`streamadv replay FILE`: pushes recorded trajectories."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from .. import metrics
from ..errors import Busy, SettingError, TrajectoryError
from ..producer.producer import Producer
from ..store.reasons import Reason
from ..store.waiting import Blocked, Wait
from ..trajectory.interchange import poll, read_trajectories
from ..trajectory.schema import Trajectory
from . import add_process_options, connect, settings_from
from .files import DEFAULT_FORMAT, Advance, add_format_option, number_in, progress, trajectories_of

#: Trajectories of refused groups kept in memory before reading on waits for room.
MAX_SET_ASIDE: Final = 1024


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="pushes recorded trajectories",
        description="Pushes the trajectories of a file, or of a folder that the command archive has written, then "
        "finishes. A group that is refused for lack of room is set aside and tried again. Pushing a file again changes "
        "nothing: its trajectories are duplicates.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="or the folder of an archive")
    add_format_option(parser)
    parser.add_argument(
        "--follow", action="store_true", help="wait for more at the end of the file; never finish"
    )
    add_process_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Push the file; the last line says how many were pushed and how many were duplicates."""
    if arguments.follow and arguments.format not in (None, DEFAULT_FORMAT):
        raise SettingError(f"--follow works with --format trajectory, not {arguments.format}")
    if arguments.follow and arguments.file.is_dir():
        raise SettingError(f"--follow reads a file that grows, {arguments.file} is a folder: leave it out")
    settings = settings_from(arguments)
    path: Path = arguments.file
    if arguments.follow:
        source = read_trajectories(path, wait=poll)
    else:  # a wrong file or format fails here, at the first trajectory
        source = trajectories_of(path, arguments.format)
        source = itertools.chain(list(itertools.islice(source, 1)), source)
    codes: Counter[str] = Counter()
    total = None if arguments.follow else number_in(path, arguments.format)
    with connect(arguments) as connection, Producer(connection, settings.run) as producer:
        metrics.serve(settings.metrics_port, settings.run, settings.metrics_host)
        finished = False
        try:
            with progress("pushed", total) as advance:
                replay(producer, source, codes, together=not arguments.follow, advance=advance)
            producer.finish()
            finished = True
        except TrajectoryError as error:
            named = f"{path}:"
            raise (error if str(error).startswith(named) else TrajectoryError(f"{named} {error}")) from None
        finally:
            if finished or codes:
                _print_summary(codes)


def _print_summary(codes: Counter[str]) -> None:
    duplicates = codes["duplicate"]
    late = codes["surplus"] + codes["late"]
    more = f", {late} of them after their group had ended" if late else ""
    print(f"pushed {codes.total() - duplicates}, duplicates {duplicates}{more}", flush=True)


def replay(
    producer: Producer,
    source: Iterable[Trajectory],
    codes: Counter[str],
    together: bool = True,
    advance: Advance = lambda count: None,
) -> None:
    """Push everything in `source`, counting what became of it; waits while there is no room.

    together: push consecutive trajectories of a group at once; while following a file each as it comes. advance: told
    how many more are pushed.
    """
    before = codes.total()
    aside: dict[str, list[Trajectory]] = {}
    room = Wait(Blocked("replay", "not admitted", producer.run))
    consecutive = itertools.groupby(source, key=lambda each: each.group_id)
    for members in (list(each) for _, each in consecutive) if together else ([each] for each in source):
        group_id = members[0].group_id
        if group_id in aside:
            aside[group_id] += members
        else:
            _try(producer, members, aside, codes)
            advance(codes.total() - before)
            before = codes.total()
        while sum(map(len, aside.values())) >= MAX_SET_ASIDE:
            _retry(producer, aside, codes, room)
    while aside:
        _retry(producer, aside, codes, room)
    advance(codes.total() - before)


def _try(
    producer: Producer, members: list[Trajectory], aside: dict[str, list[Trajectory]], codes: Counter[str]
) -> Busy | None:
    try:
        codes.update(producer.push(members).codes)
    except Busy as busy:
        aside[members[0].group_id] = members
        return busy
    return None


def _retry(producer: Producer, aside: dict[str, list[Trajectory]], codes: Counter[str], room: Wait) -> None:
    """Try every group that was refused; wait when none got in."""
    refusals = [_try(producer, aside.pop(group_id), aside, codes) for group_id in list(aside)]
    if None in refusals:
        room.over()
    else:
        room.because(*{Reason(*busy.reason) for busy in refusals[:1] if busy})
        room.pause()
