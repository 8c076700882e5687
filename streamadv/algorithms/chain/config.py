"""The configuration of a chain: one frozen model that travels as JSON in the batch record."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError, model_validator

from ...errors import SettingError
from ...messages import brief, did_you_mean, first_problem, unknown_field
from .. import estimators as _registered  # noqa: F401  registers the built-in estimators
from ..kl import KLPenalty
from ..off_policy import BoundMode, RatioLevel, Rejection, RejectionKind
from ..packed import Level
from ..registry import MOST_NAMED, NotNegative, Positive, estimator_names, get_estimator
from ..segments import NormScope

PolicyLogProbs = Literal["old_log_probs", "rollout_log_probs"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # JSON has neither

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (problem := unknown_field(data, cls.model_fields)):
            raise ValueError(problem)
        return data


class OverlongConfig(_Section):
    """A growing penalty on responses that come close to the length limit (DAPO, arXiv:2503.14476, eq. 13)."""

    max_length: Annotated[int, Field(gt=0)]  # trainable tokens
    buffer: Annotated[int, Field(gt=0)]  # the penalty starts at max_length - buffer
    factor: Positive = 1.0  # and is factor at max_length
    capped: bool = True  # at most factor (verl and AReaL let it grow)


class RewardConfig(_Section):
    """Shaping of the trajectories' rewards, the first step: sum, truncation and overlong penalties, normalise, clip."""

    components: dict[str, float] = Field(default_factory=dict)  # reward = sum of weight * named reward
    #: rewards of truncated ones: times this; replaced by it if negative (OpenRLHF)
    truncation: float | None = None
    overlong: OverlongConfig | None = None
    mean: NormScope | None = None  # over what the subtracted mean is taken; None = not subtracted
    std: NormScope | None = None  # the same for the divisor
    epsilon: NotNegative = 1e-6
    clip: Positive | tuple[float, float] | None = None  # holds rewards in -clip .. clip, or in these bounds
    statistics: Literal["trajectory", "row"] = "trajectory"  # what counts once in mean and std


class MaskConfig(_Section):
    """Which whole trajectories give no gradient; they still count in the statistics."""

    difficulty_low: float | None = None  # stays: mean reward of the group strictly above
    difficulty_high: float | None = None  # stays: and strictly below
    max_length: Annotated[int, Field(gt=0)] | None = None  # masked: so many trainable tokens or more
    #: masked: so many where the reward is not positive
    wrong_max_length: Annotated[int, Field(gt=0)] | None = None
    truncated: bool = False  # masked: status truncated


class SampleWeightConfig(_Section):
    """How much a trajectory counts in the loss: weights of mean 1 over the batch's trajectories."""

    difficulty: bool = False  # 0.5 + 1.5 * (1 - mean reward of the group, held in 0 .. 1)
    length: bool = False  # 1.5 - (length - least) / (greatest - least), lengths in trainable tokens


class KLConfig(_Section):
    """A penalty on the distance from the reference policy, subtracted from the rewards.

    With `target` the coefficient adapts from batch to batch, and the batch record carries it.
    """

    penalty: KLPenalty = "k1"
    coefficient: NotNegative = 0.001  # fixed, or with `target` the first one
    target: Positive | None = None
    horizon: Positive = 10000.0
    log_probs: PolicyLogProbs = "rollout_log_probs"


class DistillConfig(_Section):
    """On-policy distillation: advantages minus coefficient * KL(policy, teacher_log_probs), or of several teachers."""

    coefficient: Positive = 1.0
    # Name -> coefficient, of the column teacher_log_probs_NAME.
    teachers: dict[Annotated[str, Field(pattern=r"^\w+$")], Positive] = Field(default_factory=dict)
    penalty: KLPenalty = "k1"
    log_probs: PolicyLogProbs = "rollout_log_probs"
    only: bool = False  # without the estimator's advantages


class RejectionConfig(_Section):
    """One test that rejects tokens or rows; see `off_policy.Rejection`."""

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

    level: RatioLevel | None = "token"  # None = no weights
    mode: BoundMode = "truncate"
    upper: Positive = 2.0
    lower: NotNegative | None = None
    batch_normalize: bool = False
    batch_normalize_rows: Literal["with_tokens", "all"] = "with_tokens"  # rows of the mean, above token level
    rejections: tuple[RejectionConfig, ...] = ()
    veto: Positive | None = None  # masks rows with a token of a lower ratio
    veto_upper: Positive | None = None  # masks rows with a token of a higher ratio (SkyRL's outlier tokens)
    m2_threshold: Positive | None = None  # masks tokens until the mean squared log-ratio is below (M2PO)
    #: rejected tokens then count in no statistics of the estimator; None: `order`
    before_estimator: bool | None = None


