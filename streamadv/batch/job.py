"""The id of a training job: every rank finds it by itself, before it reads anything of the run.

All ranks of one start of a job have the same id, and no other start has it. So a rank above 0 can tell its own rank
0's session from an older job's, whichever was written first.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Final

from .. import doors
from ..errors import SettingError
from ..extras import torch
from ..messages import brief

JOB_ID: Final = re.compile(r"[!-~]{1,200}")
STORE_KEY: Final = "streamadv/job"

_made: Counter[tuple[str, int]] = Counter()


def check_job(job: str) -> str:
    """Return `job` if it may be an id. Raises SettingError."""
    if not JOB_ID.fullmatch(job):
        raise SettingError(f"job is {brief(job)}: use 1 to 200 printable characters without spaces")
    return job


def count_queue(run: str, rank: int) -> int:
    """Number a new queue of this run and rank in this process, from 1. Ranks make their queues in the same order."""
    _made[run, rank] += 1
    return _made[run, rank]


def find_job(number: int) -> str | None:
    """The id that this job's ranks share: the launcher's, else the process group's; None without either.

    number: of the queue, see `count_queue`; one start of a job may read a run through several, one after another.
    """
    job = _from_torchrun() or _from_slurm() or _from_process_group()
    return job and f"{re.sub('[^!-~]', '_', job)[:180]}/{number}"


def random_job() -> str:
    """An id for a job of one rank."""
    return doors.random_bytes(8).hex()


def _from_torchrun() -> str | None:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    # Every job without --rdzv-id has the id "none", on the same port as the job before.
    if not run_id or run_id == "none":
        return None
    # A change of membership restarts workers with the same restart count, and on the same port while rank 0 stays.
    names = ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    return "-".join(["torchrun", run_id, *(os.environ.get(name, "0") for name in names)])


def _from_slurm() -> str | None:
    if not os.environ.get("SLURM_JOB_ID"):
        return None
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")
    return "-".join(["slurm", *(os.environ.get(name, "0") for name in names)])


def _from_process_group() -> str | None:
    """What the first rank has put into the process group's key-value store. No collective, so any backend will do."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    return "group-" + store.compare_set(STORE_KEY, "", random_job()).decode()
