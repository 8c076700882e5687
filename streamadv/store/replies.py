"""Reads replies whose content is untrusted."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from typing import Any, Final

from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from .exchange import Client


def replies_of(pipe: Any) -> list[Any]:
    """Replies to reads of hashes, None where the key is no hash. Raises any other error."""
    return list(map(_of_hash, pipe.execute(raise_on_error=False)))


def read_hashes(client: Any, commands: Sequence[Sequence[Any]]) -> Generator[Any]:
    """`replies_of` these commands, each as soon as it has come where one server has all hashes.

    Who does not take all of them closes the iterator.
    """
    count = 0
    if isinstance(client, Client):
        # What is left when a connection breaks is asked for again, as often as redis-py was told.
        with suppress(ConnectionError, TimeoutError), closing(client.read(commands)) as replies:
            for reply in replies:
                count += 1
                yield _of_hash(reply)
    if count < len(commands):
        pipe = client.pipeline(transaction=False)
        for command in commands[count:]:
            pipe.execute_command(*command)
        yield from replies_of(pipe)


def _of_hash(reply: Any) -> Any:
    if isinstance(reply, Exception):
        if not str(reply).startswith("WRONGTYPE"):
            raise reply
        return None
    return reply


def or_nothing(reply: Any) -> Any:
    """The reply; [] when the stream or its consumer group does not exist yet. Raises any other error."""
    if isinstance(reply, ResponseError) and any(text in str(reply) for text in ("no such key", "NOGROUP")):
        return []
    if isinstance(reply, Exception):
        raise reply
    return reply


#: Characters of a text that anybody may have written, as it goes into labels, lines and logs.
MAX_TEXT: Final = 200


def as_text(value: bytes, chars: int = MAX_TEXT) -> str:
    """What anybody may have written, as text: cut beyond `chars` characters, what is no UTF-8 escaped."""
    text = value[: 4 * chars + 4].decode(errors="backslashreplace")
    return text if len(text) <= chars else f"{text[: chars - 3]}..."


def as_mapping(reply: Any) -> dict[str, Any]:
    """A map by its names. A cluster's transactions return it as a flat list."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {as_text(name) if isinstance(name, bytes) else name: value for name, value in pairs}


def as_texts(reply: Any) -> dict[str, str]:
    """A map of texts."""
    return {name: value.decode(errors="backslashreplace") for name, value in as_mapping(reply).items()}


def as_int(value: str | bytes | int | None) -> int | None:
    """The whole number that `value` is, of at most 19 digits, or None."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str("" if value is None else value)
    return int(text) if re.fullmatch(r"-?[0-9]{1,19}", text) else None


def as_count(value: str | bytes | int | None) -> int:
    """The whole number that `value` is; 0 where it is none."""
    return as_int(value) or 0