class ChainConfig(_Section):
    """rewards -> masks, sample weights -> token rewards: KL, clip, whitening -> estimator -> advantages -> correction.

    `options` are the estimator's; they may also stand beside the other fields.
    """

    estimator: str = "grpo"
    options: dict[str, JsonValue] = Field(default_factory=dict)
    reward: RewardConfig = RewardConfig()
    masks: MaskConfig | None = None
    sample_weights: SampleWeightConfig | None = None
    token_rewards: Literal["outcome", "steps", "column"] = "outcome"  # where token-level rewards come from
    kl: KLConfig | None = None
    token_reward_clip: Positive | None = None  # holds token rewards, after the KL, in -clip .. clip
    whiten_rewards: bool = False  # token rewards to mean 0, std 1 over the batch
    distill: DistillConfig | None = None
    whiten_advantages: bool = False
    advantage_clip: Positive | None = None
    raw_advantages: bool = False  # deliver the advantages before distillation, whitening and clipping too
    by_source: bool = False  # everything over the batch is over the groups of one data_source instead
    correction: CorrectionConfig | None = None
    #: whose order of KL, correction and estimator; see `build_chain`
    order: Literal["verl", "roll"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        estimator = str(data.get("estimator", "grpo"))
        offered = get_estimator(estimator).options
        nested = data.get("options") or {}
        if not isinstance(nested, Mapping):
            raise ValueError(f"options is {brief(nested)}, needs an object")
        options = dict(nested)
        rest = {}
        for name, value in data.items():
            if name in offered and name not in cls.model_fields:
                if name in options:
                    raise ValueError(f"{name} is given twice, beside options and in it: keep one")
                options[name] = value
            elif name in cls.model_fields:
                rest[name] = value
            else:
                raise ValueError(_unknown(str(name), estimator, [*cls.model_fields, *offered]))
        for name, value in options.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"options.{name}: is {brief(value)}, needs a finite number")
        return {**rest, "options": options}

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        definition = get_estimator(self.estimator)
        for name, value in self.options.items():
            if name not in definition.options:
                offered = ", ".join(definition.options) or "no options"
                nearest = did_you_mean(name, definition.options) or ":"
                raise ValueError(f"options.{name} is unknown to {self.estimator}{nearest} it takes {offered}")
            try:
                TypeAdapter(definition.types[name]).validate_python(value, strict=True)
            except ValidationError as error:
                raise ValueError(f"options.{name}: {first_problem(error)}") from None
        return self

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        checks: list[tuple[Any, Callable[[Any], Iterator[str]]]] = [
            (self.reward, _reward_problems),
            (self.masks, _mask_problems),
            (self, _token_reward_problems),
            (self.kl, _kl_problems),
            (self.distill, _distill_problems),
            (self.correction, _correction_problems),
        ]
        for section, problems in checks:
            for problem in problems(section) if section is not None else ():
                raise ValueError(problem)
        weights = self.sample_weights
        if weights and not (weights.difficulty or weights.length):
            raise ValueError("sample_weights does nothing: give it difficulty or length")
        return self

    @property
    def _corrects_first(self) -> bool:
        """Whether the correction stands before the masks and the estimator."""
        first = self.correction.before_estimator if self.correction is not None else False
        return self.order == "verl" if first is None else first

    @property
    def _charges_steps_late(self) -> bool:
        """Whether the KL comes off an estimate of steps instead of the rewards."""
        by_step = get_estimator(self.estimator).level == "step"
        return self.order == "roll" and self.kl is not None and by_step

    @property
    def level(self) -> Level:
        """What one advantage belongs to."""
        by_token = self.distill is not None or self._charges_steps_late
        return "token" if by_token else get_estimator(self.estimator).level


