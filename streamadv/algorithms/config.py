"""The configuration of a chain: one frozen model that travels as JSON in the batch record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator

from ..errors import SettingError
from ..schema import first_problem
from . import estimators as _registered  # noqa: F401  registers the built-in estimators
from .kl import KLPenalty
from .registry import get_estimator

Positive = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RewardConfig(_Section):
    """Shaping of the trajectory rewards before anything else: (r - mean) / (std + epsilon), then clip."""

    mean: Literal["batch", "group"] | None = None  # over which members the subtracted mean is taken
    std: Literal["batch", "group"] | None = None  # likewise the divisor; independent of mean
    epsilon: Annotated[float, Field(ge=0)] = 1e-6
    clip: Positive | None = None  # rewards end in -clip .. clip
    statistics: Literal["trajectory", "row"] = "trajectory"  # what counts once in mean and std


class KLConfig(_Section):
    """A penalty on the distance from the reference policy, taken off the token rewards."""

    penalty: KLPenalty = "k1"
    coefficient: float = 0.001
    log_probs: Literal["old_log_probs", "rollout_log_probs"] = "rollout_log_probs"


class ChainConfig(_Section):
    """rewards -> KL -> estimator -> whitening, clipping. Presets are instances of it (`presets.py`).

    `options` are the estimator's own; they may also be given beside the other fields.
    """

    estimator: str = "grpo"
    options: dict[str, JsonValue] = Field(default_factory=dict)
    reward: RewardConfig = RewardConfig()
    token_rewards: Literal["outcome", "steps", "column"] = "outcome"  # where token-level rewards come from
    kl: KLConfig | None = None
    whiten_rewards: bool = False  # token rewards to mean 0, std 1 over the batch
    whiten_advantages: bool = False
    advantage_clip: Positive | None = None
    raw_advantages: bool = False  # also give the advantages before whitening and clipping

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        known = get_estimator(str(data.get("estimator", "grpo"))).options
        options = dict(data.get("options") or {})
        rest = {}
        for name, value in data.items():
            if name in known and name not in cls.model_fields:
                if name in options:
                    raise ValueError(f"{name} is given twice, beside options and in it: keep one")
                options[name] = value
            else:
                rest[name] = value
        return {**rest, "options": options}

    @model_validator(mode="after")
    def _check(self) -> Self:
        chosen = get_estimator(self.estimator)
        for name, value in self.options.items():
            if name not in chosen.options:
                offered = ", ".join(chosen.options) or "no options"
                raise ValueError(f"options.{name} is unknown to {self.estimator}, which takes {offered}")
            try:
                TypeAdapter(chosen.types[name]).validate_python(value, strict=True)
            except ValidationError as error:
                raise ValueError(f"options.{name}: {first_problem(error)}") from error
        if self.whiten_rewards and "token_level_rewards" not in chosen.needs:
            raise ValueError(f"whiten_rewards does nothing: {self.estimator} reads no token rewards")
        if self.token_rewards != "outcome" and "token_level_rewards" not in chosen.needs:
            raise ValueError(
                f"token_rewards {self.token_rewards!r} does nothing: {self.estimator} reads no token rewards"
            )
        if self.raw_advantages and not (self.whiten_advantages or self.advantage_clip):
            raise ValueError("raw_advantages does nothing without whiten_advantages or advantage_clip")
        return self


def parse_config(data: Any) -> ChainConfig:
    """`data` (a mapping or a ChainConfig) as a ChainConfig; SettingError with one line if it is wrong."""
    if isinstance(data, ChainConfig):
        return data
    try:
        return ChainConfig.model_validate(data)
    except ValidationError as error:
        raise SettingError(f"chain: {first_problem(error)}") from error
