"""OpenAI's chat completions, the form that engines speak, and its completions.

The latter have a prompt of text or tokens and no messages, so a row goes on by its tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .events import DONE, data


def read(body: dict[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages: needs a list of objects")
    for message in messages:
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ValueError("messages: tool_calls needs a list of objects")
        if not all(isinstance(call.get("function") or {}, dict) for call in calls):
            raise ValueError("messages: the function of a tool call needs an object")
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else ():
            if "text" not in part:  # what a row has no tokens of cannot be trained on
                raise ValueError(f"messages: content of type {part.get('type')} is not supported, use text")
    return body


def write(answer: Mapping[str, Any], asked: Mapping[str, Any]) -> Mapping[str, Any]:
    return answer


def stream(answer: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[bytes]:
    """Two chunks a choice: what it says, and why it ends."""
    shared = {name: answer.get(name) for name in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }
    for choice in answer["choices"]:
        delta = {name: value for name, value in choice["message"].items() if value is not None}
        if delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
        first: dict[str, Any] = {"index": choice["index"], "delta": delta, "finish_reason": None}
        if choice.get("logprobs"):
            first["logprobs"] = choice["logprobs"]
        yield data({**shared, "choices": [first]})
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice.get("finish_reason")}
        yield data({**shared, "choices": [last]})
    if (asked.get("stream_options") or {}).get("include_usage"):
        yield data({**shared, "choices": [], "usage": answer.get("usage")})
    yield DONE


def read_prompt(body: dict[str, Any]) -> dict[str, Any]:
    prompt = body.get("prompt")
    is_tokens = isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)
    if not (isinstance(prompt, str) or is_tokens):
        raise ValueError("prompt: needs one text, or the tokens of one")
    return body


def stream_text(answer: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[bytes]:
    shared = {name: answer.get(name) for name in ("id", "created", "model")} | {"object": "text_completion"}
    for choice in answer["choices"]:
        yield data({**shared, "choices": [choice]})
    if (asked.get("stream_options") or {}).get("include_usage"):
        yield data({**shared, "choices": [], "usage": answer.get("usage")})
    yield DONE
