"""What a chain is made of: a step, the state that steps pass on, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..chain_metrics import Metric
from ..packed import Level, PackedBatch
from ..registry import Scope
from ..segments import RunningMoments, Summary, Trainable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChainResult:
    """The result of a chain. `advantages` is None after the first part of a chain cut before its estimator."""

    level: Level
    advantages: Tensor | None  # [R], [S] or [N] float32
    returns: Tensor | None  # same shape; None where they equal the advantages
    rewards: Tensor  # [M] float64, as shaped so far
    step_rewards: Tensor  # [S] float64
    columns: Mapping[str, Tensor]  # made or changed by a step, [N]
    metrics: Mapping[str, float]
    weights: Mapping[str, float]  # what each metric is a mean over; see merge_metrics


@dataclass(frozen=True, slots=True)
class State:
    """What a step receives and returns. Immutable: a step returns a changed copy."""

    batch: PackedBatch
    level: Level
    kl_coefficient: float = 0.0
    running: RunningMoments | None = None
    trainable: Trainable | None = None  # tokens of the batch; None while response_mask was not fetched
    advantages: Tensor | None = None  # [R] or [S] float64; at level token [N] float32, 0 where masked
    returns: Tensor | None = None
    summary: Summary | None = None  # of the advantages over trainable tokens, if a step has taken it
    changed: Mapping[str, Tensor] = field(default_factory=dict)  # columns made or changed, [N]
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    estimated: Mapping[str, Metric] = field(default_factory=dict)  # of the estimate itself; must be finite

    @property
    def tokens(self) -> Trainable:
        """The trainable tokens. Raises TrajectoryError if the batch lacks response_mask."""
        return self.trainable or self.batch.trainable_tokens

    def with_metrics(self, metrics: Mapping[str, Metric]) -> State:
        return replace(self, metrics={**self.metrics, **metrics})

    def with_columns(self, **columns: Tensor) -> State:
        return replace(self, batch=self.batch.with_columns(**columns), changed={**self.changed, **columns})

    def with_mask(self, mask: Tensor) -> State:
        """The state with a narrowed response_mask [N]; the batch remembers the mask as pushed."""
        batch = self.batch
        if batch.given_mask is None:
            batch = replace(batch, given_mask=batch.column("response_mask"))
        return replace(self, batch=batch).with_columns(response_mask=mask).recounted()

    def recounted(self) -> State:
        """The state with trainable tokens and their counts taken from response_mask, if the batch has it."""
        batch = self.batch
        if "response_mask" not in batch.columns:
            return self
        tokens = batch.trainable_tokens
        return replace(self, batch=replace(batch, row_trainable=tokens.counts), trainable=tokens)


@dataclass(frozen=True, slots=True)
class ChainStep:
    """A function of the state, the columns it reads and makes, and how much of the batch it must see."""

    name: str
    needs: tuple[str, ...]
    scope: Scope
    text: str  # for people
    run: Callable[[State], State]
    makes: tuple[str, ...] = ()
