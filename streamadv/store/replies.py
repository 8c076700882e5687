"""Reading replies whose content anybody may have written."""

from __future__ import annotations

import re
from typing import Any

from redis.exceptions import ResponseError


def replies_of(pipe: Any) -> list[Any]:
    """Replies to reads of hashes, None where the key is no hash. Raises any other error."""
    replies = pipe.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and not str(reply).startswith("WRONGTYPE"):
            raise reply
    return [None if isinstance(reply, Exception) else reply for reply in replies]


def or_nothing(reply: Any) -> Any:
    """The reply; [] when the stream or its consumer group does not exist yet. Raises any other error."""
    if isinstance(reply, ResponseError) and any(text in str(reply) for text in ("no such key", "NOGROUP")):
        return []
    if isinstance(reply, Exception):
        raise reply
    return reply


def as_mapping(reply: Any) -> dict[str, Any]:
    """A map by its names. A cluster's transactions return it as a flat list."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {
        name.decode(errors="backslashreplace") if isinstance(name, bytes) else name: value
        for name, value in pairs
    }


def as_texts(reply: Any) -> dict[str, str]:
    """A map of texts."""
    return {name: value.decode(errors="backslashreplace") for name, value in as_mapping(reply).items()}


def as_whole(value: str | bytes | None) -> int | None:
    """The whole number that `value` is, of at most 19 digits, or None."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else value or ""
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None


def as_count(value: str | bytes | None) -> int:
    """The whole number that `value` is; 0 where it is none."""
    return as_whole(value) or 0
