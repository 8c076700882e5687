"""A rank's share trajectory by trajectory: for whoever writes them to a file, not for a training loop."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor

from ..trajectory.columns import Array
from ..trajectory.members import offsets
from ..trajectory.payload import Payload
from .fetch import FetchedShare
from .microbatch import Delivered
from .references import References


def delivered(fetched: FetchedShare, outputs: Mapping[str, Tensor], k: int) -> list[Delivered]:
    """The trajectories with their payloads. outputs: computed columns of the share, [N] each."""
    own = fetched.share.own
    bounds = list(pairwise(offsets(own.members.table["tokens"]).tolist()))
    pushed = {name: column.numpy() for name, column in fetched.columns.items()}
    made = {name: column.cpu().numpy() for name, column in outputs.items()}
    return [
        Delivered(
            reference,
            Payload(
                fetched.headers[packet],
                {**_slices(pushed, *span), **fetched.others[packet]},
            ),
            _slices(made, *span),
            reference.staleness(k),
        )
        for reference, packet, span in zip(References(own), own.packet.tolist(), bounds, strict=True)
    ]


def _slices(columns: Mapping[str, Array], start: int, stop: int) -> dict[str, Array]:
    return {name: column[start:stop] for name, column in columns.items()}
