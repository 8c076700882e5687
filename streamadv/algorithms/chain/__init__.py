"""The chain: reward shaping, KL, estimator, whitening and clipping, composed from a configuration.

A step names the columns it needs and how much of the batch it must see. The pipeline therefore runs a chain on some
groups or on the whole batch, and cuts it before the first step that needs a column of the trainer.

In reading order: `config` and `presets`; `step` (what a chain is made of); the steps in their order: `rewards`,
`samples`, `advantages`, `correction`. `sources` splits a batch by data source; `scope_check` tests a user's estimator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np

from ...errors import EstimatorError
from ...extras import torch
from ..chain_metrics import fetch
from ..packed import Level, PackedBatch
from ..registry import SCOPES, Scope
from ..segments import RunningMoments
from .advantages import estimating_steps
from .config import ChainConfig, parse_config
from .correction import correction_step
from .presets import preset
from .rewards import shaping_steps
from .samples import sample_steps
from .sources import run_by_source
from .step import ChainResult as ChainResult
from .step import ChainStep, State

GREATEST_FLOAT32: Final = float(np.finfo(np.float32).max)
#: Steps that change the estimator's advantages.
ADVANTAGE_STEPS: Final = frozenset({"kl_to_go", "distill", "advantages"})


@dataclass(frozen=True)
class Chain:
    """Steps in order. A chain that is cut at its first step has a first part without steps."""

    config: ChainConfig
    steps: tuple[ChainStep, ...]
    level: Level  # what one value of the result belongs to

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """Columns that must come with the batch: a step needs them, and no earlier step makes them."""
        made: set[str] = set()
        needed: dict[str, None] = {}
        for step in self.steps:
            needed |= dict.fromkeys(name for name in step.needs if name not in made)
            made |= set(step.makes)
        return tuple(needed)

    @cached_property
    def scope(self) -> Scope:
        """The widest scope of any step; "row" without steps."""
        return SCOPES[max((SCOPES.index(step.scope) for step in self.steps), default=0)]

    def cut(self, late: Set[str]) -> tuple[Chain, Chain]:
        """The steps before the first one that needs a column in `late`, and the steps from it on.

        Steps that change the estimator's advantages stay with it, so that it is late if one of them is. A part that
        begins after the estimator has no advantages of its own: those of the first part hold.
        """
        position = next((i for i, step in enumerate(self.steps) if late & set(step.needs)), len(self.steps))
        if any(step.name in ADVANTAGE_STEPS for step in self.steps[position:]):
            names = [step.name for step in self.steps]
            position = min(position, names.index("estimator") if "estimator" in names else position)
        return replace(self, steps=self.steps[:position]), replace(self, steps=self.steps[position:])

    def describe(self) -> list[str]:
        """One line per step, in order: name, what it does, scope, columns."""
        return [
            f"{number}. {step.name}: {step.text} [{step.scope}]"
            + (f" needs {', '.join(step.needs)}" if step.needs else "")
            for number, step in enumerate(self.steps, 1)
        ]


def build_chain(source: ChainConfig | str | Mapping[str, Any]) -> Chain:
    """The chain of a configuration, a preset's name or a mapping. Raises SettingError if it is wrong.

    A mapping may begin with a preset: {"preset": "verl/grpo", "kl": {"coefficient": 0.01}}.

    The order is that of `ChainConfig`. "verl" takes the correction right after the rewards, unless its
    `before_estimator` says no, and of a trajectory of several rows charges the KL of the last one. "roll" charges the
    KL of an estimator of steps after the estimator, token by token.
    """
    if isinstance(source, Mapping) and "preset" in source:
        config = preset(str(source["preset"]), **{key: source[key] for key in source if key != "preset"})
    else:
        config = preset(source) if isinstance(source, str) else parse_config(source)
    reward, *shaping = shaping_steps(config)
    steps = [reward, *sample_steps(config), *shaping]
    correction = [correction_step(config.correction)] if config.correction is not None else []
    if config._corrects_first:
        steps = [steps[0], *correction, *steps[1:]]
        correction = []
    return Chain(config, (*steps, *estimating_steps(config), *correction), config.level)


def cut_chain(config: Mapping[str, Any], late: Iterable[str]) -> tuple[Chain, Chain]:
    """`build_chain(config).cut(late)`, cached, because all batches of a run share one configuration."""
    return _cut_chain(json.dumps(config), frozenset(late))


@lru_cache(maxsize=16)
def _cut_chain(config_json: str, late: frozenset[str]) -> tuple[Chain, Chain]:
    return build_chain(json.loads(config_json)).cut(late)


def run_chain(
    chain: Chain,
    batch: PackedBatch,
    kl_coefficient: float | None = None,
    running: RunningMoments | Mapping[str, RunningMoments] | None = None,
) -> ChainResult:
    """Run the steps on `batch`. Pure: `batch` is not changed.

    Args:
      batch: whole rows, groups or batches, by `chain.scope`, with the columns `chain.needs`.
      kl_coefficient: the coefficient in the batch record; None = the configuration's.
      running: for the scope "running", the moments of the rewards of all batches up to this one, from the record; by
        source if the configuration says `by_source`.

    Raises TrajectoryError for a missing column, and EstimatorError if the estimator raises, or returns anything except
    one finite number per row, step or trainable token.
    """
    if chain.config.by_source:
        moments = running if isinstance(running, Mapping) else {}
        of_source = replace(chain, config=chain.config.model_copy(update={"by_source": False}))
        return run_by_source(
            lambda source, part: run_chain(of_source, part, kl_coefficient, moments.get(source)), batch
        )
    if kl_coefficient is None:
        kl_coefficient = chain.config.kl.coefficient if chain.config.kl is not None else 0.0
    of_all = None if isinstance(running, Mapping) else running
    state = State(batch, chain.level, kl_coefficient, of_all).recounted()
    for step in chain.steps:
        state = step.run(state)
    # The estimate's metrics travel with the others, so that the host waits for a device once.
    metrics, weights = fetch({**state.metrics, **state.estimated})
    estimated = {name: metrics.pop(name) for name in state.estimated if name in metrics}
    weights = {name: weights[name] for name in metrics}
    for name, value in estimated.items():  # of the advantages and returns over trainable tokens
        if not math.isfinite(value) or abs(value) > GREATEST_FLOAT32:
            columns = ", ".join(chain.needs) or "none"
            raise EstimatorError(
                f"estimator {chain.config.estimator}: {name} is {value}, not finite in float32, over trainable tokens: "
                f"look at what it divides by, at the rewards and at the columns it is made from ({columns})"
            )
    advantages, returns = (
        None if values is None else values.to(torch.float32) for values in (state.advantages, state.returns)
    )
    return ChainResult(
        level=state.level,
        advantages=advantages,
        returns=returns,
        rewards=state.batch.rewards,
        step_rewards=state.batch.steps.rewards,
        columns=state.changed,
        metrics=metrics,
        weights=weights,
    )
