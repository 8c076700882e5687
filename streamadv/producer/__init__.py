"""Producers: admission, tickets, pushes and resends, for blocking and for asyncio code."""

from .async_group import AsyncGroup, AsyncRollout
from .async_producer import AsyncProducer
from .group import Group, Rollout
from .producer import Producer
from .tickets import Ticket

__all__ = ["AsyncGroup", "AsyncProducer", "AsyncRollout", "Group", "Producer", "Rollout", "Ticket"]
