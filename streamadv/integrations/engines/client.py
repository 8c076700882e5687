"""A client of inference engines that keeps their own token ids and log-probs. Needs aiohttp, the extra `engines`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Self

from ...errors import SettingError
from ...extras import require
from ...messages import brief, one_line, whole_number
from .answers import from_openai, from_sglang
from .completion import Completion

require("EngineClient", "aiohttp")
import aiohttp  # noqa: E402  after the check, which names the extra

#: Answers after which the same request may succeed: the engine loads weights, restarts or is full.
AGAIN: Final = frozenset((408, 425, 429, 500, 502, 503, 504))
#: Seconds before the second try; doubled before each further one.
_PAUSE_S: Final = 0.5
_KINDS: Final = ("vllm", "sglang")


class EngineError(Exception):
    """An engine did not answer, or refused a request: the rollout fails, and `group.run` goes on with the others.

    Not an error of streamadv, which `group.run` would raise.
    """


class EngineClient:
    """Asks one engine, or a router before several, over its OpenAI-compatible API.

    `async with EngineClient("http://localhost:8000") as engine:`. Any number of tasks of one event loop may use it.

    Args:
        url: of the server, without `/v1`.
        kind: vllm (0.10.2 or newer), or sglang.
        model: name of the model; by default the first one the server lists.
        api_key: sent as a bearer token.
        timeout_s: seconds for an answer.
        tries: of a request that fails because the engine is away or busy, with doubling pauses from half a second.
        sampling: default parameters of all requests, such as `temperature=1.0`.

    vLLM reports log-probs before temperature and top_p unless it is started with
    `--logprobs-mode processed_logprobs`; correction for stale policies needs those of what was sampled from.
    """

    def __init__(
        self,
        url: str,
        *,
        kind: Literal["vllm", "sglang"] = "vllm",
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        tries: int = 4,
        **sampling: Any,
    ) -> None:
        if kind not in _KINDS:
            raise SettingError(f"kind is {brief(kind)}, needs one of {', '.join(_KINDS)}")
        self.version: int | None = None
        """Version of the engine's weights: set it when they are loaded. A completion has the one it began with."""
        self._url, self._kind, self._model = url.rstrip("/").removesuffix("/v1"), kind, model
        self._tries, self._sampling = whole_number("tries", tries, 1), sampling
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._http: aiohttp.ClientSession | None = None  # belongs to the event loop of the first request

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **sampling: Any,
    ) -> Completion:
        """Ask with messages; the engine makes the prompt's tokens by its chat template.

        Put `completion.message` back into the messages, and what each of its `tool_calls` has returned as
        `{"role": "tool", "tool_call_id": call["id"], "content": text}`.

        Args:
            messages: OpenAI's form.
            tools: their JSON schemas, OpenAI's form; the engine has to be started with a parser of tool calls.
            sampling: max_tokens, temperature, top_p, stop, seed ... of the engine.

        Raises EngineError; SettingError for an engine that returns no token ids.
        """
        asked: dict[str, Any] = {"messages": list(messages), "logprobs": True, "return_token_ids": True}
        if tools:
            asked["tools"] = list(tools)
        if self._kind == "sglang":
            asked |= {"return_meta_info": True, "return_prompt_token_ids": True}
        return await self._ask("/v1/chat/completions", asked, sampling)

    async def complete(self, prompt_ids: Sequence[int], **sampling: Any) -> Completion:
        """Ask with token ids, so that the prompt is what was sampled before, token by token. See `Episode.tokens`.

        sampling, errors: as of `chat`.
        """
        prompt = [int(token) for token in prompt_ids]
        if self._kind == "vllm":
            asked = {"prompt": prompt, "logprobs": 0, "return_token_ids": True}
            return await self._ask("/v1/completions", asked, sampling)
        parameters = {**self._sampling, **sampling}
        if "max_tokens" in parameters:
            parameters["max_new_tokens"] = parameters.pop("max_tokens")
        version = self.version
        asked = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}
        return from_sglang(await self._request("POST", "/generate", asked), prompt, version=version)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, path: str, asked: Mapping[str, Any], sampling: Mapping[str, Any]) -> Completion:
        version = self.version
        if self._model is None:
            listed = await self._request("GET", "/v1/models")
            self._model = str(listed["data"][0]["id"])
        request = {"model": self._model, **self._sampling, **sampling, **asked}
        return from_openai(await self._request("POST", path, request), version=version)

    async def _request(
        self, method: str, path: str, asked: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The answer as JSON, after `tries` at most."""
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(
                connector=connector, headers=self._headers, timeout=self._timeout
            )
        for left in reversed(range(self._tries)):
            try:
                async with self._http.request(method, self._url + path, json=asked) as answer:
                    data = await answer.read()
                if answer.ok:
                    found: dict[str, Any] = json.loads(data)
                    return found
                problem = f"{answer.status} {one_line(data.decode(errors='replace'))}"
                may_pass = answer.status in AGAIN
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                problem, may_pass = f"{type(error).__name__} {one_line(str(error))}".rstrip(), True
            if not (left and may_pass):
                break
            await asyncio.sleep(_PAUSE_S * 2 ** (self._tries - 1 - left))
        raise EngineError(f"engine {self._url}{path}: {problem}")
