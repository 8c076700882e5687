"""What a push sends: trajectories as records, their payloads beside them, in slices the server can take."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ..errors import TrajectoryError
from ..run.manifest import Manifest
from ..store.keys import ShardKeys
from ..store.scripts import ScriptCall, script_call
from ..trajectory.payload import encode_payload, payload_bytes
from ..trajectory.reference import encode_reference, sent_reference
from ..trajectory.schema import Trajectory
from .requests import Transaction

#: Largest slice of a group sent in one MULTI.
MAX_SLICE_RECORDS: Final = 128
MAX_SLICE_BYTES: Final = 4 << 20


class Record(NamedTuple):
    """A terminal record of a place, encoded. Kept for a while, so nothing that the garbage collector walks."""

    rollout_index: int
    kind: str
    reward: str
    role: str
    size: int  # of the payload; 0 without one
    reference: bytes  # but for key and epoch
    fields: dict[Any, Any]


def encode_record(trajectory: Trajectory, limit: int) -> Record:
    """A trajectory with its payload, empty unless it is usable. Raises TrajectoryError above `limit` bytes."""
    kind = _kind(trajectory)
    known = (trajectory.rollout_index, kind, _reward(trajectory), str(trajectory.role))
    if kind != "usable":
        return Record(*known, 0, b"", {})
    fields = encode_payload(trajectory)
    size = payload_bytes(fields)
    if size > limit:
        raise TrajectoryError(
            f"trajectory {trajectory.group_id}/{trajectory.rollout_index} has {size} bytes, "
            f"max_trajectory_bytes is {limit}: drop columns or raise it for the run"
        )
    return Record(*known, size, encode_reference(trajectory, fields, size), fields)


class Ending(NamedTuple):
    """A place that ends without a trajectory."""

    rollout_index: int  # -1: the highest free one of those allowed
    kind: str  # failed, aborted or cancelled
    nonce: str  # a repeated call for any free place takes no second one


def ending_request(
    keys: ShardKeys, spec: Sequence[Any], endings: Sequence[Ending], allowed: str
) -> ScriptCall:
    """One call that ends places; `allowed`: '0' or '1' for each place from 0 on, for endings of any place."""
    args: list[Any] = [*spec, "0"]
    for ending in endings:
        first = "" if ending is not endings[0] else allowed
        args += [ending.rollout_index, ending.kind, "", 0, ending.nonce, "train", first]
    return script_call(
        "push", [*keys.admission(spec[0]), keys.rollouts, *[keys.void] * (1 + len(endings))], args
    )


def ended_places(reply: Sequence[bytes], endings: Sequence[Ending]) -> list[int]:
    """Which places were ended by the call that was answered so; none by one that was refused."""
    words = [code.split(b" ") for code in reply[1:]] if reply[0] == b"ok" else []
    return [
        int(word[1]) if len(word) > 1 else ending.rollout_index
        for word, ending in zip(words, endings, strict=False)
        if word[0] == b"pushed"
    ]


def push_request(
    manifest: Manifest, keys: ShardKeys, spec: Sequence[Any], records: Sequence[Record], epoch: int
) -> Transaction:
    """One send of records of a group; `spec`: arguments of its admission, the group's id first."""
    scorer = keys.scoring(manifest.scorers[0]) if manifest.scorers else keys.void
    args: list[Any] = [*spec, "1" if manifest.scorers else "0"]
    payload_keys, payloads = [], []
    for record in records:
        key, reference = keys.void, b""
        if record.size:
            # A fresh key for every send: under the old one a send whose reply was lost may live already.
            key = keys.payload(secrets.token_hex(12))
            reference = sent_reference(record.reference, key, epoch)
            payloads.append((key, record.fields))
        payload_keys.append(key)
        args += [record.rollout_index, record.kind, record.reward, record.size, key, record.role, reference]
    call = script_call("push", [*keys.admission(spec[0]), keys.rollouts, scorer, *payload_keys], args)
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
