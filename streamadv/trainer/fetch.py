"""Payloads and results per token of one rank's trajectories: fetched when they are due, or read ahead.

A thread reads the payloads of the next batch ahead while the trainer works on the one before. They are neither
delivered nor counted: if the batch comes out differently (a group died, the server was another one), its payloads are
fetched when they are due. So are payloads that the thread could not read: `fetch` then meets the error itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
import torch
from redis.exceptions import RedisError
from torch import Tensor

from ..advantage.results import ComputedMember
from ..algorithms.packing import empty_column
from ..batch.record import BatchRecord
from ..errors import StreamadvError, UndecodableGroupError, WireError
from ..grouping.groups_log import LoggedGroup
from ..messages import log_fields
from ..run import Run
from ..run.payloads import fetch_payloads
from ..store.replies import replies_of
from ..trajectory.columns import KNOWN_COLUMNS, OUTPUT_COLUMNS, Array, check_values
from ..trajectory.payload import Payload
from ..trajectory.reference import Reference
from .plan import Rank, share_of

logger = logging.getLogger(__name__)

#: A batch's payloads are read ahead up to this size.
MAX_BYTES: Final = 512 << 20
#: Payloads between two looks at whether to stop.
SLICE: Final = 64


class Prefetched(NamedTuple):
    """Payloads read before they are due, by key, and columns that lie end to end for the trajectories of `keys`."""

    payloads: dict[str, Payload]
    keys: Sequence[str] = ()
    columns: Mapping[str, Tensor] = {}


class FetchedShare(NamedTuple):
    """What the server has of a rank's trajectories, in the order of its share."""

    payloads: list[Payload]
    outputs: list[dict[str, Array]]  # the workers' results per token, by column
    columns: Mapping[str, Tensor]  # pushed columns [N] that lie end to end already


def fetch(run: Run, members: Sequence[ComputedMember], prefetched: Prefetched) -> FetchedShare:
    """Fetch everything that was not read ahead. Raises UndecodableGroupError for what is gone or cannot be read."""
    references = [member.reference for member in members]
    columns = prefetched.columns if [reference.key for reference in references] == prefetched.keys else {}
    return FetchedShare(
        _fetch_missing(run, references, prefetched.payloads), _fetch_outputs(run, members), columns
    )


def _fetch_missing(
    run: Run, references: Sequence[Reference], prefetched: Mapping[str, Payload]
) -> list[Payload]:
    missing = [reference for reference in references if reference.key not in prefetched]
    fetched = zip((reference.key for reference in missing), fetch_payloads(run, missing, None), strict=True)
    by_key = {**prefetched, **dict(fetched)}
    return [by_key[reference.key] for reference in references]


def _fetch_outputs(run: Run, members: Sequence[ComputedMember]) -> list[dict[str, Array]]:
    """The workers' results per token for each member. Raises UndecodableGroupError."""
    pipe = run.connection.scripts.pipeline(transaction=False)
    results = list({id(member.result): member.result for member in members if member.columns}.values())
    for result in results:
        pipe.hmget(result.output, result.header.columns)
    columns = dict(zip(map(id, results), replies_of(pipe) if results else [], strict=True))
    outputs = []
    problems: dict[tuple[str, int], str] = {}
    for member in members:
        try:
            outputs.append(_decode_outputs(member, columns.get(id(member.result))))
        except WireError as error:
            problems[member.identity] = str(error)
    if problems:
        raise UndecodableGroupError(problems)
    return outputs


def _decode_outputs(member: ComputedMember, reply: Sequence[bytes | None] | None) -> dict[str, Array]:
    """reply: a value for each output column; None where the key holds no hash. Raises WireError."""
    arrays: dict[str, Array] = {}
    tokens = sum(group.tokens for group in member.result.header.groups)
    start, stop = member.first_token, member.first_token + member.reference.num_tokens
    for name, value in zip(member.columns, reply or [None] * len(member.columns), strict=True):
        dtype = KNOWN_COLUMNS.get(name) or OUTPUT_COLUMNS[name]
        if value is None or len(value) != tokens * dtype.itemsize:
            rollout = f"rollout {member.reference.rollout_index}"
            raise WireError(f"output column {name} of {rollout} has the wrong size or is missing")
        arrays[name] = np.frombuffer(value, dtype)[start:stop]
    return arrays


class ReadAhead:
    """A thread that fetches the payloads of one batch, from now on."""

    def __init__(self, run: Run, record: BatchRecord, groups: Sequence[LoggedGroup], rank: Rank) -> None:
        self.batch = record.id
        self._run = run
        self._device = rank.device
        self._stopped = threading.Event()
        self._prefetched = Prefetched({})
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._fetch, args=(groups, record, rank), name="streamadv-read-ahead", daemon=True
        )
        self._thread.start()

    def result(self) -> Prefetched:
        """Wait for the thread and return everything that it could fetch. Raises what no server brought about."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._prefetched

    def stop(self) -> None:
        """Fetch no more. Does not wait for a server that does not answer."""
        self._stopped.set()

    def _fetch(self, groups: Sequence[LoggedGroup], record: BatchRecord, rank: Rank) -> None:
        try:
            in_batch = [reference for group in groups for reference in group.references]
            references = share_of(in_batch, record.tokens_per_micro_batch, rank).references
            sizes = accumulate(reference.size for reference in references)
            self._fetch_into_columns(references[: sum(size <= MAX_BYTES for size in sizes)])
        except (StreamadvError, RedisError) as error:
            fields = log_fields("not_read_ahead", role="trainer", batch=record.k)
            logger.debug("not read ahead: %s", error, extra=fields)
        except BaseException as error:  # raised where the batch is asked for
            self._error = error

    def _fetch_into_columns(self, references: Sequence[Reference]) -> None:
        """Fetch slice by slice. Known columns are decoded into their place in the batch: no copy packs them later."""
        columns = _empty_columns(references, self._device)
        arrays = {name: column.numpy() for name, column in columns.items()}
        bounds = [0, *accumulate(reference.num_tokens for reference in references)]
        for first in range(0, len(references), SLICE):
            if self._stopped.is_set():
                return
            part = references[first : first + SLICE]
            spans = list(pairwise(bounds[first : first + SLICE + 1]))
            places = [{name: a[start:stop] for name, a in arrays.items()} for start, stop in spans]
            payloads = fetch_payloads(self._run, part, None, places)
            _check_finite({name: array[spans[0][0] : spans[-1][1]] for name, array in arrays.items()})
            keys = (reference.key for reference in part)
            self._prefetched.payloads.update(zip(keys, payloads, strict=True))
        keys_in_order = [reference.key for reference in references]
        self._prefetched = Prefetched(self._prefetched.payloads, keys_in_order, columns)


def _check_finite(columns: Mapping[str, Array]) -> None:
    """Raise WireError for wrong values. `fetch` finds out later which trajectory has them."""
    for name, array in columns.items():
        try:
            check_values(name, array)
        except ValueError as error:
            raise WireError(f"column {name} {error}") from error


def _empty_columns(references: Sequence[Reference], device: torch.device) -> dict[str, Tensor]:
    """Space for the known columns that all of these have; none where references announce more than their bytes."""
    tokens = sum(reference.num_tokens for reference in references)
    common = set(KNOWN_COLUMNS).intersection(*(r.columns for r in references)) if references else ()
    if tokens * sum(KNOWN_COLUMNS[name].itemsize for name in common) > sum(r.size for r in references):
        return {}
    return {name: empty_column(tokens, KNOWN_COLUMNS[name], device) for name in sorted(common)}
