"""Token in, token out: what was sampled before stays as it is, and only what is new comes from the engine's template.

The engine renders messages to tokens, samples after tokens, and reads what it has sampled back into a message (vLLM
0.32 with --enable-scale-out). So neither template, parser nor client can break a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..integrations.engines import Completion
from .engines import Engines
from .joining import text_of
from .options import Options
from .refusals import RefusedError
from .sessions import Session

_RENDER: Final = "/v1/chat/completions/render"
_DERENDER: Final = "/v1/chat/completions/derender"
_GENERATE: Final = "/inference/v1/generate"
#: Tokens of the prompt's end that parsers look at.
_TAIL: Final = 16
_ENDED: Final = ("stop", "tool_calls")


class Sampled(NamedTuple):
    """What an engine has answered, and the tokens of each choice."""

    answer: Mapping[str, Any]
    choices: Sequence[Completion]


class TokenMode:
    """Makes turns token by token."""

    def __init__(self, engines: Engines, options: Options) -> None:
        self._engines, self._options = engines, options

    async def sample(self, session: Session, request: dict[str, Any], at: Sequence[str]) -> Sampled:
        """at: digests of the request's conversation, see `joining.chains`. Raises RefusedError, SettingError."""
        asked, _ = await self._engines.ask(session, _RENDER, request)
        asked["token_ids"] = prompt = await self._continued(session, request, at, asked["token_ids"])
        asked["sampling_params"]["logprobs"] = 0
        made, version = await self._engines.ask(session, _GENERATE, {**asked, "stream": False})
        spoken = {**made, "choices": [_without_end(choice) for choice in made["choices"]]}
        read = {
            "generate_response": spoken, "prompt_tokens": len(prompt), "prompt_token_ids": prompt[-_TAIL:],
            "chat_request": {**request, "stream": False}, "model": request["model"],
        }  # fmt: skip
        answer, _ = await self._engines.ask(session, _DERENDER, read)
        for said, choice in zip(answer["choices"], made["choices"], strict=True):
            if _ends(choice) and len(choice["token_ids"]) == 1:
                said["message"] = {"role": "assistant", "content": ""}
        choices = [_completion(prompt, choice, version) for choice in made["choices"]]
        return Sampled(answer, choices)

    async def _continued(
        self, session: Session, request: Mapping[str, Any], at: Sequence[str], prompt: list[int]
    ) -> list[int]:
        """The tokens of the deepest turn that the conversation goes on from, then what the template has after it."""
        known = [number for number in range(len(at) - 1, 0, -1) if at[number] in session.ends]
        if not known or self._options.rerender:
            return prompt
        end = session.ends[at[known[0]]]
        before = session.episode.rows[end.row][: end.tokens]
        if prompt[: len(before)] == before:
            return prompt
        rest = await self._rest(session, request, known[0], prompt)
        if not rest:
            return prompt
        has_stopped = before[-1] == rest[0]
        if not has_stopped and end.finish_reason in _ENDED and not request.get("stop"):
            return prompt  # the engine and its template end an answer by different tokens
        return before + rest[has_stopped:]

    async def _rest(
        self, session: Session, request: Mapping[str, Any], number: int, prompt: list[int]
    ) -> list[int] | None:
        """The prompt's tokens after the answer that the first so many messages end with, from its stop token on.

        They are what stays when another answer stands in its place.
        """
        messages = list(request["messages"])
        ending = str(text_of(messages[number - 1].get("content"))).rstrip()[-1:]
        messages[number - 1] = {"role": "assistant", "content": "B" if ending in "aA" else "A"}
        try:
            answer, _ = await self._engines.ask(session, _RENDER, {**request, "messages": messages})
        except RefusedError as error:
            if error.code == "engine":  # a template may want the calls that tools answer
                return None
            raise
        return _common_end(prompt, answer["token_ids"])


def _without_end(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """A choice without the token that ended it, which an engine with a parser would write into the message."""
    ids, log_probs = choice["token_ids"], choice.get("logprobs") or {}
    if not _ends(choice) or len(ids) < 2:
        return choice
    listed = {**log_probs, "content": (log_probs.get("content") or [])[:-1]}
    return {**choice, "token_ids": ids[:-1], "logprobs": listed}


def _ends(choice: Mapping[str, Any]) -> bool:
    """Whether a token has ended the answer, in place of its length or a text."""
    return choice.get("finish_reason") in _ENDED and not isinstance(choice.get("stop_reason"), str)


def _common_end(first: list[int], second: list[int]) -> list[int]:
    """The tokens that both end with; none if one is the end of the other, which says nothing."""
    for at in range(1, min(len(first), len(second)) + 1):
        if first[-at] != second[-at]:
            return first[len(first) - at + 1 :]
    return []


def _completion(prompt: Sequence[int], choice: Mapping[str, Any], version: int | None) -> Completion:
    ids = choice["token_ids"]
    listed = (choice.get("logprobs") or {}).get("content")
    versions = _versions(choice.get("weight_versions"), len(ids))
    oldest = version if versions is None else min(versions, default=version)
    log_probs = None if listed is None else [token["logprob"] for token in listed]
    return Completion(prompt, ids, log_probs, choice.get("finish_reason"), oldest, versions=versions)


def _versions(spans: Any, tokens: int) -> list[int] | None:
    """The version of each token, from the engine's spans; None unless they name a number for every one."""
    found: list[int] = []
    for span in spans or ():
        version = str(span.get("version", span.get("weight_version")))
        if not version.isdecimal() or span["start"] != len(found):
            return None
        found += [int(version)] * (span["end"] - span["start"])
    return found if len(found) == tokens and tokens else None
