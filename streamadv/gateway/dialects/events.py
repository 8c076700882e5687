"""Server-sent events."""

from __future__ import annotations

from typing import Any, Final

import orjson

DONE: Final = b"data: [DONE]\n\n"


def data(value: Any) -> bytes:
    """An event without a name, as OpenAI's completions have it."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def event(kind: str, **fields: Any) -> bytes:
    """A named event, which says its name inside as well."""
    return f"event: {kind}\n".encode() + data({"type": kind, **fields})
