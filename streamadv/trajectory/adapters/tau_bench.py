"""Recorded tau-bench runs: a list of {task_id, trial, reward, info, traj}, one record per run.

tau-bench's runner writes this format (github.com/sierra-research/tau-bench, `EnvRunResult`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ...errors import TrajectoryError
from ...messages import brief
from ..schema import Trajectory
from .chat import Tokenizer, chat_trajectory
from .records import Record, group_name, index, ranks, read_records, required


def read_tau_bench(path: Path, tokenizer: Tokenizer | None = None) -> Iterator[Trajectory]:
    """Trajectories of a tau-bench results file, in file order.

    group_id is task_id (text or a whole number), group_size the number of distinct trials of the task in the file,
    rollout_index the trial, renumbered 0 .. n - 1 in order if the task's trials have gaps. The reader passes a repeated
    record on and counts it once. A run that the runner recorded as an error (empty `traj`, `info.error`) becomes a
    failed trajectory. `reward` null = unscorable; metadata holds task_id and trial unchanged. Raises TrajectoryError,
    which names file, record (from 0) and field.
    """
    records = read_records(path)
    trials = ranks((group_name(r, "task_id"), index(r, "trial")) for r in records)
    for record in records:
        indices = trials[group_name(record, "task_id")]
        failed = _failed(record)
        fields = {
            "group_id": group_name(record, "task_id"),
            "group_size": len(indices),
            "rollout_index": indices[index(record, "trial")],
            "reward": None if failed else required(record, "reward"),
            "status": "failed" if failed else "completed",
            "data_source": "tau-bench",
            "metadata": {"task_id": record.fields["task_id"], "trial": record.fields["trial"]},
        }
        yield chat_trajectory(record, "traj", tokenizer, fields)


def _failed(record: Record) -> bool:
    info = record.fields.get("info")
    info = {} if info is None else info
    if not isinstance(info, Mapping):
        raise TrajectoryError(f"{record.where}: info: is {brief(info)}, needs an object")
    return record.fields.get("traj") == [] and "error" in info
