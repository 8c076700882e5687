"""Calling an estimator, which may be a user's: what it raises is named, what it returns is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from ...errors import EstimatorError, SettingError, StreamadvError
from ...messages import brief, one_line
from ..packed import PackedBatch
from ..registry import Estimate, Estimator

GREATEST_FLOAT32: Final = torch.finfo(torch.float32).max


def estimate(chosen: Estimator, batch: PackedBatch, options: Mapping[str, Any]) -> Estimate:
    """The estimate of `chosen` for `batch`: floating point, one value for each row, step or token, no gradient.

    Raises EstimatorError for whatever the function raises, but for errors of streamadv, and for a result of
    another kind; SettingError for another level than declared.
    """
    try:
        found: object = chosen.function(batch, **options)
    except StreamadvError:
        raise
    except (Exception, SystemExit) as error:
        text = f"estimator {chosen.name} raised {type(error).__name__}: {error}"
        raise EstimatorError(one_line(text.partition("\n")[0])) from error
    if not isinstance(found, Estimate):
        raise EstimatorError(
            f"estimator {chosen.name} returned {_kind(found)}, needs Estimate({chosen.level!r}, advantages)"
        )
    if found.level != chosen.level:
        raise SettingError(
            f"estimator {chosen.name} returned level {found.level!r}, declared {chosen.level!r}: "
            f"register it with level={found.level!r}"
        )
    advantages = _checked(chosen, batch, "advantages", found.advantages)
    returns = None if found.returns is None else _checked(chosen, batch, "returns", found.returns)
    return replace(found, advantages=advantages, returns=returns)


def check_finite(chosen: Estimator, inputs: tuple[str, ...], found: Mapping[str, float]) -> None:
    """Raise EstimatorError unless `found` shows values that float32 can hold.

    found: `summary` of the estimate's advantages and returns over what is trained on, fetched.
    """
    for name, value in found.items():
        if not math.isfinite(value) or abs(value) > GREATEST_FLOAT32:
            columns = ", ".join(inputs) or "none"
            raise EstimatorError(
                f"estimator {chosen.name}: {name} is {value}, not finite in float32, over trainable tokens: "
                f"look at what it divides by, at the rewards and at the columns it is made from ({columns})"
            )


def _checked(chosen: Estimator, batch: PackedBatch, name: str, values: object) -> Tensor:
    where = f"estimator {chosen.name}: {name}"
    if not isinstance(values, Tensor):
        raise EstimatorError(f"{where} is {_kind(values)}, needs a floating-point tensor")
    if not values.is_floating_point():
        raise EstimatorError(f"{where} has dtype {values.dtype}, needs float64 or float32")
    count = batch.count(chosen.level)
    if values.shape != (count,):
        raise EstimatorError(
            f"{where} has shape {tuple(values.shape)}, needs ({count},): one value for each {chosen.level}"
        )
    if values.device != batch.device:
        raise EstimatorError(f"{where} is on {values.device}, needs the batch's device {batch.device}")
    return values.detach()


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({brief(value)})"
