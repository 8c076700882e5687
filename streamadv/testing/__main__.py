"""`python -m streamadv.testing`: runs schedules of the pipeline from a seed on, and goes on where it was stopped.

A schedule that breaks a promise is cut down and written, as its choices, into the folder `world/`, with the seed that
it comes from. `--replay FILE` runs it again.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Final

from .judge import run_schedule, run_seed, shortest

#: A process grows by some 0.8 MB a schedule, so another one takes its place.
SCHEDULES_OF_A_PROCESS: Final = 500


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m streamadv.testing", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, help="how many to run (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's (default 0)")
    parser.add_argument("--folder", type=Path, default=Path("world"), help="where it notes how far it is")
    parser.add_argument("--without", nargs="*", default=(), help="kinds of faults that are left out")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=cores, help=f"how many run them (default {cores})")
    parser.add_argument("--until-one", action="store_true", help="stop at the first that breaks a promise")
    parser.add_argument("--replay", type=Path, help="run the schedule of this file")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if given.replay is not None:
        world, broken = run_schedule(choices=json.loads(given.replay.read_text()))
        print(broken or "every promise was kept", f"({world.steps} steps, trace {world.trace})")
        return int(broken is not None)
    return _run(given)


def _run(given: argparse.Namespace) -> int:
    schedules, seed, folder = given.schedules, given.seed, given.folder
    folder.mkdir(parents=True, exist_ok=True)
    at = folder / f"from-{seed}.next"
    first = int(at.read_text()) if at.exists() else seed
    began, broken = time.monotonic(), sorted(folder.glob(f"from-{seed}-*.json"))
    due = range(first, seed + schedules)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_seed.__module__, "torch"])
    with context.Pool(given.processes, maxtasksperchild=SCHEDULES_OF_A_PROCESS) as pool:
        for number, (text, choices) in zip(
            due, pool.imap(partial(run_seed, given.without), due), strict=True
        ):
            if text is not None:
                print(f"seed {number}, schedule {number - seed + 1}: {text}", flush=True)
                if given.until_one:
                    return 1
                shorter = shortest(choices, text)
                file = folder / f"from-{seed}-{number}.json"
                file.write_text(json.dumps(shorter, indent=1))
                broken.append(file)
                print(f"  {len(shorter)} choices are left of {len(choices)}: {file}", flush=True)
            at.write_text(str(number + 1))
    seconds = time.monotonic() - began
    rate = f", {len(due) / seconds * 60:.0f} a minute" if due else ""
    print(f"{schedules} schedules from seed {seed}: {len(broken)} broke a promise ({len(due)} now{rate})")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
