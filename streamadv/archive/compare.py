"""What another chain would have made of a batch, beside what it was trained with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from ..algorithms.chain import build_chain
from ..batch.record import BatchRecord
from ..batch.selection import running_with
from ..run.kept import unpack_results
from ..status.kept import MASK, outputs_of
from ..status.seen import SeenGroup
from ..trajectory.columns import Array
from .folder import Source
from .rewind import Again, KeptBatch

#: Columns by which the loss weighs a token.
WEIGHTS = ("rollout_is_weights", "sample_weights")


@dataclass(slots=True)
class Effect:
    """What a chain makes of the groups of one source."""

    groups: int = 0
    """Groups with a token that moves the policy."""
    tokens: int = 0
    """That are trained on."""
    weight: float = 0.0
    squares: float = 0.0

    @property
    def effective(self) -> float:
        """The effective sample size in tokens: (sum of weights)^2 / sum of squares."""
        return self.weight**2 / self.squares if self.squares else 0.0

    def add(self, tokens: _Tokens) -> bool:
        """Count the tokens of a rollout; whether one of them moves the policy."""
        is_on = tokens.mask > 0
        on = tokens.weights[is_on].astype(np.float64)
        self.tokens += len(on)
        self.weight += float(on.sum())
        self.squares += float((on**2).sum())
        return tokens.advantages is not None and bool((tokens.advantages * tokens.weights)[is_on].any())


@dataclass(slots=True)
class Change:
    """The groups of one source under both chains."""

    groups: int = 0
    before: Effect = field(default_factory=Effect)
    after: Effect = field(default_factory=Effect)
    compared: int = 0
    """Tokens with an advantage under both."""
    signs: int = 0
    """Of them, those whose advantage has the opposite sign."""


def with_chain(batch: KeptBatch, chain: str | Mapping[str, Any]) -> BatchRecord:
    """The record of the batch as it would be with another chain, of which workers run all steps.

    An adaptive KL coefficient, and moments of the rewards before the batch, are those of its record.
    """
    config, record = build_chain(chain).config, batch.record
    adapts = config.kl is not None and config.kl.target is not None
    return record.model_copy(
        update={
            "chain": config.model_dump(mode="json"),
            "late": [],
            "kl_coefficient": record.kl_coefficient if adapts else None,
            "running": running_with(config, record.running_before, list(batch.groups.values())),
        }
    )


def compare(source: Source, batch: KeptBatch, again: Again) -> dict[str, Change]:
    """The change by data source, of results of another chain. Sources are sorted; "" = groups without one."""
    changes: dict[str, Change] = {}
    for group_id, seen in sorted(batch.seen.items(), key=lambda item: item[1].data_source or ""):
        change = changes.setdefault(seen.data_source or "", Change())
        change.groups += 1
        old = outputs_of(seen)
        new = outputs_of(replace(seen, results=unpack_results(again.results[group_id]), late={}))
        masks, longest = _masks(source, seen), batch.record.tokens_per_micro_batch
        moved = [False, False]
        for member in seen.members:
            index = member.rollout_index
            oversize = longest is not None and max(member.row_lengths) > longest
            is_there = index in masks and index in new
            if member.is_baseline or oversize or index in seen.left_out or not is_there:
                continue
            before, after = (_Tokens.of(outputs[index], masks[index]) for outputs in (old, new))
            moved[0] |= change.before.add(before)
            moved[1] |= change.after.add(after)
            if before.advantages is not None and after.advantages is not None:
                both = (before.mask > 0) & (after.mask > 0)
                change.compared += int(both.sum())
                change.signs += int((before.advantages * after.advantages < 0)[both].sum())
        change.before.groups += moved[0]
        change.after.groups += moved[1]
    return changes


def total(changes: Iterable[Change]) -> Change:
    """Of all sources together."""
    whole = Change()
    for change in changes:
        whole.groups += change.groups
        whole.compared += change.compared
        whole.signs += change.signs
        for own, part in ((whole.before, change.before), (whole.after, change.after)):
            for each in fields(Effect):
                setattr(own, each.name, getattr(own, each.name) + getattr(part, each.name))
    return whole


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of one rollout after a chain."""

    mask: Array
    weights: Array
    advantages: Array | None  # None: the chain was cut before its estimator

    @staticmethod
    def of(outputs: Mapping[str, Array], pushed: Array) -> _Tokens:
        weights = np.ones(len(pushed))
        for name in WEIGHTS:
            weights = weights * outputs.get(name, 1.0)
        return _Tokens(outputs.get(MASK, pushed), weights, outputs.get("advantages"))


def _masks(source: Source, group: SeenGroup) -> dict[int, Array]:
    """`response_mask` of each member as it was pushed, by rollout_index."""
    masks: dict[int, Array] = {}
    for fetched in source.fetch(group.packets, [MASK]):
        table = fetched.packet.members.table
        parts = np.split(fetched.columns[MASK], np.cumsum(table["tokens"])[:-1]) if fetched.columns else ()
        masks |= dict(zip(table["index"].tolist(), parts, strict=False))
    return masks
