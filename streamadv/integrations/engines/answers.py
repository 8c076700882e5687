"""What engines return, read as completions: their own token ids and log-probs, never text tokenised again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from ...errors import SettingError
from .completion import Completion

#: How vLLM writes a token if asked by `return_tokens_as_token_ids`.
_TOKEN_ID: Final = "token_id:"


def from_openai(answer: Any, *, version: int | None = None, choice: int = 0) -> Completion:
    """An answer of `/v1/chat/completions` or `/v1/completions`: parsed JSON, or the `openai` package's object.

    vLLM >= 0.10.2 and SGLang >= 0.5.18 return token ids if the request has `return_token_ids`, older ones of SGLang
    with `return_meta_info` and `return_prompt_token_ids`. Log-probs need `logprobs`: true for chats, 0 for completions.

    Raises SettingError if the answer has no token ids.
    """
    answer = _mapping(answer)
    found = _mapping(answer["choices"][choice])
    meta = found.get("meta_info") or {}
    listed = found.get("logprobs") or {}
    sampled = meta.get("output_token_logprobs")
    log_probs: list[float] | None = None
    if listed.get("content") is not None:  # of a chat
        log_probs = [token["logprob"] for token in listed["content"]]
    elif listed.get("token_logprobs") is not None:
        log_probs = listed["token_logprobs"]
    if sampled is not None:
        log_probs = [token[0] for token in sampled]
    prompt_ids = _first(found.get("prompt_token_ids"), answer.get("prompt_token_ids"))
    token_ids = _first(found.get("token_ids"), found.get("response_token_ids"))
    if token_ids is None and sampled is not None:
        token_ids = [token[1] for token in sampled]
    if token_ids is None:
        token_ids = _ids_of_names(listed)
    if prompt_ids is None or token_ids is None:
        _no_token_ids("prompt_token_ids" if prompt_ids is None else "token_ids")
    message = found.get("message") or {}
    return Completion(
        prompt_ids,
        token_ids,
        log_probs,
        found.get("finish_reason"),
        _version(meta, version),
        found.get("text") or message.get("content") or "",
        {name: value for name, value in message.items() if value is not None},
    )


def from_sglang(
    answer: Mapping[str, Any], prompt_ids: Sequence[int], *, version: int | None = None
) -> Completion:
    """An answer of SGLang's `/generate`, or of its offline engine, asked with `return_logprob`.

    prompt_ids: the `input_ids` of the request. The answer's `weight_version`, if it is a number, goes before `version`.
    Raises SettingError if the answer has no log-probs.
    """
    meta = answer["meta_info"]
    sampled = meta.get("output_token_logprobs")
    if sampled is None:
        _no_token_ids("output_token_logprobs")
    return Completion(
        prompt_ids,
        [token[1] for token in sampled],
        [token[0] for token in sampled],
        (meta.get("finish_reason") or {}).get("type"),
        _version(meta, version),
        answer.get("text") or "",
    )


def from_vllm(output: Any, *, version: int | None = None, choice: int = 0) -> Completion:
    """A `RequestOutput` of vLLM's offline engine, asked with `SamplingParams(logprobs=0)`."""
    found = output.outputs[choice]
    log_probs = None
    if found.logprobs is not None:
        pairs = zip(found.token_ids, found.logprobs, strict=True)
        log_probs = [candidates[token].logprob for token, candidates in pairs]
    prompt_ids, token_ids = list(output.prompt_token_ids), list(found.token_ids)
    return Completion(prompt_ids, token_ids, log_probs, found.finish_reason, version, found.text)


def _ids_of_names(listed: Mapping[str, Any]) -> list[int] | None:
    """Token ids that the engine has written as the names of tokens."""
    if (names := listed.get("tokens")) is None:
        names = [token["token"] for token in listed.get("content") or ()]
    if not names or not all(str(name).startswith(_TOKEN_ID) for name in names):
        return None
    return [int(name.removeprefix(_TOKEN_ID)) for name in names]


def _mapping(value: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = value.model_dump() if hasattr(value, "model_dump") else value
    return found


def _first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def _version(meta: Mapping[str, Any], version: int | None) -> int | None:
    """SGLang's weight_version if it is a number; else what the caller knows."""
    reported = str(meta.get("weight_version", ""))
    return int(reported) if reported.isdecimal() else version


def _no_token_ids(field: str) -> NoReturn:
    raise SettingError(
        f"the engine's answer has no {field}, and text tokenised again is not what was sampled: ask with "
        f"return_token_ids (vLLM >= 0.10.2, SGLang >= 0.5.18; older SGLang: return_meta_info and "
        f"return_prompt_token_ids), or SGLang's /generate with return_logprob"
    )
