"""streamadv: the durable middle of asynchronous, off-policy RL training of LLM agents, on Redis Streams.

Names are loaded on first use, so that a producer never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import algorithms, errors, losses, padded, weights
    from .algorithms.registry import estimator
    from .grouping.judge import Judge
    from .grouping.scorer import Scorer
    from .grouping.scoring_streams import UnscoredTrajectory
    from .integrations.trackers import track
    from .producer.async_group import AsyncGroup, AsyncRollout
    from .producer.async_producer import AsyncProducer
    from .producer.group import Group, Rollout
    from .producer.producer import Producer
    from .producer.tickets import Ticket
    from .program import run_program
    from .prompts.prompts import Prompts, Stream
    from .run.manifest import RunSettings
    from .settings import redis_url
    from .status.kept import kept
    from .store.connection import Connection
    from .trainer.microbatch import Batch, MicroBatch
    from .trainer.queue import TrainerQueue
    from .trajectory.schema import Column, Role, Row, Status, Step, Trajectory
    from .trajectory.versions import VersionCounter

#: The public names by the modules that have them.
_NAMES = {
    "algorithms": "algorithms",
    "algorithms.registry": "estimator",
    "errors": "errors",
    "grouping.judge": "Judge",
    "grouping.scorer": "Scorer",
    "grouping.scoring_streams": "UnscoredTrajectory",
    "integrations.trackers": "track",
    "losses": "losses",
    "padded": "padded",
    "producer.async_group": "AsyncGroup AsyncRollout",
    "producer.async_producer": "AsyncProducer",
    "producer.group": "Group Rollout",
    "producer.producer": "Producer",
    "producer.tickets": "Ticket",
    "program": "run_program",
    "prompts.prompts": "Prompts Stream",
    "run.manifest": "RunSettings",
    "settings": "redis_url",
    "status.kept": "kept",
    "store.connection": "Connection",
    "trainer.microbatch": "Batch MicroBatch",
    "trainer.queue": "TrainerQueue",
    "trajectory.schema": "Column Role Row Status Step Trajectory",
    "trajectory.versions": "VersionCounter",
    "weights": "weights",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

#: Homes that load only where torch is installed.
_COMPUTING = ("losses", "padded", "trainer.")

__all__ = [
    "AsyncGroup", "AsyncProducer", "AsyncRollout", "Batch", "Column", "Connection", "Group", "Judge",
    "MicroBatch", "Producer", "Prompts", "Role", "Rollout", "Row", "RunSettings", "Scorer", "Status", "Step", "Stream",
    "Ticket", "TrainerQueue", "Trajectory", "UnscoredTrajectory", "VersionCounter", "__version__",
    "algorithms", "errors", "estimator", "kept", "losses", "padded", "redis_url", "run_program", "track", "weights",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'streamadv' has no attribute {name!r}")
    module = importlib.import_module(f".{_HOMES[name]}", __name__)
    return module if name == _HOMES[name] else getattr(module, name)


def __dir__() -> list[str]:
    """The public names; without torch those that load without it, because help() and completion load each."""
    from .extras import TO_COMPUTE, is_installed

    computes = all(map(is_installed, TO_COMPUTE))
    return sorted(name for name in __all__ if computes or not _HOMES.get(name, "").startswith(_COMPUTING))
