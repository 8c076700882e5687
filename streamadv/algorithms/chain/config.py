"""The configuration of a chain: one frozen model that travels as JSON in the batch record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator

from ...errors import SettingError
from ...messages import brief, first_problem
from .. import estimators as _registered  # noqa: F401  registers the built-in estimators
from ..kl import KLPenalty
from ..off_policy import BoundMode, RatioLevel, Rejection, RejectionKind
from ..registry import get_estimator
from ..rewards import NormScope

Positive = Annotated[float, Field(gt=0)]
PolicyLogProbs = Literal["old_log_probs", "rollout_log_probs"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OverlongConfig(_Section):
    """A growing penalty on responses that come close to the length limit (DAPO, arXiv:2503.14476, eq. 13)."""

    max_length: Annotated[int, Field(gt=0)]  # trainable tokens
    buffer: Annotated[int, Field(gt=0)]  # the penalty starts at max_length - buffer
    factor: float = 1.0  # and is factor at max_length
    capped: bool = True  # at most factor (verl and AReaL let it grow)


class RewardConfig(_Section):
    """Shaping of the trajectory rewards before anything else: sum, overlong penalty, normalise, clip."""

    components: dict[str, float] = Field(default_factory=dict)  # reward = sum of weight * named reward
    truncation: float | None = None  # of truncated ones: times this; replaced by it if negative (OpenRLHF)
    overlong: OverlongConfig | None = None
    mean: NormScope | None = None  # over which members the subtracted mean is taken
    std: NormScope | None = None  # likewise the divisor; independent of mean
    epsilon: Annotated[float, Field(ge=0)] = 1e-6
    clip: Positive | None = None  # rewards end in -clip .. clip
    statistics: Literal["trajectory", "row"] = "trajectory"  # what counts once in mean and std


class MaskConfig(_Section):
    """Whole trajectories that give no gradient; they count in the statistics all the same."""

    difficulty_low: float | None = None  # kept: mean reward of the group strictly above
    difficulty_high: float | None = None  # and strictly below
    max_length: Annotated[int, Field(gt=0)] | None = None  # dropped: so many trainable tokens or more
    wrong_max_length: Annotated[int, Field(gt=0)] | None = None  # the same where the reward is not positive
    truncated: bool = False  # dropped: status truncated, whatever its length


class SampleWeightConfig(_Section):
    """How much each trajectory counts in the loss: weights of mean 1 over the batch's trajectories."""

    difficulty: bool = False  # 0.5 + 1.5 * (1 - mean reward of the group, held in 0 .. 1)
    length: bool = False  # 1.5 - (length - least) / (greatest - least), lengths in trainable tokens


class KLConfig(_Section):
    """A penalty on the distance from the reference policy, taken off the rewards.

    With `target` the coefficient adapts: the batch record carries the one in force.
    """

    penalty: KLPenalty = "k1"
    coefficient: float = 0.001  # fixed, or the first one
    target: Positive | None = None
    horizon: Positive = 10000.0
    log_probs: PolicyLogProbs = "rollout_log_probs"


class DistillConfig(_Section):
    """On-policy distillation: advantages minus coefficient * KL(policy, teacher_log_probs)."""

    coefficient: Positive = 1.0
    penalty: KLPenalty = "k1"
    log_probs: PolicyLogProbs = "rollout_log_probs"
    only: bool = False  # nothing else: the estimator's advantages are dropped


class RejectionConfig(_Section):
    """One test that turns tokens or rows down; see `off_policy.Rejection`."""

    kind: RejectionKind
    upper: float
    lower: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.rejection()
        return self

    def rejection(self) -> Rejection:
        return Rejection(self.kind, self.upper, self.lower)


class CorrectionConfig(_Section):
    """Decoupled off-policy correction: weights pi_old / pi_rollout and rejection; see `off_policy`."""

    level: RatioLevel | None = "token"  # None: no weights
    mode: BoundMode = "truncate"
    upper: Positive = 2.0
    lower: Annotated[float, Field(ge=0)] | None = None
    batch_normalize: bool = False
    batch_normalize_rows: Literal["with_tokens", "all"] = "with_tokens"  # what levels above token divide by
    rejections: tuple[RejectionConfig, ...] = ()
    veto: Positive | None = None  # rows with a token of a lower ratio are dropped
    veto_upper: Positive | None = None  # and with one of a higher ratio (SkyRL's outlier tokens)
    m2_threshold: Positive | None = None  # tokens dropped until the mean squared log-ratio is below (M2PO)
    before_estimator: bool = False  # rejected tokens count in no statistics of the estimator (verl)


