"""Messages of a child process to its supervisor: one JSON object per line on stdout."""

from __future__ import annotations

import json
from typing import Any


def send(kind: str, **fields: Any) -> None:
    """Write one message. Raises BrokenPipeError if the supervisor is gone."""
    print(json.dumps({"kind": kind, **fields}), flush=True)


def parse(line: str) -> dict[str, Any] | None:
    """The message on a line; None for anything else that the child, or a library in it, prints."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "kind" in message else None
