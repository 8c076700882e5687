"""Cuts a rank's packed share into its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..trajectory.columns import Array
from ..trajectory.members import Positions, offsets
from .microbatch import MicroBatch, References
from .plan import Share

#: Extra columns that do not have one value per token: name -> for each row of a share its array, None without one.
RowExtras = Mapping[str, Sequence[Array | None]]


def cut(
    share: Share, columns: Mapping[str, Tensor], extras: RowExtras, has: Mapping[str, Tensor]
) -> list[MicroBatch]:
    """The micro-batches of a share. columns: [N, ...] in its order. has: [rows] bool, of each optional column."""
    members = share.own.members
    tokens = members.rows["tokens"].tolist()
    owner = np.repeat(np.arange(len(members)), members.table["rows"])
    row_numbers = np.arange(len(owner)) - members.first_row[owner]
    micro_batches = []
    for rows, spans in zip(share.rows, token_spans(share), strict=True):
        numbers = rows.tolist()
        micro_batches.append(
            MicroBatch(
                {name: _tokens(values, spans) for name, values in columns.items()},
                [tokens[row] for row in numbers],
                References(share.own, owner[rows]),
                {name: [arrays[row] for row in numbers] for name, arrays in extras.items()},
                row_numbers[rows].tolist(),
                {name: which[torch.from_numpy(rows)] for name, which in has.items()},
            )
        )
    return micro_batches


def token_spans(share: Share) -> list[list[tuple[int, int]]]:
    """For each micro-batch, the token spans of its rows in the packed share; rows side by side make one span."""
    bounds = offsets(share.own.members.rows["tokens"])
    return [_spans(rows, bounds) for rows in share.rows]


def _spans(rows: Positions, bounds: Positions) -> list[tuple[int, int]]:
    if not len(rows):
        return []
    stops = np.flatnonzero(np.diff(rows, append=-1) != 1)  # the last row of each span
    starts = np.concatenate([[0], stops[:-1] + 1])
    return list(zip(bounds[rows[starts]].tolist(), bounds[rows[stops] + 1].tolist(), strict=True))


def _tokens(values: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """[N of the spans, ...]: the values of these tokens; a view if one span holds them all."""
    parts = [values[start:stop] for start, stop in spans]
    return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else values[:0]
