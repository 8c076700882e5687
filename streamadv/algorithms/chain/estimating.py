"""Calls an estimator, which may be a user's: names what it raises, and checks what it returns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...errors import EstimatorError, SettingError, StreamadvError
from ...extras import torch
from ...messages import brief, one_line
from ..packed import PackedBatch
from ..registry import Estimate, Estimator

if TYPE_CHECKING:
    from torch import Tensor

GREATEST_FLOAT32: Final = float(np.finfo(np.float32).max)


def estimate(definition: Estimator, batch: PackedBatch, options: Mapping[str, Any]) -> Estimate:
    """The estimate of `definition` for `batch`: floating point, one value per row, step or token, no gradient.

    Raises EstimatorError if the function raises anything except an error of streamadv, or returns anything else;
    SettingError for another level than declared.
    """
    try:
        result: object = definition.function(batch, **options)
    except StreamadvError:
        raise
    except (Exception, SystemExit) as error:
        text = f"estimator {definition.name} raised {type(error).__name__}: {error}"
        raise EstimatorError(one_line(text.partition("\n")[0])) from error
    if not isinstance(result, Estimate):
        raise EstimatorError(
            f"estimator {definition.name} returned {_kind(result)}, needs Estimate({definition.level!r}, advantages)"
        )
    if result.level != definition.level:
        raise SettingError(
            f"estimator {definition.name} returned level {result.level!r}, declared {definition.level!r}: "
            f"register it with level={result.level!r}"
        )
    advantages = _checked(definition, batch, "advantages", result.advantages)
    returns = None if result.returns is None else _checked(definition, batch, "returns", result.returns)
    return replace(result, advantages=advantages, returns=returns)


def check_finite(definition: Estimator, inputs: tuple[str, ...], summaries: Mapping[str, float]) -> None:
    """Raise EstimatorError unless float32 can hold all values of `summaries`.

    summaries: `chain_metrics.summary` of the estimate's advantages and returns over trainable tokens.
    """
    for name, value in summaries.items():
        if not math.isfinite(value) or abs(value) > GREATEST_FLOAT32:
            columns = ", ".join(inputs) or "none"
            raise EstimatorError(
                f"estimator {definition.name}: {name} is {value}, not finite in float32, over trainable tokens: "
                f"look at what it divides by, at the rewards and at the columns it is made from ({columns})"
            )


def _checked(definition: Estimator, batch: PackedBatch, name: str, values: object) -> Tensor:
    where = f"estimator {definition.name}: {name}"
    if not isinstance(values, torch.Tensor):
        raise EstimatorError(f"{where} is {_kind(values)}, needs a floating-point tensor")
    if not values.is_floating_point():
        raise EstimatorError(f"{where} has dtype {values.dtype}, needs float64 or float32")
    count = batch.count(definition.level)
    if values.shape != (count,):
        raise EstimatorError(
            f"{where} has shape {tuple(values.shape)}, needs ({count},): one value for each {definition.level}"
        )
    if values.device != batch.device:
        raise EstimatorError(f"{where} is on {values.device}, needs the batch's device {batch.device}")
    return values.detach()


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({brief(value)})"
