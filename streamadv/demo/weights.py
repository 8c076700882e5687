"""How policy versions travel: one npz file per version in a shared directory, complete or not there at all.

`weights-000012.npz` holds version 12. A reader never sees half a file: it is written under another name and
renamed. Nothing here is pickled. A checkpoint is a pair: `checkpoint-000010.json`, the trainer queue's state,
and `checkpoint-000010.npz`, weights and optimiser; the npz is renamed last, so where it stands both do.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .policy import Policy
from .settings import EVALUATE_EVERY

KEEP_NEWEST: Final = 8  # versions a reader may still be about to open

_WEIGHTS: Final = re.compile(r"weights-(\d{6,})\.npz")
_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{6,})\.npz")


def publish(directory: Path, version: int, policy: Policy) -> None:
    """Make `version` readable for everybody, and remove versions nobody will ask for."""
    _write(directory / f"weights-{version:06d}.npz", dict(policy.state_dict()))
    for old in _versions(directory, _WEIGHTS):
        if old <= version - KEEP_NEWEST and old % EVALUATE_EVERY:
            (directory / f"weights-{old:06d}.npz").unlink(missing_ok=True)


def withdraw_after(directory: Path, version: int) -> None:
    """Remove versions above `version`: the trainer goes on from there, they belong to a past that did not happen."""
    for later in _versions(directory, _WEIGHTS):
        if later > version:
            (directory / f"weights-{later:06d}.npz").unlink(missing_ok=True)


def newest(directory: Path) -> int | None:
    """The newest published version; None before the first."""
    return max(_versions(directory, _WEIGHTS), default=None)


def load(directory: Path, version: int, policy: Policy) -> None:
    """Put the weights of `version` into `policy`. Raises FileNotFoundError if it is not (or no longer) there."""
    policy.load_state_dict(_read(directory / f"weights-{version:06d}.npz"))


def save_checkpoint(
    directory: Path,
    version: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    queue_state: dict[str, Any],
) -> None:
    """Write weights, optimiser and queue state together; earlier checkpoints are removed."""
    earlier = _versions(directory, _CHECKPOINT)
    path = directory / f"checkpoint-{version:06d}"
    path.with_suffix(".json").write_text(json.dumps(queue_state))
    moments = {
        f"optimizer/{index}/{name}": value
        for index, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }
    _write(
        path.with_suffix(".npz"),
        {f"policy/{name}": value for name, value in policy.state_dict().items()} | moments,
    )
    for old in earlier:
        if old != version:
            for suffix in (".npz", ".json"):
                (directory / f"checkpoint-{old:06d}{suffix}").unlink(missing_ok=True)


def load_checkpoint(
    directory: Path, policy: Policy, optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, Any]] | None:
    """Restore the newest checkpoint: its version and queue state; None if there is none."""
    version = max(_versions(directory, _CHECKPOINT), default=None)
    if version is None:
        return None
    path = directory / f"checkpoint-{version:06d}"
    weights: dict[str, Tensor] = {}
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in _read(path.with_suffix(".npz")).items():
        kind, _, rest = name.partition("/")
        if kind == "policy":
            weights[rest] = value
        else:
            index, _, moment = rest.partition("/")
            moments.setdefault(int(index), {})[moment] = value
    policy.load_state_dict(weights)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return version, json.loads(path.with_suffix(".json").read_text())


def _versions(directory: Path, pattern: re.Pattern[str]) -> list[int]:
    return [int(match[1]) for path in directory.iterdir() if (match := pattern.fullmatch(path.name))]


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("wb") as file:
        arrays: dict[str, Any] = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
        np.savez(file, **arrays)
    unfinished.replace(path)


def _read(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
