"""Genuine examples of everything that is read: what damage starts from."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np

from streamadv.errors import NoBatchError
from streamadv.run import Run
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.schema import Trajectory
from tests.support import (
    OneClient,
    compute_all,
    group_all,
    join,
    packets_of,
    producing,
    push_groups,
    trajectory,
)

ROWS = [
    {"input_ids": [1, 2, 3, 4], "response_mask": [0, 1, 1, 1], "values": [0.0, 0.5, 0.5, 0.25]},
    {"input_ids": [5, 6, 7], "response_mask": [0, 1, 0], "values": [0.0, 1.0, 0.0]},
]


@cache
def trajectories() -> list[Trajectory]:
    """One row; several rows with steps and named rewards; extra columns; versions."""
    step = {"row": 1, "start": 1, "end": 3, "reward": 0.5, "state_key": "s"}
    pixels = {"data": np.zeros((2, 3, 3), np.uint8), "per_token": False}
    row = {"input_ids": [1, 2, 3], "response_mask": [0, 1, 1]}
    return [
        trajectory("g", 0, 2, metadata={"prompt": "p", "tags": ["a", {"b": 1.5}]}, data_source="math"),
        trajectory("g", 1, 2, rows=ROWS, steps=[step], rewards={"format": 1.0}, model_version=[3, 4]),
        trajectory("g", 0, 1, rows=[{**row, "experts": [[1, 2], [3, 4], [5, 6]], "pixels": pixels}]),
        trajectory("g", 0, 1, rows=[{**row, "versions": [0, 7, 8], "agent": "critic", "reward": 1.0}]),
    ]


@cache
def payloads() -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Member table and stored fields of a packet of each of them, and of one with two members."""
    first, *others = trajectories()
    second = trajectory("g", 1, 2, metadata={"prompt": "q"}, tokens=3)
    packets = [packets_of(items, 1 << 22) for items in ([first], [first, second], *([t] for t in others))]
    return [
        (packet.table, {as_bytes(name): as_bytes(value) for name, value in packet.fields.items()})
        for (packet,) in packets
    ]


def as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@cache
def lines() -> list[dict[str, Any]]:
    """Each of them as a line of a file, parsed."""
    return [json.loads(json.dumps(item.to_json())) for item in trajectories()]


@cache
def chats() -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    messages = [
        {"role": "system", "content": "You are."},
        {"role": "user", "content": [{"type": "text", "text": "Do."}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "seen", "name": "look", "tool_call_id": "1"},
        {"role": "assistant", "content": "Done."},
    ]
    return [
        {"group_id": "g", "rollout_index": 0, "messages": messages, "reward": 1.0, "metadata": {"a": 1}},
        {"uid": 7, "trial": 1, "num_generations": 2, "messages": messages[1:], "reward": None},
        {"task_id": 3, "trial": 0, "reward": 0.5, "info": {}, "traj": messages},
    ]


@cache
def stored() -> tuple[Run, dict[str, list[dict[bytes, bytes]]]]:
    """A run with something in every stream, and their entries."""
    connection = OneClient()
    with producing(connection, "r") as producer:
        push_groups(producer, 2)
        run = join(connection, "r")
        keys, entries = run.keys.home, {}

        def keep(name: str) -> None:
            entries[name] = [fields for _, fields in connection.scripts.xrange(getattr(keys, name))]

        keep("rollouts")
        group_all(run)
        keep("groups")
        try:
            TrainerQueue(connection, "r", batch_groups=2, chain={"estimator": "reinforce"}).next_batch(
                timeout=0
            )
        except NoBatchError:
            keep("work")
        compute_all(run)
        keep("results")
    return run, entries
