"""Late columns: a user's function makes them with the weights being trained, instead of a producer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from redis.exceptions import OutOfMemoryError
from torch import Tensor

from ..advantage.results import BatchResults
from ..algorithms.chain import Chain
from ..errors import LateColumnError, SettingError
from ..grouping.layout import Layout
from ..messages import brief, one_line
from ..run import Run
from ..run.kept import LATE_OF, Numbers, is_kept, pack_results, share_kept
from ..store.retry import RETRYABLE
from ..trajectory.columns import COLUMN_NAME, OUTPUT_COLUMNS
from ..trajectory.fields import TAKEN_NAMES
from ..trajectory.members import Positions, offsets
from .microbatch import MicroBatch, RowExtras, cut, token_spans, with_other_columns
from .plan import Share

#: A supplier: gets a micro-batch and returns one number per token, [N] of any real dtype, on any device.
LateColumn = Callable[[MicroBatch], Tensor]

#: Columns that only the weights being trained can fill: they need a supplier, or producers that push them.
LATE_COLUMNS: Final = frozenset({"old_log_probs", "values"})
#: Columns that a trajectory is made of, and those that the pipeline makes.
NEVER_LATE: Final = frozenset({"input_ids", "response_mask", "versions", *OUTPUT_COLUMNS})
#: Trajectories of one call that hands over what was made of them.
KEEP_SLICE: Final = 64


def check_late(late: Mapping[str, LateColumn] | None) -> dict[str, LateColumn]:
    """The suppliers. Raises SettingError for a column that cannot be late, or whose supplier is no function."""
    if late is None:
        return {}
    if not isinstance(late, Mapping):
        raise SettingError(
            f"late is {brief(late)}, needs functions of a micro-batch by column: {{NAME: function}}"
        )
    for name, function in late.items():
        if not isinstance(name, str) or not COLUMN_NAME.fullmatch(name):
            raise SettingError(f"late: {brief(name)} is no column's name")
        if name in TAKEN_NAMES:
            raise SettingError(f"late: {name} is what every micro-batch has by itself: use another name")
        if name in NEVER_LATE:
            raise SettingError(f"late: {name} is pushed or computed, it cannot be made late: leave it out")
        if not callable(function):
            raise SettingError(f"late: {name} is {brief(function)}, needs a function of a micro-batch")
    return dict(late)


def make_late_columns(
    suppliers: Mapping[str, LateColumn],
    share: Share,
    columns: Mapping[str, Tensor],
    extras: RowExtras,
    has: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Call each supplier on every micro-batch of a rank's packed share: name -> [N] float32, in packed order.

    columns, extras, has: see `cut`. Rows that are in no micro-batch keep 0: nobody trains on them. Raises
    LateColumnError.
    """
    mask = columns["response_mask"]
    made = {name: torch.zeros(len(mask), dtype=torch.float32, device=mask.device) for name in suppliers}
    for spans, micro_batch in zip(token_spans(share), cut(share, columns, extras, has), strict=True):
        for name, supplier in suppliers.items():
            values = late_values(name, supplier, micro_batch)
            parts = torch.split(values, [stop - start for start, stop in spans])
            for (start, stop), part in zip(spans, parts, strict=True):
                made[name][start:stop] = part
    return made


def keep_late(
    run: Run,
    batch: str,
    own: Layout,
    results: BatchResults,
    positions: Positions,
    made: Mapping[str, Tensor],
    fence: str,
) -> None:
    """Hand over what was made of trajectories whose groups commit may keep, so that it can be looked at.

    batch: its id. own: the rank's trajectories, at these positions in the batch. made: [N] by name. A server that is
    away or has no memory gets nothing: nobody waits for what is only looked at. Raises EpochFencedError.
    """
    share = share_kept(run.manifest, "trained")
    chosen = [is_kept(group.group_id, share) for group in own.groups]
    members = [member for member, group in enumerate(own.group.tolist()) if chosen[group]]
    if not members or not made:
        return
    bounds = offsets(own.members.table["tokens"]).tolist()
    arrays = {
        name: (values.view(torch.uint8) if values.dtype == torch.bool else values).cpu().numpy()
        for name, values in made.items()
    }
    calls: dict[tuple[int, str], list[str | bytes]] = {}  # by shard and output
    for member in members:
        group, part = own.groups[own.group[member]], slice(*bounds[member : member + 2])
        output = results.results[results.result[positions[member]]].output
        numbers = [Numbers(name, "token", values[part]) for name, values in arrays.items()]
        fields = calls.setdefault((group.shard, output), [])
        fields += [f"{LATE_OF}{own.identity(member)[1]}:{group.group_id}", pack_results(numbers)]
    with suppress(*RETRYABLE, OutOfMemoryError):
        for (shard, output), fields in calls.items():
            for start in range(0, len(fields) if output else 0, 2 * KEEP_SLICE):
                arguments = [fence, batch, *fields[start : start + 2 * KEEP_SLICE]]
                run.shards[shard].call("keep_late", arguments, output=output)


def late_values(name: str, supplier: LateColumn, micro_batch: MicroBatch) -> Tensor:
    """[N] float32 on the micro-batch's device, without a gradient: what the supplier returns for it, checked.

    The supplier gets a copy, so nothing that it writes into the micro-batch stays. It may return anything for tokens
    that are not trained on: non-finite values of those become 0. Raises LateColumnError.
    """
    where = f"late column {name}"
    by = f"function {getattr(supplier, '__qualname__', type(supplier).__name__)}"
    columns = {column: values.clone() for column, values in micro_batch.columns.items()}
    copy, tokens = with_other_columns(micro_batch, columns), micro_batch.num_tokens
    try:
        supplied: Any = supplier(copy)
    except (Exception, SystemExit) as error:
        raise LateColumnError(one_line(f"{where}: {by} raised {type(error).__name__}: {error}")) from error
    if not isinstance(supplied, Tensor):
        kind = "None" if supplied is None else f"a {type(supplied).__name__}"
        raise LateColumnError(f"{where} is {kind}, needs a tensor of shape ({tokens},), from {by}")
    whole: Tensor = supplied.full_tensor() if hasattr(supplied, "full_tensor") else supplied  # of a DTensor
    if whole.shape != (tokens,):
        shape = tuple(whole.shape)
        raise LateColumnError(
            f"{where} has shape {shape}, needs ({tokens},): one number per token, from {by}"
        )
    if whole.is_complex():
        raise LateColumnError(f"{where} has dtype {whole.dtype}, needs real numbers, from {by}")
    mask = micro_batch.response_mask.bool()
    values = whole.detach().to(mask.device, torch.float32)
    finite = values.isfinite()
    wrong = mask & ~finite
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        row = int((micro_batch.cu_seqlens <= first).sum()) - 1
        reference, token = micro_batch.references[row], first - int(micro_batch.cu_seqlens[row])
        raise LateColumnError(
            f"{where} is not finite in float32 on {int(wrong.sum())} trainable tokens, "
            f"first {float(values[first])} in {reference.group_id}/{reference.rollout_index}, "
            f"token {token} of row {micro_batch.row_numbers[row]}: look at {by}"
        )
    return torch.where(finite, values, 0.0)


def pushed_columns(chain: Chain, late: Iterable[str], pushed: Sequence[str]) -> frozenset[str]:
    """Columns of the chain that producers have to push. Raises SettingError for one that nobody supplies."""
    if isinstance(pushed, str):
        raise SettingError(f"pushed is {brief(pushed)}, needs a list of columns: [{brief(pushed)}]")
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
