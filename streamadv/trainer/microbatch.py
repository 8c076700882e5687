"""What the trainer iterates over: a batch of micro-batches, packed or padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..trajectory.columns import Array
from ..trajectory.payload import Payload, payload_trajectory
from ..trajectory.reference import Reference
from ..trajectory.schema import Trajectory


class Columns:
    """Columns as attributes: `mb.input_ids`, `mb.advantages`, and any other by its name."""

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = dict(columns)

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["columns"][name]  # type: ignore[no-any-return]
        except KeyError:
            present = ", ".join(self.__dict__.get("columns", ())) or "none"
            raise AttributeError(f"no column {name}: this batch has {present}") from None

    def __contains__(self, name: str) -> bool:
        return name in self.columns


class PaddedBatch(Columns):
    """Columns as [B, T], right padded with 0, and `attention_mask` [B, T] uint8."""


class MicroBatch(Columns):
    """Rows one rank runs at once, end to end: every column is [N] on the queue's device.

    `cu_seqlens` [R + 1] int32: row r holds tokens cu_seqlens[r] : cu_seqlens[r + 1] (what variable-length
    attention kernels take); `position_ids` [N] int64 counts from 0 in every row. An empty micro-batch (R = 0)
    keeps ranks in step and weighs nothing. Where rows lie side by side a column is a view of the batch's, which on
    a CPU `batch.delivered` shares: do not write into it.
    """

    def __init__(
        self,
        columns: Mapping[str, Tensor],
        row_lengths: Sequence[int],
        references: Sequence[Reference],
        extras: Mapping[str, list[Array]],
    ) -> None:
        super().__init__(columns)
        device = next(iter(columns.values())).device if columns else torch.device("cpu")
        lengths = torch.tensor(row_lengths, dtype=torch.int64, device=device)
        ends = torch.cumsum(lengths, 0)
        self.cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        self.row_lengths = list(row_lengths)
        self.references = list(references)  # of each row's trajectory
        self.extras = dict(extras)  # extra columns that are not per token, one array per row

    @cached_property
    def position_ids(self) -> Tensor:
        """[N] int64: made when first asked for, it weighs as much as two float columns."""
        offsets = self.cu_seqlens.to(torch.int64)
        total = sum(self.row_lengths)
        starts = torch.repeat_interleave(offsets[:-1], torch.diff(offsets), output_size=total)
        return torch.arange(total, device=offsets.device) - starts

    @property
    def num_rows(self) -> int:
        return len(self.row_lengths)

    def padded(self) -> PaddedBatch:
        """The same columns as [R, T] with T the longest row."""
        width = max(self.row_lengths, default=0)
        place = torch.arange(width, device=self.cu_seqlens.device)
        mask = place < torch.diff(self.cu_seqlens)[:, None]
        # Read, with a zero behind the last token: torch cannot write unsigned integers by index.
        index = torch.where(mask, self.cu_seqlens[:-1, None] + place, len(self.position_ids))
        padded = {}
        for name, values in {**self.columns, "position_ids": self.position_ids}.items():
            padded[name] = torch.cat([values, values.new_zeros((1, *values.shape[1:]))])[index]
        return PaddedBatch({**padded, "attention_mask": mask.to(torch.uint8)})


@dataclass(frozen=True)
class Delivered:
    """One trajectory of a batch with its payload and what was computed for it."""

    reference: Reference
    payload: Payload
    outputs: Mapping[str, Array]  # advantages, returns ... one value per token, rows end to end
    staleness: int | None

    def trajectory(self, k: int) -> Trajectory:
        """As a line of an interchange file: everything pushed, and the outputs."""
        return payload_trajectory(
            self.payload,
            self.outputs,
            reward=self.reference.reward,
            rewards=self.reference.rewards,
            batch=k,
            staleness=self.staleness,
        )


@dataclass(frozen=True)
class Batch:
    """Batch k as one rank sees it. Iterate over it for this rank's micro-batches.

    `num_tokens` (trainable ones), `num_rows` and `num_trajectories` are those of the whole batch on all ranks:
    divide a summed loss by them (times the world size under DDP, which averages). With several ranks they count
    also the trajectories that a rank could not read and has left out of its micro-batches.
    """

    version: int  # k: the version being trained; training on it makes k + 1
    id: str
    micro_batches: list[MicroBatch]
    num_tokens: int
    num_rows: int
    num_trajectories: int
    references: list[Reference] = field(repr=False)  # of every trajectory of the batch
    staleness: list[int | None]  # likewise
    logged_s: list[float] = field(repr=False)  # likewise: when its group was complete (server's clock)
    metrics: dict[str, float]
    make_delivered: Callable[[], list[Delivered]] = field(repr=False)

    @cached_property
    def delivered(self) -> list[Delivered]:
        """This rank's trajectories: made when first asked for, a training loop needs the micro-batches only."""
        return self.make_delivered()

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def trajectories(self) -> Iterator[Trajectory]:
        """This rank's trajectories with all columns and outputs."""
        return (item.trajectory(self.version) for item in self.delivered)
