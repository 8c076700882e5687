"""What child processes tell their supervisor: one JSON object per line on stdout."""

from __future__ import annotations

import json
from typing import Any


def send(kind: str, **fields: Any) -> None:
    """Write one message. Raises BrokenPipeError when the supervisor is gone."""
    print(json.dumps({"kind": kind, **fields}), flush=True)


def parse(line: str) -> dict[str, Any] | None:
    """The message on a line; None if the line is something else (a library that prints)."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "kind" in message else None
