"""Checkpoints: `checkpoint-000010.json`, the trainer queue's state, and `checkpoint-000010.safetensors`, weights and
optimiser. The second is renamed last, so where it stands both do.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from .. import weights
from .policy import Policy

_CHECKPOINT: Final = re.compile(r"checkpoint-(\d{6,})\.safetensors")


def save_checkpoint(
    directory: Path,
    version: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    queue_state: dict[str, Any],
) -> None:
    """Write weights, optimiser and queue state together; earlier checkpoints are removed."""
    earlier = _versions(directory)
    path = _path(directory, version)
    path.with_suffix(".json").write_text(json.dumps(queue_state))
    moments = {
        f"optimizer/{index}/{name}": value
        for index, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
    }
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    weights.save(
        unfinished, {f"policy/{name}": value for name, value in policy.state_dict().items()} | moments
    )
    unfinished.replace(path)
    for old in earlier:
        if old != version:
            for suffix in (".safetensors", ".json"):
                _path(directory, old).with_suffix(suffix).unlink(missing_ok=True)


def load_checkpoint(
    directory: Path, policy: Policy, optimizer: torch.optim.Optimizer
) -> tuple[int, dict[str, Any]] | None:
    """Restore the newest checkpoint: its version and queue state; None if there is none."""
    version = max(_versions(directory), default=None)
    if version is None:
        return None
    path = _path(directory, version)
    state: dict[str, Tensor] = {}
    moments: dict[int, dict[str, Tensor]] = {}
    for name, value in load_file(path).items():
        kind, _, rest = name.partition("/")
        if kind == "policy":
            state[rest] = value
        else:
            index, _, moment = rest.partition("/")
            moments.setdefault(int(index), {})[moment] = value
    policy.load_state_dict(state)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return version, json.loads(path.with_suffix(".json").read_text())


def _path(directory: Path, version: int) -> Path:
    return directory / f"checkpoint-{version:06d}.safetensors"


def _versions(directory: Path) -> list[int]:
    return [int(match[1]) for path in directory.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))]
