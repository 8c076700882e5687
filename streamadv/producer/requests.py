"""What a producer may ask of its client: requests that the blocking and the asyncio producer carry out."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from ..store.scripts import ScriptCall


class Transaction(NamedTuple):
    """MULTI: write the payload hashes, then run the script. Never sent twice."""

    payloads: Sequence[tuple[str, dict[Any, Any]]]
    call: ScriptCall


class Pause(NamedTuple):
    """Wait so many seconds."""

    seconds: float


class Memory(NamedTuple):
    """Ask the server for its memory figures; {} where INFO is missing."""


class ServerIds(NamedTuple):
    """Ask which server has each key; None where it does not tell. Another one may have lost the last moments."""

    keys: Sequence[str]


Request = ScriptCall | Transaction | Pause | Memory | ServerIds
T = TypeVar("T")
Steps = Generator[Request, Any, T]
