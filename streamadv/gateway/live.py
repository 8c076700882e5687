"""A stream that an agent gets while the engine samples: `--live-streams`.

The agent gets each chunk but those from the first finish on, which wait until the turn is at the run's server. So no
agent has seen an answer end that is not kept; one that was broken off is no turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from .dialects.events import DONE, data

#: What an agent that speaks to an engine does not get.
HIDDEN: Final = ("prompt_token_ids", "prompt_logprobs", "prompt_text", "kv_transfer_params")
HIDDEN_OF_CHOICES: Final = (
    "token_ids", "prompt_token_ids", "meta_info", "response_token_ids", "weight_versions",
)  # fmt: skip
#: Dialects whose chunks are those of the engine.
DIALECTS: Final = ("chat", "completions")


def without_ids(answer: Mapping[str, Any], keeps_log_probs: bool) -> dict[str, Any]:
    """An answer, or a chunk of one, as an agent that speaks to an engine gets it."""
    hidden = (*HIDDEN_OF_CHOICES, *([] if keeps_log_probs else ["logprobs"]))
    choices = [{name: choice[name] for name in choice if name not in hidden} for choice in answer["choices"]]
    return {name: answer[name] for name in answer if name not in HIDDEN} | {"choices": choices}


class Live:
    """One stream: what goes to the agent, and the whole answer that the chunks make."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]], asked: Mapping[str, Any]) -> None:
        """send: to the agent. asked: the agent's request."""
        self._send, self._keeps_log_probs = send, bool(asked.get("logprobs"))
        self._shows_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._held: list[bytes] = []
        self.has_begun = False

    async def take(self, chunk: Mapping[str, Any]) -> None:
        """A chunk of the engine's."""
        self._head |= {name: chunk[name] for name in chunk if name != "choices" and chunk[name] is not None}
        for part in chunk["choices"]:
            _add(self._choices.setdefault(part["index"], {"index": part["index"]}), part)
        shown = without_ids(chunk, self._keeps_log_probs)
        if not shown["choices"] and not self._shows_usage:
            return
        if self._held or any(part.get("finish_reason") for part in chunk["choices"]):
            self._held.append(data(shown))
        else:
            self.has_begun = True
            await self._send(data(shown))

    def answer(self) -> dict[str, Any]:
        """What the engine would have answered without a stream."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        is_chat = self._head.get("object") == "chat.completion.chunk"
        kind = "chat.completion" if is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    async def finish(self) -> None:
        """The turn is kept."""
        self.has_begun = True
        await self._send(b"".join([*self._held, DONE]))


def _add(choice: dict[str, Any], part: Mapping[str, Any]) -> None:
    """One more piece of a choice."""
    for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
        if part.get(name) is not None:
            choice[name] = part[name]
    choice["token_ids"] = choice.get("token_ids", []) + list(part.get("token_ids") or ())
    log_probs = choice.setdefault("logprobs", {})
    for name, listed in (part.get("logprobs") or {}).items():
        if isinstance(listed, list):
            log_probs[name] = log_probs.get(name, []) + listed
    if "text" in part:
        choice["text"] = choice.get("text", "") + part["text"]
    if "delta" in part:
        message = choice.setdefault("message", {"role": "assistant", "content": None})
        for name, value in part["delta"].items():
            if name == "tool_calls":
                _add_calls(message.setdefault("tool_calls", []), value or ())
            elif isinstance(value, str) and name != "role":
                message[name] = (message.get(name) or "") + value


def _add_calls(calls: list[dict[str, Any]], parts: Any) -> None:
    for part in parts:
        while len(calls) <= part["index"]:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[part["index"]], part.get("function") or {}
        call |= {name: part[name] for name in ("id", "type") if part.get(name)}
        for name in ("name", "arguments"):
            call["function"][name] += function.get(name) or ""
