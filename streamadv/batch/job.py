"""Which training job this is: an id that every rank finds by itself, before it has asked the run anything.

All ranks of one start of a job have the same id, and no other start has it. So a rank above 0 can tell its own
rank 0's hold on the run from an older job's, whatever came first.
"""

from __future__ import annotations

import os
import re
import secrets
from collections import Counter
from typing import Final

import torch

from ..errors import SettingError
from ..messages import brief

JOB_ID: Final = re.compile(r"[!-~]{1,200}")
STORE_KEY: Final = "streamadv/job"

_made: Counter[tuple[str, int]] = Counter()


def check_job(job: str) -> str:
    """`job` if it may be one. Raises SettingError."""
    if not JOB_ID.fullmatch(job):
        raise SettingError(f"job is {brief(job)}: use 1 to 200 printable characters without spaces")
    return job


def count_queue(run: str, rank: int) -> int:
    """Which queue of this run and rank it is in this process, from 1: ranks make them in the same order."""
    _made[run, rank] += 1
    return _made[run, rank]


def find_job(number: int) -> str | None:
    """The id this job's ranks share without being told: the launcher's, else the process group's; None without either.

    number: of the queue, see `count_queue`; one start of a job may read a run through several, one after another.
    """
    found = _from_torchrun() or _from_slurm() or _from_process_group()
    return found and f"{re.sub('[^!-~]', '_', found)[:180]}/{number}"


def random_job() -> str:
    """An id that nobody else knows."""
    return secrets.token_hex(8)


def _from_torchrun() -> str | None:
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if (
        not run_id or run_id == "none"
    ):  # what every job without --rdzv-id has, on the same port as the last one
        return None
    # Workers that a change of membership restarts have the restart count they had, and another port.
    names = ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return "-".join(["torchrun", run_id, *(os.environ.get(name, "0") for name in names)])


def _from_slurm() -> str | None:
    if not os.environ.get("SLURM_JOB_ID"):
        return None
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")
    return "-".join(["slurm", *(os.environ.get(name, "0") for name in names)])


def _from_process_group() -> str | None:
    """What the first rank to come has put into the group's key-value store: no collective, so any backend will do."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    return "group-" + store.compare_set(STORE_KEY, "", random_job()).decode()
