"""What a push sends: trajectories as records, their payloads beside them, in slices that the server can take."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ..errors import TrajectoryError
from ..run.manifest import Manifest
from ..store.keys import ShardKeys
from ..store.scripts import script_call
from ..trajectory.payload import encode_payload, payload_bytes
from ..trajectory.reference import encode_reference, sent_reference
from ..trajectory.schema import Trajectory
from .requests import Transaction

#: Largest slice of a group sent in one MULTI.
MAX_SLICE_RECORDS: Final = 128
MAX_SLICE_BYTES: Final = 4 << 20


class SlotRecord(NamedTuple):
    """A terminal record of a slot, encoded. Kept for a while, so it holds nothing that the garbage collector walks."""

    rollout_index: int
    kind: str  # usable, or why it ended: failed, aborted, cancelled, unscorable
    reward: str  # "" = none yet, or none at all
    role: str
    size: int  # bytes of the payload; 0 without one
    reference: bytes  # without its payload's key and the epoch
    fields: dict[Any, Any]  # of the payload


def encode_record(trajectory: Trajectory, limit: int) -> SlotRecord:
    """A trajectory with its payload, empty unless it is usable. Raises TrajectoryError above `limit` bytes."""
    kind = _kind(trajectory)
    reward = "" if trajectory.reward is None else repr(trajectory.reward)
    role = str(trajectory.role)
    if kind != "usable":
        return SlotRecord(trajectory.rollout_index, kind, reward, role, 0, b"", {})
    fields = encode_payload(trajectory)
    size = payload_bytes(fields)
    if size > limit:
        raise TrajectoryError(
            f"trajectory {trajectory.group_id}/{trajectory.rollout_index} has {size} bytes, "
            f"max_trajectory_bytes is {limit}: drop columns or raise it for the run"
        )
    reference = encode_reference(trajectory, fields, size)
    return SlotRecord(trajectory.rollout_index, kind, reward, role, size, reference, fields)


def ended_record(rollout_index: int, kind: str) -> SlotRecord:
    """A slot that ends without a trajectory: `kind` failed, aborted or cancelled."""
    return SlotRecord(rollout_index, kind, "", "train", 0, b"", {})


def _kind(trajectory: Trajectory) -> str:
    if not trajectory.status.usable:
        return str(trajectory.status)
    return "unscorable" if trajectory.scored and trajectory.reward is None else "usable"


def push_call(
    manifest: Manifest,
    keys: ShardKeys,
    group_id: str,
    records: Sequence[SlotRecord],
    epoch: int,
    arguments: list[Any],
) -> Transaction:
    """One attempt to push records of a group.

    Records without payloads too go by the client that `ServerIds` asks: another client may still reach a former
    primary, and what that acknowledges is lost. arguments: those of the group's admission. epoch: of the ticket.
    """
    scorer = keys.scoring(manifest.scorers[0]) if manifest.scorers else keys.void
    args = [*arguments, "1" if manifest.scorers else "0"]
    payload_keys, payloads = [], []
    for record in records:
        key, reference = "", b""
        if record.size:
            # A new key for each attempt: the server may have registered a payload of an attempt whose reply was lost.
            key = keys.payload(secrets.token_hex(12))
            reference = sent_reference(record.reference, key, epoch)
            payloads.append((key, record.fields))
        payload_keys.append(key or keys.void)
        args += [record.rollout_index, record.kind, record.reward, record.size, key, record.role, reference]
    call = script_call("push", keys, args, group=group_id, scorer=scorer, payloads=payload_keys)
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
