"""OpenAI's completions: a prompt of text or tokens. They have no messages, so a row goes on by its tokens alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .events import DONE, data


def read(body: dict[str, Any]) -> dict[str, Any]:
    prompt = body.get("prompt")
    is_tokens = isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)
    if not (isinstance(prompt, str) or is_tokens):
        raise ValueError("prompt: needs one text, or the tokens of one")
    return body


def write(answer: Mapping[str, Any], asked: Mapping[str, Any]) -> Mapping[str, Any]:
    return answer


def stream(answer: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[bytes]:
    shared = {name: answer.get(name) for name in ("id", "created", "model")} | {"object": "text_completion"}
    for choice in answer["choices"]:
        yield data({**shared, "choices": [choice]})
    if (asked.get("stream_options") or {}).get("include_usage"):
        yield data({**shared, "choices": [], "usage": answer.get("usage")})
    yield DONE
