"""OpenAI's responses, as far as they say the whole conversation: `previous_response_id` is refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from ..joining import arguments_of
from .events import event

_COPIED: Final = ("temperature", "top_p", "parallel_tool_calls")
#: Tools that agents run themselves; others, such as searches, are OpenAI's own and left out.
_OWN_TOOLS: Final = ("function", "custom")


def read(body: dict[str, Any]) -> dict[str, Any]:
    if body.get("previous_response_id") or body.get("conversation"):
        raise ValueError(
            "previous_response_id, conversation: send the whole conversation as input, with store=False"
        )
    messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    given = body["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        _add_item(messages, item)
    chat: dict[str, Any] = {"messages": messages} | {name: body[name] for name in _COPIED if name in body}
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    tools = [_tool(tool) for tool in body.get("tools") or () if tool.get("type") in _OWN_TOOLS]
    chat |= {"tools": tools} if tools else {}
    if (choice := body.get("tool_choice")) is not None and tools:
        is_named = isinstance(choice, dict)
        chat["tool_choice"] = (
            {"type": "function", "function": {"name": choice.get("name")}} if is_named else choice
        )
    form = (body.get("text") or {}).get("format") or {}
    if form.get("type") == "json_schema":
        schema = {name: form[name] for name in ("name", "schema", "strict") if name in form}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool that the agent runs. One of free text has a single argument."""
    if tool["type"] == "custom":
        text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": text}
        return {"type": "function", "function": function}
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """One item of the input. What the assistant said and called in one turn is one message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item["role"] == "developer" else item["role"]
        text = {"content": _text(item["content"])}
        if role == "assistant":
            _of_assistant(messages).update(text)
        else:
            messages.append({"role": role, **text})
    elif kind in ("function_call", "custom_tool_call"):
        is_free = kind == "custom_tool_call"
        written = json.dumps({"input": item["input"]}) if is_free else item["arguments"]
        function = {"name": item["name"], "arguments": written}
        call = {"id": item["call_id"], "type": "function", "function": function}
        _of_assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
    elif kind == "reasoning":
        _of_assistant(messages)["reasoning"] = _text(item.get("content") or item.get("summary") or "")
    else:
        raise ValueError(f"input: an item of type {kind} is not supported, use messages and functions")


def _of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if unknown := [part.get("type") for part in content if "text" not in part]:
        raise ValueError(f"input: content of type {unknown[0]} is not supported, use text")
    return "".join(part["text"] for part in content)


def write(answer: Mapping[str, Any], asked: Mapping[str, Any]) -> Mapping[str, Any]:
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    sampled, read_tokens = usage.get("completion_tokens") or 0, usage.get("prompt_tokens") or 0
    is_cut = choice.get("finish_reason") == "length"
    free = {tool["name"] for tool in asked.get("tools") or () if tool.get("type") == "custom"}
    given = ("instructions", "tools", "tool_choice", *_COPIED, "metadata", "text")
    defaults = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}}
    return {
        "id": f"resp_{answer.get('id')}", "object": "response", "created_at": answer.get("created") or 0,
        "model": answer.get("model"), "status": "incomplete" if is_cut else "completed", "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _items(str(answer.get("id")), choice["message"], free),
        **defaults, **{name: asked[name] for name in given if asked.get(name) is not None},
        "usage": {
            "input_tokens": read_tokens, "output_tokens": sampled, "total_tokens": read_tokens + sampled,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip


def _items(name: str, message: Mapping[str, Any], free: Collection[str]) -> list[dict[str, Any]]:
    """What the message says, in items. free: names of the tools of free text."""
    items: list[dict[str, Any]] = []
    if thinking := message.get("reasoning") or message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thinking}]
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": content})
    if message.get("content"):
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        said = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**said, "content": [text]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        made = {
            "id": f"fc_{call['id']}",
            "status": "completed",
            "call_id": call["id"],
            "name": function["name"],
        }
        if function["name"] in free:
            written = str(arguments_of(function["arguments"]).get("input", function["arguments"]))
            items.append({**made, "type": "custom_tool_call", "input": written})
        else:
            items.append({**made, "type": "function_call", "arguments": function["arguments"]})
    return items


#: What an item says: kind of the item, field, name of its events.
_SAID: Final = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


def stream(answer: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[bytes]:
    response = write(answer, asked)
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    number = 0

    def numbered(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return event(kind, sequence_number=number - 1, **fields)

    yield numbered("response.created", response=begun)
    for at, item in enumerate(response["output"]):
        name, kind = _SAID.get(item["type"], ("content", ""))
        empty: dict[str, Any] = {name: "" if kind else []}
        yield numbered("response.output_item.added", output_index=at, item={**item, **empty})
        place: dict[str, Any] = {"item_id": item["id"], "output_index": at}
        if kind:
            said = (
                {"name": item["name"], name: item[name]} if kind.endswith("arguments") else {name: item[name]}
            )
            yield numbered(f"response.{kind}.delta", **place, delta=item[name])
            yield numbered(f"response.{kind}.done", **place, **said)
        else:
            (part,) = item["content"]
            place |= {"content_index": 0}
            more: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield numbered("response.content_part.added", **place, part={**part, "text": ""})
            yield numbered(f"response.{part['type']}.delta", **place, delta=part["text"], **more)
            yield numbered(f"response.{part['type']}.done", **place, text=part["text"], **more)
            yield numbered("response.content_part.done", **place, part=part)
        yield numbered("response.output_item.done", output_index=at, item=item)
    yield numbered(f"response.{response['status']}", response=response)
