"""Payloads of the next batch, fetched by a thread while the trainer works on the one before.

What is read ahead is neither delivered nor counted: a batch that comes out differently (a group died, the server was
another one) is simply fetched when it is due. So are payloads that could not be read here, and the trainer queue
then meets the error itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from redis.exceptions import RedisError
from torch import Tensor

from ..algorithms.packed import empty_column
from ..batch.record import BatchRecord
from ..errors import StreamadvError, WireError
from ..grouping.groups_log import LoggedGroup
from ..run import Run
from ..run.payloads import fetch_payloads
from ..trajectory.columns import KNOWN_COLUMNS, Array, check_values
from ..trajectory.reference import Reference
from .delivery import Fetched, references_of_rank

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 512 << 20
#: Payloads between two looks at whether to stop.
SLICE: Final = 64


class ReadAhead:
    """Fetches the payloads of one batch, from now on."""

    def __init__(
        self,
        run: Run,
        record: BatchRecord,
        groups: Sequence[LoggedGroup],
        *,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        self.batch = record.id
        self._run = run
        self._device = device
        self._stopped = threading.Event()
        self._found = Fetched({})
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._fetch,
            args=(groups, record, rank, world_size),
            name="streamadv-read-ahead",
            daemon=True,
        )
        self._thread.start()

    def result(self) -> Fetched:
        """What could be fetched, after waiting for the rest of it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def stop(self) -> None:
        """Fetch no more. Does not wait for a server that does not answer."""
        self._stopped.set()

    def _fetch(self, groups: Sequence[LoggedGroup], record: BatchRecord, rank: int, world_size: int) -> None:
        try:
            wanted = references_of_rank(groups, record, rank, world_size)
            sizes = accumulate(member.size for member in wanted)
            wanted = wanted[: sum(size <= MAX_BYTES for size in sizes)]
            columns = _columns_of(wanted, self._device)
            arrays = {name: column.numpy() for name, column in columns.items()}
            bounds = [0, *accumulate(member.num_tokens for member in wanted)]
            for first in range(0, len(wanted), SLICE):
                if self._stopped.is_set():
                    return
                part = wanted[first : first + SLICE]
                spans = list(pairwise(bounds[first : first + SLICE + 1]))
                places = [{name: a[start:stop] for name, a in arrays.items()} for start, stop in spans]
                payloads = fetch_payloads(self._run, part, None, places)
                _check({name: array[spans[0][0] : spans[-1][1]] for name, array in arrays.items()})
                self._found.payloads.update(zip((member.key for member in part), payloads, strict=True))
            self._found = Fetched(self._found.payloads, [member.key for member in wanted], columns)
        except (StreamadvError, RedisError) as error:
            logger.debug("not read ahead: %s", error)
        except BaseException as error:  # raised where the batch is asked for
            self._error = error


def _check(columns: Mapping[str, Array]) -> None:
    """Raises WireError: whose values they are is found out when they are due."""
    for name, array in columns.items():
        try:
            check_values(name, array)
        except ValueError as error:
            raise WireError(f"column {name} {error}") from error


def _columns_of(members: Sequence[Reference], device: torch.device) -> dict[str, Tensor]:
    """Space for the known columns that all of these members have; none where a reference announces too much."""
    tokens = sum(member.num_tokens for member in members)
    common = set(KNOWN_COLUMNS).intersection(*(member.columns for member in members)) if members else ()
    if tokens * sum(KNOWN_COLUMNS[name].itemsize for name in common) > sum(member.size for member in members):
        return {}
    return {name: empty_column(tokens, KNOWN_COLUMNS[name], device) for name in sorted(common)}
