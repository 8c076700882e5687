"""Leases: finds pending entries that no consumer has touched for so long that another may take them over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

#: Owns entries that were given back: anybody may take them at once.
NOBODY: Final = "nobody"


class Delivery(NamedTuple):
    """Who has a pending entry, and how often it was delivered: one of both changes whenever somebody takes it."""

    consumer: bytes
    times: int


class Leases:
    """The pending entries of one stream, each with the time since which one process has seen its delivery unchanged.

    Times are of this process's own clock: the server's may be set, and a failover brings another one.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: dict[str, tuple[Delivery, float]] = {}

    def expired(self, pending: Mapping[str, Delivery], now: float) -> list[tuple[str, Delivery]]:
        """Entries whose lease is over, oldest first. pending: everything that is now, by entry id."""
        seen = self._seen
        self._seen = {
            entry_id: seen[entry_id]
            if entry_id in seen and seen[entry_id][0] == delivery
            else (delivery, now)
            for entry_id, delivery in pending.items()
        }
        return [
            (entry_id, delivery)
            for entry_id, (delivery, since) in self._seen.items()
            if now - since >= self._lease_s or delivery.consumer == NOBODY.encode()
        ]
