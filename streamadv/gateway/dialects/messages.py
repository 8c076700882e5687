"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..joining import arguments_of
from .events import event

_STOPS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def read(body: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "system", "content": _text(body["system"])}] if body.get("system") else []
    for message in body["messages"]:
        messages += _messages_of(message["role"], message["content"])
    chat: dict[str, Any] = {"messages": messages, "max_tokens": body["max_tokens"]}
    chat |= {name: body[name] for name in ("temperature", "top_p", "top_k") if name in body}
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    # A tool without a schema is Anthropic's own, such as its search.
    tools = [_tool(tool) for tool in body.get("tools") or () if "input_schema" in tool]
    chat |= {"tools": tools} if tools else {}
    if tools and (choice := body.get("tool_choice")):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = named if choice["type"] == "tool" else _CHOICES[choice["type"]]
    return chat


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    said = {"name": tool["name"], "description": tool.get("description", "")}
    return {"type": "function", "function": {**said, "parameters": tool["input_schema"]}}


def _messages_of(role: str, content: Any) -> list[dict[str, Any]]:
    """One message of Anthropic's: results of tools are messages of their own."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    found: list[dict[str, Any]] = []
    said: dict[str, list[Any]] = {"text": [], "thinking": [], "calls": []}
    for part in content:
        kind = part["type"]
        if kind == "tool_result":
            found.append(
                {"role": "tool", "tool_call_id": part["tool_use_id"], "content": _text(part.get("content"))}
            )
        elif kind == "tool_use":
            function = {"name": part["name"], "arguments": json.dumps(part["input"])}
            said["calls"].append({"id": part["id"], "type": "function", "function": function})
        elif kind in ("text", "thinking"):
            said[kind].append(part[kind])
        elif kind != "redacted_thinking":
            raise ValueError(f"messages: content of type {kind} is not supported, use text and tools")
    if any(said.values()):
        message: dict[str, Any] = {"role": role, "content": "".join(said["text"])}
        message |= {"tool_calls": said["calls"]} if said["calls"] else {}
        found.append(message | ({"reasoning": "".join(said["thinking"])} if said["thinking"] else {}))
    return found


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content if part.get("type") == "text")


def write(answer: Mapping[str, Any], asked: Mapping[str, Any]) -> Mapping[str, Any]:
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    parts = _parts(choice["message"])
    has_called = any(part["type"] == "tool_use" for part in parts)
    reason = _STOPS.get(choice.get("finish_reason"), "tool_use" if has_called else "end_turn")
    sampled, read_tokens = usage.get("completion_tokens") or 0, usage.get("prompt_tokens") or 0
    tokens = {"input_tokens": read_tokens, "output_tokens": sampled}
    return {
        "id": f"msg_{answer.get('id')}", "type": "message", "role": "assistant", "model": answer.get("model"),
        "content": parts, "stop_reason": reason, "stop_sequence": None, "usage": tokens,
    }  # fmt: skip


def _parts(message: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if thinking := message.get("reasoning") or message.get("reasoning_content"):
        parts.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if message.get("content"):
        parts.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls") or ():
        value = arguments_of(call["function"]["arguments"])
        parts.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value})
    return parts


def stream(answer: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[bytes]:
    message = write(answer, asked)
    yield event("message_start", message={**message, "content": [], "stop_reason": None})
    for at, part in enumerate(message["content"]):
        empty, delta = _opened(part)
        yield event("content_block_start", index=at, content_block=empty)
        yield event("content_block_delta", index=at, delta=delta)
        yield event("content_block_stop", index=at)
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=ended, usage={"output_tokens": message["usage"]["output_tokens"]})
    yield event("message_stop")


def _opened(part: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A part of an answer as it begins, and what follows."""
    if part["type"] == "text":
        return {"type": "text", "text": ""}, {"type": "text_delta", "text": part["text"]}
    if part["type"] == "thinking":
        return {**part, "thinking": ""}, {"type": "thinking_delta", "thinking": part["thinking"]}
    return {**part, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(part["input"])}
