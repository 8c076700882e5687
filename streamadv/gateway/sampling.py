"""What of a request an agent may choose. How the policy is sampled belongs to the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..messages import brief
from .options import NEUTRAL, Options
from .refusals import RefusedError

#: Fields that an agent may choose; what else it sends says something to nobody behind the gateway.
_PASSED: Final = frozenset((
    "messages", "prompt", "suffix", "n", "max_tokens", "max_completion_tokens", "stop", "seed", "logprobs",
    "top_logprobs", "response_format", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls",
    "reasoning_effort", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
    "skip_special_tokens", "spaces_between_special_tokens",
))  # fmt: skip


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
