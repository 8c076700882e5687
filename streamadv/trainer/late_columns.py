"""Where a column comes from: each one that the chain needs is pushed, or made late, by the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..algorithms.chain import Chain
from ..errors import LateColumnError, SettingError
from ..messages import brief, one_line
from ..trajectory.columns import COLUMN_NAME, OUTPUT_COLUMNS
from .microbatch import MicroBatch

#: Makes a late column: the micro-batch's columns in, one number per token out: [N] of any real dtype, on any device.
LateColumn = Callable[[MicroBatch], Tensor]

#: Columns only the weights being trained can fill: they need a supplier, or producers that push them.
LATE_COLUMNS = frozenset({"old_log_probs", "values"})


#: What a trajectory is made of, and what the pipeline makes of it.
NEVER_LATE: Final = frozenset({"input_ids", "response_mask", "versions", *OUTPUT_COLUMNS})


def check_late(late: Mapping[str, LateColumn]) -> None:
    """Raise SettingError for a column that cannot be made late, or is given no function."""
    for name, function in late.items():
        if not isinstance(name, str) or not COLUMN_NAME.fullmatch(name):
            raise SettingError(f"late: {brief(name)} is no column's name")
        if name in NEVER_LATE:
            raise SettingError(f"late: {name} is pushed or computed, it cannot be made late: leave it out")
        if not callable(function):
            raise SettingError(f"late: {name} is {brief(function)}, needs a function of a micro-batch")


def late_values(name: str, function: LateColumn, micro_batch: MicroBatch) -> Tensor:
    """[N] float32 on the micro-batch's device: what `function` gives for it, checked, without a gradient.

    The function gets a micro-batch of its own, so what it writes there is lost. Values of tokens that are not trained
    on may be anything; those that are not finite become 0. Raises LateColumnError.
    """
    tokens = sum(micro_batch.row_lengths)
    where, by = (
        f"late column {name}",
        f"function {getattr(function, '__qualname__', type(function).__name__)}",
    )
    mask = micro_batch.response_mask.bool()
    own = {column: values.clone() for column, values in micro_batch.columns.items()}
    copy = MicroBatch(own, micro_batch.row_lengths, micro_batch.references, micro_batch.extras)
    try:
        found: Any = function(copy)
    except (Exception, SystemExit) as error:
        raise LateColumnError(one_line(f"{where}: {by} raised {type(error).__name__}: {error}")) from error
    if not isinstance(found, Tensor):
        kind = "None" if found is None else f"a {type(found).__name__}"
        raise LateColumnError(f"{where} is {kind}, needs a tensor of shape ({tokens},), from {by}")
    if found.shape != (tokens,):
        shape = tuple(found.shape)
        raise LateColumnError(
            f"{where} has shape {shape}, needs ({tokens},): one number per token, from {by}"
        )
    if found.is_complex():
        raise LateColumnError(f"{where} has dtype {found.dtype}, needs real numbers, from {by}")
    values = found.detach().to(mask.device, torch.float32)
    finite = values.isfinite()
    wrong = mask & ~finite
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        row = int((micro_batch.cu_seqlens <= first).sum()) - 1
        reference = micro_batch.references[row]
        raise LateColumnError(
            f"{where} is not finite in float32 on {int(wrong.sum())} trainable tokens, first {float(values[first])} in "
            f"{reference.group_id}/{reference.rollout_index}: look at {by}"
        )
    return torch.where(finite, values, 0.0)


def pushed_columns(chain: Chain, late: Iterable[str], pushed: Sequence[str]) -> frozenset[str]:
    """Columns that producers have to push. Raises SettingError when a needed column has no supplier."""
    made: set[str] = set()
    for step in chain.steps:
        for name in step.needs:
            if name in LATE_COLUMNS and name not in late and name not in pushed and name not in made:
                raise SettingError(
                    f"chain step {step.name} needs column {name}, nobody supplies it: "
                    f"pass late={{{name!r}: function}}, or pushed=[{name!r}] if producers push it"
                )
        made |= set(step.makes)
    return frozenset(name for name in chain.needs if name not in late)
