"""streamadv: the durable middle of asynchronous, off-policy RL training of LLM agents, on Redis Streams.

Names are loaded on first use, so that a producer never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors
    from .algorithms.registry import estimator
    from .async_group import AsyncGroup, AsyncRollout
    from .async_producer import AsyncProducer
    from .connection import Connection
    from .group import Group, Rollout
    from .manifest import RunSettings
    from .producer import Producer
    from .schema import Column, Role, Row, Status, Step, Trajectory
    from .scorer import Scorer
    from .settings import redis_url
    from .tickets import Ticket
    from .trainer_queue import TrainerQueue

__version__ = "0.1.0"

_HOMES = {
    "AsyncGroup": "async_group",
    "AsyncProducer": "async_producer",
    "AsyncRollout": "async_group",
    "Column": "schema",
    "Connection": "connection",
    "Group": "group",
    "Producer": "producer",
    "Role": "schema",
    "Rollout": "group",
    "Row": "schema",
    "RunSettings": "manifest",
    "Scorer": "scorer",
    "Status": "schema",
    "Step": "schema",
    "Ticket": "tickets",
    "TrainerQueue": "trainer_queue",
    "Trajectory": "schema",
    "errors": "errors",
    "estimator": "algorithms.registry",
    "redis_url": "settings",
}

__all__ = [
    "AsyncGroup",
    "AsyncProducer",
    "AsyncRollout",
    "Column",
    "Connection",
    "Group",
    "Producer",
    "Role",
    "Rollout",
    "Row",
    "RunSettings",
    "Scorer",
    "Status",
    "Step",
    "Ticket",
    "TrainerQueue",
    "Trajectory",
    "errors",
    "estimator",
    "redis_url",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'streamadv' has no attribute {name!r}")
    module = importlib.import_module(f".{_HOMES[name]}", __name__)
    return module if name == "errors" else getattr(module, name)
