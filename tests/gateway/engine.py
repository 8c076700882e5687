"""An engine with token in, token out, that writes down all it says."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from typing import Any

from tests.unit.integrations.fake_engine import END, ROLES, FakeEngine


def caller(*answers: str) -> FakeEngine:
    """One whose n-th answer to a conversation is the n-th of these: `<thought>text!tool {"at": 1}` calls one."""
    return Engine(lambda prompt: answers[min(prompt.count(ROLES["tool"]), len(answers) - 1)])


def message_of(text: str) -> dict[str, Any]:
    """A message as the engine's parsers read it."""
    thought, _, said = text.rpartition(">")
    content, _, call = said.partition("!")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content,
        "reasoning": thought.strip("<") or None,
    }
    if call:
        name, _, arguments = call.partition(" ")
        function = {"name": name, "arguments": arguments or "{}"}
        number = zlib.crc32(text.encode())  # an id for each call
        message["tool_calls"] = [{"id": f"call-{number}", "type": "function", "function": function}]
    return message


def talkative(seed: int = 0) -> FakeEngine:
    """One whose answers differ from each other, also for the same prompt."""
    draw = random.Random(seed)
    return Engine(lambda prompt: f"answer {draw.randrange(1000)} to {len(prompt)} tokens")


class Engine(FakeEngine):
    """`said`: prompt, ids, log-probs of each choice that it has sampled."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.said: list[tuple[list[int], list[int], list[float]]] = []
        self.drifts = False  # its template writes answers otherwise than they were sampled
        self.versions: list[tuple[int, float]] = []  # version, share of an answer that it samples
        self.hides = 0  # ids that its parser swallows
        self.dies = 0  # answers that it breaks off

    def sample(self, prompt: Sequence[int], limit: int | None) -> tuple[str, list[int], list[float], str]:
        found = super().sample(prompt, limit)
        if self.dies:
            self.dies -= 1
            raise ConnectionResetError("the engine dies")
        self.said.append((list(prompt), found[1], found[2]))
        return found

    def template(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        written = []
        for message in messages:
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
                message = {**message, "content": content}
            if self.drifts and message["role"] == "assistant":
                message = {**message, "content": content.upper()}
            if self.thinks and message["role"] == "assistant" and ">" not in content:
                empty = "<>" if message is messages[-1] else ""  # as Qwen3's
                message = {**message, "content": f">{empty}{content}"}
            written.append({name: value for name, value in message.items() if value is not None})
        return super().template(written, tools)

    def answer(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/chat/completions/render":
            prompt = self.template(asked["messages"], asked.get("tools", ()))
            if not asked.get("add_generation_prompt", True):
                prompt = prompt[:-1]
            return {
                "token_ids": prompt,
                "sampling_params": {name: asked.get(name) for name in ("max_tokens", "stop", "n")},
                "model": "tiny",
            }
        if path == "/inference/v1/generate":
            parameters = asked["sampling_params"]
            choices = []
            for number in range(parameters.get("n") or 1):
                _, ids, logs, reason = self.sample(asked["token_ids"], parameters.get("max_tokens"))
                for stop in parameters.get("stop") or ():
                    length = bytes(token % 256 for token in ids).find(stop.encode()) + len(stop)
                    if length >= len(stop):
                        ids, logs = ids[:length], logs[:length]
                        self.said[-1] = (self.said[-1][0], ids, logs)
                choices.append({**self.generated(ids, logs, reason), "index": number})
            return {"choices": choices}
        if path == "/v1/chat/completions/derender":
            return self.derendered(asked)
        made = [super(Engine, self).answer(path, asked) for _ in range(asked.get("n") or 1)]
        for one, (_, ids, _) in zip(made, self.said[-len(made) :], strict=True):
            if "message" in one["choices"][0]:
                one["choices"][0]["message"] = message_of(
                    bytes(token for token in ids if token < END).decode()
                )
        choices = [{**one["choices"][0], "index": at} for at, one in enumerate(made)]
        sampled = sum(len(choice["token_ids"]) for choice in choices)
        for choice in choices:
            choice["token_ids"] = choice["token_ids"][: len(choice["token_ids"]) - self.hides]
        head = {"id": f"chatcmpl-{len(self.said)}", "created": 1, "model": "tiny"}
        usage = {"prompt_tokens": len(self.said[-1][0]), "completion_tokens": sampled}
        usage["total_tokens"] = sum(usage.values())
        return {**head, **made[0], "choices": choices, "usage": usage}

    def generated(self, ids: list[int], logs: list[float], reason: str) -> dict[str, Any]:
        listed = {
            "content": [{"token": str(token), "logprob": log} for token, log in zip(ids, logs, strict=True)]
        }
        spans, at = [], 0
        for version, share in self.versions:
            end = len(ids) if (version, share) == self.versions[-1] else round(at + share * len(ids))
            spans.append({"version": version, "start": at, "end": end})
            at = end
        return {
            "index": 0,
            "token_ids": ids,
            "logprobs": listed,
            "finish_reason": reason,
            "weight_versions": spans,
        }

    def derendered(self, asked: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for choice in asked["generate_response"]["choices"]:
            text = bytes(token for token in choice["token_ids"] if token < END).decode()
            text += "<|end|>" * choice["token_ids"].count(END)  # as vLLM does that has a parser
            for stop in asked["chat_request"].get("stop") or ():
                text = text.removesuffix(stop)
            message = message_of(text)
            choices.append(
                {"index": choice["index"], "message": message, "finish_reason": choice["finish_reason"]}
            )
        usage = {"prompt_tokens": asked["prompt_tokens"], "completion_tokens": 1, "total_tokens": 1}
        head = {
            "id": f"chatcmpl-{len(self.said)}",
            "object": "chat.completion",
            "created": 1,
            "model": "tiny",
        }
        return json.loads(json.dumps({**head, "choices": choices, "usage": usage}))
