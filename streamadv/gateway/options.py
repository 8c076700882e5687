"""How a gateway is set up, and what of a request an agent may choose: how the policy is sampled belongs to the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import SettingError
from ..messages import brief
from .refusals import RefusedError

#: Parameters of sampling that belong to the run, with the values that change nothing.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "best_of": (None, 1),
    "ignore_eos": (None, False),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "stop_token_ids": (None, []),
    "length_penalty": (None, 1, 1.0),
}
#: Fields that an agent may choose; what else it sends says something to nobody behind the gateway.
_PASSED: Final = frozenset((
    "messages", "prompt", "suffix", "n", "max_tokens", "max_completion_tokens", "stop", "seed", "logprobs",
    "top_logprobs", "response_format", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls",
    "reasoning_effort", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "skip_special_tokens", "spaces_between_special_tokens",
))  # fmt: skip
MODES: Final = ("auto", "tokens", "chat")


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one gateway process; `cli/gateway.py` explains each."""

    engines: tuple[str, ...]
    model: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    allow_sampling: bool = False
    allow_history: bool = False
    rerender: bool = False
    load_weights: bool = False
    live_streams: bool = False
    mode: str = "auto"
    idle_s: float = 600.0
    answer_s: float = 1800.0
    grace_s: float = 30.0
    max_open: int = 4096
    max_turns: int = 32
    max_body: int = 64 << 20
    public_url: str | None = None

    def __post_init__(self) -> None:
        if not self.engines:
            raise SettingError(
                "--engine is missing: give the URL of an engine, such as http://localhost:8000"
            )
        for url in self.engines:
            if not url.startswith(("http://", "https://")):
                raise SettingError(f"--engine is {brief(url)}, needs http:// or https://")
        if self.mode not in MODES:
            raise SettingError(f"--mode is {brief(self.mode)}, needs one of {', '.join(MODES)}")
        if not isinstance(self.sampling, Mapping):
            raise SettingError(f"--sampling is {brief(self.sampling)}, needs an object in JSON")


def of_the_run(asked: Mapping[str, Any], options: Options, model: str) -> dict[str, Any]:
    """The request as the run samples: with its model and its parameters. Raises RefusedError."""
    fixed = {name: asked[name] for name in NEUTRAL if name in asked and asked[name] not in NEUTRAL[name]}
    fixed = {name: value for name, value in fixed.items() if options.sampling.get(name) != value}
    if fixed and not options.allow_sampling:
        name, value = next(iter(fixed.items()))
        raise RefusedError(
            400,
            "sampling_fixed",
            f"{name} is {brief(value)}: how the policy is sampled belongs to the run; leave it out, or give the "
            f"gateway --sampling with it, or --allow-sampling",
        )
    body = {name: value for name, value in asked.items() if name in _PASSED}
    if options.allow_sampling:
        body |= {"temperature": asked["temperature"]} if asked.get("temperature") is not None else {}
        body |= fixed
        return {**options.sampling, **body, "model": model}
    return {**body, **options.sampling, "model": model}
