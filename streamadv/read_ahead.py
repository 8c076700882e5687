"""Payloads of the next batch, fetched by a thread while the trainer works on the one before.

What is read ahead is neither delivered nor counted: a batch that comes out differently (a group died, the server was
another one) is simply fetched when it is due. So are payloads that could not be read here, and the trainer queue
then meets the error itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from redis.exceptions import RedisError

from .batches import BatchRecord, LoggedGroup
from .delivery import references_of_rank
from .errors import StreamadvError
from .payloads import fetch_payloads
from .run import Run
from .wire import Payload

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 512 << 20
#: Payloads between two looks at whether to stop.
SLICE: Final = 64


class ReadAhead:
    """Fetches the payloads of one batch, from now on."""

    def __init__(
        self, run: Run, record: BatchRecord, groups: Sequence[LoggedGroup], rank: int, world_size: int
    ) -> None:
        self.batch = record.id
        self._run = run
        self._stopped = threading.Event()
        self._found: dict[str, Payload] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._fetch,
            args=(groups, record, rank, world_size),
            name="streamadv-read-ahead",
            daemon=True,
        )
        self._thread.start()

    def result(self) -> Mapping[str, Payload]:
        """By payload key what could be fetched, after waiting for the rest of it."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def stop(self) -> None:
        """Fetch no more. Does not wait for a server that does not answer."""
        self._stopped.set()

    def _fetch(self, groups: Sequence[LoggedGroup], record: BatchRecord, rank: int, world_size: int) -> None:
        size = 0
        try:
            wanted = references_of_rank(groups, record, rank, world_size)
            for start in range(0, len(wanted), SLICE):
                part = wanted[start : start + SLICE]
                size += sum(member.size for member in part)
                if self._stopped.is_set() or size > MAX_BYTES:
                    return
                payloads = fetch_payloads(self._run, part, None)
                self._found.update(zip((member.key for member in part), payloads, strict=True))
        except (StreamadvError, RedisError) as error:
            logger.debug("not read ahead: %s", error)
        except BaseException as error:  # raised where the batch is asked for
            self._error = error
