"""What of a request an agent may choose. How the policy is sampled belongs to the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..messages import brief
from .options import NEUTRAL, Options
from .refusals import RefusedError

#: Fields that the gateway sets itself, or that say something to nobody behind it.
_OWN: Final = (
    "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids", "include_reasoning", "store",
    "metadata", "service_tier", "user", "safety_identifier", "prompt_cache_key", "prompt_logprobs", "temperature",
)  # fmt: skip


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
    body = {name: value for name, value in asked.items() if name not in _OWN and name not in NEUTRAL}
    if options.allow_sampling:
        body |= {"temperature": asked["temperature"]} if asked.get("temperature") is not None else {}
        body |= fixed
        return {**options.sampling, **body, "model": model}
    return {**body, **options.sampling, "model": model}
