"""Random groups of a groups log, cut into packets at random, with the columns of every packet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from streamadv.grouping.groups_log import LoggedGroup
from streamadv.trajectory.columns import Array
from streamadv.trajectory.members import Members
from streamadv.trajectory.packet import StoredPacket
from streamadv.trajectory.schema import Trajectory
from tests.support import members_in

#: Of an extra column that is not per token.
SHAPE = (2,)


def random_trajectory(rng: np.random.Generator, group_id: str, index: int) -> Trajectory:
    """One to three rows, gapped masks, steps with and without a state, named rewards, sometimes a baseline."""
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for row in range(rng.integers(1, 4)):
        length = int(rng.integers(2, 30))
        mask = rng.integers(0, 2, length)
        mask[-1] = 1
        pictures = rng.integers(0, 9, (int(rng.integers(0, 4)), *SHAPE)).astype(np.int64)
        rows.append(
            {
                "input_ids": rng.integers(0, 99, length),
                "response_mask": mask,
                "rollout_log_probs": -rng.random(length),
                "ref_log_probs": -rng.random(length),
                "pictures": {"data": pictures, "per_token": False},
            }
        )
        half = length // 2
        for start, end in ((0, half), (half, length)):
            state = None if rng.random() < 0.2 else f"s{rng.integers(0, 3)}"
            steps.append(
                {"row": row, "start": start, "end": end, "reward": float(rng.normal()), "state_key": state}
            )
    return Trajectory.model_validate(
        {
            "group_id": group_id,
            "group_size": 64,
            "rollout_index": index,
            "reward": float(rng.normal()),
            "rewards": {name: float(rng.normal()) for name in ("fit", "form") if rng.random() < 0.7},
            "status": "truncated" if rng.random() < 0.3 else "completed",
            "role": "baseline" if rng.random() < 0.15 else "train",
            "model_version": int(rng.integers(0, 3)),
            "rows": rows,
            "steps": steps if rng.random() < 0.8 else [],
        }
    )


class StoredGroups:
    """Groups of the log, their trajectories, and what the server has of each packet, by key."""

    def __init__(self, seed: int, count: int, most_members: int = 6) -> None:
        self.rng = np.random.default_rng(seed)
        self.columns: dict[str, dict[str, Array]] = {}
        self.trajectories: list[list[Trajectory]] = []
        self.groups = [self._group(f"g{number:03}", most_members) for number in range(count)]

    def _group(self, group_id: str, most_members: int) -> LoggedGroup:
        rng = self.rng
        pushed = [random_trajectory(rng, group_id, i) for i in range(rng.integers(1, most_members + 1))]
        # Packets hold members in ascending order; those of several packets alternate.
        owner = rng.integers(0, 3, len(pushed))
        packets = []
        places: dict[int, tuple[int, int]] = {}
        for label in sorted(set(owner.tolist())):
            indices = np.flatnonzero(owner == label).tolist()
            for position, index in enumerate(indices):
                places[index] = (len(packets), position)
            packets.append(self._packet(f"{group_id}:{label}", [pushed[index] for index in indices]))
        living = [i for i in range(len(pushed)) if i == 0 or rng.random() < 0.85]  # others were surplus
        members = Members.concat([packet.members for packet in packets])
        by_index = np.argsort(members.table["index"])
        self.trajectories.append([pushed[index] for index in living])
        return LoggedGroup(
            **{"shard": 0, "entry": f"1-{len(self.columns)}", "group_id": group_id, "size": 64},
            **{"data_source": None, "outcome": "complete", "opened_ms": 0, "epoch": 1, "version": None},
            payloads=tuple((packet.key, packet.size) for packet in packets),
            count=len(living),
            packets=tuple(packets),
            members=members.select(by_index[living]),
            packet_of=tuple(places[index][0] for index in living),
            position_of=tuple(places[index][1] for index in living),
        )

    def _packet(self, key: str, trajectories: Sequence[Trajectory]) -> StoredPacket:
        rows = [row for trajectory in trajectories for row in trajectory.rows]
        columns: dict[str, Array] = {
            name: np.concatenate([getattr(row, name) for row in rows])
            for name in ("input_ids", "response_mask", "rollout_log_probs", "ref_log_probs")
        }
        columns["pictures"] = np.concatenate([row.extras["pictures"].data for row in rows])
        self.columns[key] = columns
        size = sum(column.nbytes for column in columns.values())
        return StoredPacket(key, size, 1, tuple(columns), members_in(trajectories, [0] * len(trajectories)))