def _unknown(name: str, estimator: str, known: Iterable[str]) -> str:
    """What to say of a name that is neither a field of the chain nor an option of its estimator."""
    nearest = did_you_mean(name, known)
    takers = [each for each in estimator_names() if name in get_estimator(each).options]
    others = f": {', '.join(takers[:MOST_NAMED])} would take it" if takers else ": leave it out"
    return f"{brief(name)} is no field of the chain, and no option of {estimator}{nearest or others}"


def _reward_problems(config: RewardConfig) -> Iterator[str]:
    overlong = config.overlong
    if overlong and overlong.buffer > overlong.max_length:
        yield f"reward.overlong.buffer {overlong.buffer} is above max_length {overlong.max_length}"
    if isinstance(config.clip, tuple) and config.clip[0] >= config.clip[1]:
        yield f"reward.clip has the bounds {config.clip[0]} and {config.clip[1]}, needs the lower one first"
    if config.statistics == "row" and not (config.mean or config.std):
        yield "reward.statistics does nothing without reward.mean or reward.std"
    if config.epsilon != RewardConfig().epsilon and not config.std:
        yield "reward.epsilon does nothing without reward.std"


def _mask_problems(config: MaskConfig) -> Iterator[str]:
    if not config.model_dump(exclude_defaults=True):
        yield "masks does nothing: give it a bound, or truncated"
    low, high = config.difficulty_low, config.difficulty_high
    if low is not None and high is not None and low >= high:
        yield f"masks.difficulty_low {low} is not below difficulty_high {high}: every trajectory would be masked"
    wrong, longest = config.wrong_max_length, config.max_length
    if wrong is not None and longest is not None and wrong >= longest:
        yield f"masks.wrong_max_length {wrong} does nothing: max_length {longest} masks those trajectories"


def _kl_problems(config: KLConfig) -> Iterator[str]:
    if config.target is None and config.horizon != KLConfig().horizon:
        yield "kl.horizon does nothing without kl.target"
    if config.target is not None and config.coefficient == 0:
        yield "kl.coefficient is 0 and never adapts to kl.target: begin above 0"


def _distill_problems(config: DistillConfig) -> Iterator[str]:
    if config.teachers and config.coefficient != DistillConfig().coefficient:
        yield "distill.coefficient does nothing beside distill.teachers, which have their own"


def _token_reward_problems(config: ChainConfig) -> Iterator[str]:
    by_token = "token_level_rewards" in get_estimator(config.estimator).needs
    for name in ("token_reward_clip", "whiten_rewards"):
        if getattr(config, name) and not by_token:
            yield f"{name} does nothing: {config.estimator} reads no token rewards"
    if config.token_rewards != "outcome" and not by_token:
        yield f"token_rewards {config.token_rewards!r} does nothing: {config.estimator} reads no token rewards"
    if config.raw_advantages and not (config.whiten_advantages or config.advantage_clip or config.distill):
        yield "raw_advantages does nothing without distill, whiten_advantages or advantage_clip"


def _correction_problems(config: CorrectionConfig) -> Iterator[str]:
    if not (config.level or config.rejections or config.veto or config.veto_upper or config.m2_threshold):
        yield "correction does nothing: give it a level, rejections, veto or m2_threshold"
    if config.veto and (config.veto_upper or math.inf) <= config.veto:
        yield f"correction.veto {config.veto} and veto_upper {config.veto_upper} drop everything"
    default = CorrectionConfig()
    for name in ("mode", "upper", "lower", "batch_normalize"):
        if config.level is None and getattr(config, name) != getattr(default, name):
            yield f"correction.{name} does nothing without correction.level"
    if config.mode == "truncate" and config.lower is not None:
        yield f"correction.lower {config.lower} does nothing in mode truncate: choose clip or mask, or leave it out"
    lower = 1 / config.upper if config.lower is None else config.lower
    if config.mode != "truncate" and lower > config.upper:
        yield f"correction.lower {lower} is above upper {config.upper}"
    if config.batch_normalize_rows == "all" and not config.batch_normalize:
        yield "correction.batch_normalize_rows does nothing without correction.batch_normalize"


def parse_config(data: Any) -> ChainConfig:
    """`data`, a mapping or a ChainConfig, as a ChainConfig. Raises SettingError, one line, if it is wrong."""
    if isinstance(data, ChainConfig):
        return data
    try:
        return ChainConfig.model_validate(data)
    except ValueError as error:  # pydantic's, or a lone surrogate in a key
        raise SettingError(f"chain: {first_problem(error)}") from None