class ChainConfig(_Section):
    """rewards -> masks, sample weights -> token rewards: KL, clip, whitening -> estimator -> advantages -> correction.

    `options` are the estimator's own; they may also be given beside the other fields.
    """

    estimator: str = "grpo"
    options: dict[str, JsonValue] = Field(default_factory=dict)
    reward: RewardConfig = RewardConfig()
    masks: MaskConfig | None = None
    sample_weights: SampleWeightConfig | None = None
    token_rewards: Literal["outcome", "steps", "column"] = "outcome"  # where token-level rewards come from
    kl: KLConfig | None = None
    token_reward_clip: Positive | None = None  # token rewards, KL taken off, end in -clip .. clip
    whiten_rewards: bool = False  # token rewards to mean 0, std 1 over the batch
    distill: DistillConfig | None = None
    whiten_advantages: bool = False
    advantage_clip: Positive | None = None
    raw_advantages: bool = False  # also give the advantages before distillation, whitening and clipping
    correction: CorrectionConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        known = get_estimator(str(data.get("estimator", "grpo"))).options
        given = data.get("options") or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"options is {brief(given)}, needs an object")
        options = dict(given)
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
    def _check_options(self) -> Self:
        chosen = get_estimator(self.estimator)
        for name, value in self.options.items():
            if name not in chosen.options:
                offered = ", ".join(chosen.options) or "no options"
                raise ValueError(f"options.{name} is unknown to {self.estimator}, which takes {offered}")
            try:
                TypeAdapter(chosen.types[name]).validate_python(value, strict=True)
            except ValidationError as error:
                raise ValueError(f"options.{name}: {first_problem(error)}") from error
        return self

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        by_token = "token_level_rewards" in get_estimator(self.estimator).needs
        for name in ("token_reward_clip", "whiten_rewards"):
            if getattr(self, name) and not by_token:
                raise ValueError(f"{name} does nothing: {self.estimator} reads no token rewards")
        if self.token_rewards != "outcome" and not by_token:
            raise ValueError(
                f"token_rewards {self.token_rewards!r} does nothing: {self.estimator} reads no token rewards"
            )
        if self.raw_advantages and not (self.whiten_advantages or self.advantage_clip or self.distill):
            raise ValueError(
                "raw_advantages does nothing without distill, whiten_advantages or advantage_clip"
            )
        correction = self.correction
        if correction and not (
            correction.level
            or correction.rejections
            or correction.veto
            or correction.veto_upper
            or correction.m2_threshold
        ):
            raise ValueError("correction does nothing: give it a level, rejections, veto or m2_threshold")
        if correction and correction.veto and (correction.veto_upper or math.inf) <= correction.veto:
            raise ValueError(
                f"correction.veto {correction.veto} and veto_upper {correction.veto_upper} drop everything"
            )
        if correction and correction.batch_normalize and correction.level is None:
            raise ValueError("correction.batch_normalize does nothing without correction.level")
        if correction and correction.batch_normalize_rows == "all" and not correction.batch_normalize:
            raise ValueError(
                "correction.batch_normalize_rows does nothing without correction.batch_normalize"
            )
        masks = self.masks
        if masks and not masks.model_dump(exclude_defaults=True):
            raise ValueError("masks does nothing: give it a bound, or truncated")
        weights = self.sample_weights
        if weights and not (weights.difficulty or weights.length):
            raise ValueError("sample_weights does nothing: give it difficulty or length")
        return self


def parse_config(data: Any) -> ChainConfig:
    """`data` (a mapping or a ChainConfig) as a ChainConfig; SettingError with one line if it is wrong."""
    if isinstance(data, ChainConfig):
        return data
    try:
        return ChainConfig.model_validate(data)
    except ValueError as error:  # pydantic's, or a lone surrogate in a key
        raise SettingError(f"chain: {first_problem(error)}") from error
