"""What agents speak, as requests and answers of chat completions (or of completions, which have no messages).

`chat.py` (with completions) and `responses.py` are OpenAI's, `messages.py` is Anthropic's. Each has `read(body)`, the
request in that form, `write(answer, asked)`, the answer as the agent expects it, and `stream(answer, asked)`, the same
as events (`events.py`). An answer is whole before its first event leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from . import chat, messages, responses


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
_TEXT: Final = "/v1/completions"
DIALECTS: Final = (
    Dialect("chat", "chat/completions", _CHAT, chat.read, chat.write, chat.stream),
    Dialect("completions", "completions", _TEXT, chat.read_prompt, chat.write, chat.stream_text),
    Dialect("messages", "messages", _CHAT, messages.read, messages.write, messages.stream),
    Dialect("responses", "responses", _CHAT, responses.read, responses.write, responses.stream),
)
