"""A rank's share as single trajectories, for code that writes them to a file; a training loop needs none of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from ..trajectory.columns import Array
from ..trajectory.members import offsets
from ..trajectory.payload import payloads_of
from .fetch import FetchedShare
from .microbatch import Delivered
from .references import References


def delivered(fetched: FetchedShare, outputs: Mapping[str, Tensor], k: int) -> list[Delivered]:
    """The trajectories with their payloads. outputs: computed columns of the share, [N] each."""
    own = fetched.share.own
    bounds = list(pairwise(offsets(own.members.table["tokens"]).tolist()))
    pushed = {name: column.numpy() for name, column in fetched.columns.items()}
    made = {name: column.cpu().numpy() for name, column in outputs.items()}
    payloads = {
        number: payloads_of(own.packets[number], others, fetched.headers[number])
        for number, others in fetched.others.items()
    }
    found = []
    for member, (reference, span) in enumerate(zip(References(own), bounds, strict=True)):
        number = int(own.packet[member])
        payload = payloads[number][int(own.position[member])]
        columns = {name: pushed[name] for name in own.packets[number].columns if name in pushed}
        payload = replace(payload, columns={**_slices(columns, *span), **payload.columns})
        found.append(Delivered(reference, payload, _slices(made, *span), reference.staleness(k)))
    return found


def _slices(columns: Mapping[str, Array], start: int, stop: int) -> dict[str, Array]:
    return {name: column[start:stop] for name, column in columns.items()}
