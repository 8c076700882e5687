"""Which conversation a request continues: messages as chains of digests, however a client writes them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson


def arguments_of(written: Any) -> Any:
    """The arguments of a call, as an object whatever the policy has written."""
    value = written
    if isinstance(written, str):
        with suppress(orjson.JSONDecodeError):
            value = orjson.loads(written or "{}")
    return value if isinstance(value, dict) else {"arguments": written}


def text_of(content: Any) -> Any:
    """The text of a message's content; the content itself where it has something else than text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and "text" in part for part in content
    ):
        return "".join(str(part["text"]) for part in content)
    return content


def chains(messages: Sequence[Mapping[str, Any]], tools: Any, agent: str | None) -> list[str]:
    """Digests of the conversation: before the first message, and after each of them."""
    found = [_digest("", [tools or [], agent])]
    for message in messages:
        found.append(following(found[-1], message))
    return found


def following(chain: str, message: Mapping[str, Any]) -> str:
    """The digest of a conversation with one more message.

    Of what that says: role, text, calls of tools with parsed arguments, and the call that it answers.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append([function.get("name"), arguments_of(function.get("arguments")), call.get("id")])
    text = text_of(message.get("content"))
    if message.get("role") == "assistant" and isinstance(text, str):
        text = text.strip()  # clients do that
    return _digest(chain, [message.get("role"), text, calls, message.get("tool_call_id")])


def _digest(before: str, what: Any) -> str:
    text = orjson.dumps(what, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(before.encode() + text, digest_size=12).hexdigest()
