"""What a push sends: trajectories as records, their payloads beside them, in slices the server can take."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

from .errors import TrajectoryError
from .exchange import Transaction
from .keys import ShardKeys
from .manifest import Manifest
from .schema import Trajectory
from .scripts import script_call
from .wire import encode_payload, make_reference, payload_bytes

#: Largest slice of a group sent in one MULTI.
MAX_SLICE_RECORDS: Final = 128
MAX_SLICE_BYTES: Final = 4 << 20
#: A trajectory with the fields of its payload and their size.
Record = tuple[Trajectory, tuple[dict[Any, Any], int]]


def encode_record(trajectory: Trajectory, limit: int) -> Record:
    """A trajectory with its payload, empty unless it is usable. Raises TrajectoryError above `limit` bytes."""
    if _kind(trajectory) != "usable":
        return trajectory, ({}, 0)
    fields = encode_payload(trajectory)
    size = payload_bytes(fields)
    if size > limit:
        raise TrajectoryError(
            f"trajectory {trajectory.group_id}/{trajectory.rollout_index} has {size} bytes, "
            f"max_trajectory_bytes is {limit}: drop columns or raise it for the run"
        )
    return trajectory, (fields, size)


def push_request(
    manifest: Manifest, keys: ShardKeys, spec: Sequence[Any], records: Sequence[Record], epoch: int
) -> Transaction:
    """One send of records of a group; `spec`: arguments of its admission."""
    group_id = records[0][0].group_id
    scorer = keys.scoring(manifest.scorers[0]) if manifest.scorers else keys.void
    # Fresh keys for every send: under the old ones a send whose reply was lost may live already.
    payload_keys = [keys.payload(secrets.token_hex(12)) if size else keys.void for _, (_, size) in records]
    args: list[Any] = [group_id, *spec, "1" if manifest.scorers else "0"]
    for key, (trajectory, (_, size)) in zip(payload_keys, records, strict=True):
        args += [trajectory.rollout_index, _kind(trajectory), _reward(trajectory), size]
        reference = make_reference(trajectory, key, size, epoch) if size else None
        text = reference.model_dump_json(exclude_defaults=True) if reference else ""
        args += [key, trajectory.role, text]
    call = script_call("push", [*keys.admission(group_id), keys.rollouts, scorer, *payload_keys], args)
    payloads = [(key, fields) for key, (_, (fields, size)) in zip(payload_keys, records, strict=True) if size]
    return Transaction(payloads, call)


def slices(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of at most MAX_SLICE_RECORDS records and MAX_SLICE_BYTES bytes (one record may exceed it)."""
    ranges, start, total = [], 0, 0
    for position, size in enumerate(sizes):
        if position > start and (total + size > MAX_SLICE_BYTES or position - start >= MAX_SLICE_RECORDS):
            ranges.append((start, position))
            start, total = position, 0
        total += size
    return [*ranges, (start, len(sizes))]


def _kind(trajectory: Trajectory) -> str:
    if not trajectory.status.usable:
        return str(trajectory.status)
    return "unscorable" if trajectory.scored and trajectory.reward is None else "usable"


def _reward(trajectory: Trajectory) -> str:
    return "" if trajectory.reward is None else repr(trajectory.reward)
