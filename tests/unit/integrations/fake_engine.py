"""An inference engine of a few lines: an HTTP server with the request and answer shapes of vLLM and SGLang."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

END = 256
ROLES = {"system": 257, "user": 258, "assistant": 259, "tool": 260}
#: What it answers to a prompt, as text.
Policy = Callable[[Sequence[int]], str]


class FakeEngine:
    """Tokens are UTF-8 bytes and boundaries of turns. The n-th sampled token of an answer has log-prob -(n + 1) / 8."""

    def __init__(self, policy: Policy, dialect: str = "vllm", thinks: bool = False) -> None:
        self.policy, self.dialect = policy, dialect
        self.thinks = thinks  # its template leaves `<...>` out of earlier turns
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.refusals: list[int] = []  # status codes of the next answers
        self.weight_version = "default"
        self.url = ""

    def template(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        ids = [ROLES["system"], *json.dumps(tools).encode(), END] if tools else []
        for message in messages:
            text = message.get("content") or ""
            if self.thinks and message["role"] == "assistant":
                text = text.partition(">")[2]
            calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
            ids += [ROLES[message["role"]], *(text + "".join(f"!{call}" for call in calls)).encode(), END]
        return [*ids, ROLES["assistant"]]

    def sample(self, prompt: Sequence[int], limit: int | None) -> tuple[str, list[int], list[float], str]:
        text = self.policy(prompt)
        ids = [*text.encode(), END]
        reason = "stop"
        if limit is not None and len(ids) > limit:
            ids, reason = ids[:limit], "length"
        return text, ids, [-(number + 1) / 8 for number in range(len(ids))], reason

    def info(self, path: str) -> dict[str, Any]:
        """What it answers to a GET."""
        return {"data": [{"id": "tiny"}]}

    def chunks(self, path: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]] | None:
        """A streamed answer; None from an engine that does not stream."""
        return None

    def answer(self, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        if path == "/generate":
            parameters = asked["sampling_params"]
            text, ids, logs, reason = self.sample(asked["input_ids"], parameters.get("max_new_tokens"))
            return {"text": text, "output_ids": ids, "meta_info": self.meta(ids, logs, reason)}
        if path == "/v1/completions":
            text, ids, logs, reason = self.sample(asked["prompt"], asked.get("max_tokens"))
            choice = {
                "index": 0,
                "text": text,
                "finish_reason": reason,
                "logprobs": {"token_logprobs": logs, "tokens": [str(token) for token in ids]},
            }
            if asked.get("return_token_ids"):
                choice |= {"token_ids": ids, "prompt_token_ids": asked["prompt"]}
            return {"object": "text_completion", "choices": [choice]}
        prompt = self.template(asked["messages"], asked.get("tools", ()))
        text, ids, logs, reason = self.sample(prompt, asked.get("max_tokens"))
        content, _, call = text.partition("!")
        message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": None}
        if call:
            function = {"name": call, "arguments": "{}"}
            message["tool_calls"] = [{"id": "call-1", "type": "function", "function": function}]
        listed = [{"token": chr(65), "logprob": value, "top_logprobs": []} for value in logs]
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": {"content": listed}}
        found = {"object": "chat.completion", "choices": [choice]}
        if self.dialect == "vllm" and asked.get("return_token_ids"):
            choice["token_ids"] = ids
            found["prompt_token_ids"] = prompt
        if self.dialect == "sglang" and asked.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        if self.dialect == "sglang-0.5.10" and asked.get("return_meta_info"):
            choice |= {"meta_info": self.meta(ids, logs, reason), "prompt_token_ids": prompt}
        return found

    def meta(self, ids: Sequence[int], logs: Sequence[float], reason: str) -> dict[str, Any]:
        sampled = [[value, token, None] for value, token in zip(logs, ids, strict=True)]
        return {
            "finish_reason": {"type": reason},
            "weight_version": self.weight_version,
            "completion_tokens": len(ids),
            "output_token_logprobs": sampled,
        }


@contextmanager
def serving(engine: FakeEngine) -> Iterator[FakeEngine]:
    """The engine on a free port of this machine: `engine.url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(200, engine.info(self.path))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            engine.requests.append((self.path, asked))
            if engine.refusals:
                self.reply(engine.refusals.pop(0), {"error": {"message": "not now"}})
            elif asked.get("stream") and (chunks := engine.chunks(self.path, asked)) is not None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                for chunk in chunks:
                    self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")
            else:
                self.reply(200, engine.answer(self.path, asked))

        def reply(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        engine.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()
