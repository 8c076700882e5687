"""What agents speak, as requests and answers of chat completions (or of completions, which have no messages).

`chat.py`, `completions.py` and `responses.py` are OpenAI's, `messages.py` is Anthropic's. Each has `read(body)`, the
request in that form, `write(answer, asked)`, the answer as the agent expects it, and `stream(answer, asked)`, the same
as events (`events.py`). An answer is whole before its first event leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from . import chat, completions, messages, responses


class Dialect(NamedTuple):
    """One API."""

    name: str
    path: str
    """Below `/v1/`."""
    engine_path: str
    read: Callable[[dict[str, Any]], dict[str, Any]]
    write: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
    stream: Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[bytes]]


_CHAT: Final = "/v1/chat/completions"
DIALECTS: Final = tuple(
    Dialect(name, path, engine_path, api.read, api.write, api.stream)
    for name, path, engine_path, api in (
        ("chat", "chat/completions", _CHAT, chat),
        ("completions", "completions", "/v1/completions", completions),
        ("messages", "messages", _CHAT, messages),
        ("responses", "responses", _CHAT, responses),
    )
)
