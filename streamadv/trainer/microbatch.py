"""What a training loop receives: a batch of micro-batches, packed, padded, or as prompts and responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..grouping.layout import Layout
from ..trajectory.columns import Array
from ..trajectory.members import Positions, Reference, offsets, references_of
from ..trajectory.packet import Payload, payload_trajectory
from ..trajectory.schema import Trajectory
from .plan import Share


class Columns:
    """Columns as attributes: `mb.input_ids`, `mb.advantages`, and any other by its name.

    `columns` holds them by name, `name in mb` says whether `mb` has one. An attribute that is no column raises
    AttributeError, which lists the columns.
    """

    columns: dict[str, Tensor]

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["columns"][name]  # type: ignore[no-any-return]
        except KeyError:
            present = ", ".join(self.__dict__.get("columns", ())) or "none"
            raise AttributeError(f"no column {name}: this batch has {present}") from None

    def __contains__(self, name: str) -> bool:
        return name in self.columns


@dataclass(eq=False, repr=False)
class References:
    """References of the members of a layout, or of those at `positions`, which may repeat. Made at the first look."""

    layout: Layout
    positions: Positions | None = None

    def __iter__(self) -> Iterator[Reference]:
        return iter(self._made)

    @cached_property
    def _made(self) -> list[Reference]:
        layout = self.layout
        groups = [(group.group_id, group.data_source) for group in layout.groups]
        references = references_of(layout.members, [groups[number] for number in layout.group.tolist()])
        if self.positions is None:
            return references
        return [references[position] for position in self.positions.tolist()]


class PromptResponse(Columns):
    """B rows of a micro-batch, cut at their first trainable token: prompts of P tokens at most, responses of C.

    | column | shape | holds |
    |---|---|---|
    | `prompt_ids`, `prompt_mask` | [B, P] int64, bool | the prompt, padded on the left; true on tokens |
    | `response_ids`, `response_attention_mask` | [B, C] int64, bool | the rest, padded on the right; true on tokens |
    | `response_mask` | [B, C] bool | tokens that are trained on: no padding, no tool output |
    | `input_ids`, `attention_mask` | [B, P + C] int64, bool | prompt and response side by side |
    | `position_ids` | [B, P + C] int64 | counts from 0 at the first token of the row; 0 in the padding |
    | any other column of the micro-batch | [B, C, ...] | its values of the response, 0 in the padding |

    Nothing is shifted: entry c of a column describes token c of the response. A row without a trainable token is left
    out; `rows` says which ones are there.
    """

    rows: Tensor
    """[B] int64: the row of the micro-batch, for `references`, `row_numbers` and `version_spans`."""
    has: dict[str, Tensor]
    """[B] bool, by name of a column of the micro-batch: the rows that have it."""

    def __init__(self, columns: dict[str, Tensor], rows: Tensor, has: dict[str, Tensor]) -> None:
        self.columns = dict(columns)
        self.rows = rows
        self.has = has

    def __repr__(self) -> str:
        prompts, responses = (tuple(self.columns[name].shape) for name in ("prompt_ids", "response_ids"))
        return f"PromptResponse(prompts={prompts}, responses={responses}, columns={list(self.columns)})"


class PaddedBatch(Columns):
    """The columns of a micro-batch as [R, T]: one row each, right padded with 0 to the longest of T tokens.

    `attention_mask` [R, T] bool is true on tokens; `position_ids` [R, T] int64 count from 0. `has`: see `MicroBatch`.
    """

    def __init__(self, columns: Mapping[str, Tensor], has: Mapping[str, Tensor]) -> None:
        self.columns = dict(columns)
        self.has = dict(has)

    def __repr__(self) -> str:
        shape = tuple(self.columns["attention_mask"].shape)
        return f"PaddedBatch(shape={shape}, columns={list(self.columns)})"


class MicroBatch(Columns):
    """R rows that one rank runs at once, laid end to end without padding: N tokens, every column [N] on one device.

    Always present: `input_ids` int64, `response_mask` bool (true = trained on), `advantages` and `returns` float32,
    unless the chain makes none. torch indexes with these dtypes (`logits.gather(-1, mb.input_ids[:, None])`,
    `values[mb.response_mask]`); what travels and is stored is int32 and uint8. Further columns are those that
    trajectories were pushed with (`rollout_log_probs`, `ref_log_probs`, `values` ... float32, extra columns
    in their own dtype), late columns (float32), and what the chain adds (`rollout_is_weights`, `sample_weights` ...
    float32). One that only a part of the batch was pushed with is there too (`optional`): `has[name]` says which rows
    have it, the others read 0.

    An empty micro-batch (R = 0) keeps the ranks of a job in step and adds nothing to a loss. Where rows lie side by
    side a column is a view of the batch's, which on a CPU `batch.delivered` shares, and `returns` are `advantages`
    themselves if the chain makes no others: do not write into a column.
    """

    cu_seqlens: Tensor
    """[R + 1] int32: row r holds tokens cu_seqlens[r] : cu_seqlens[r + 1], as variable-length attention takes it."""
    row_lengths: list[int]
    """Tokens of each row, R numbers on the host."""
    row_numbers: list[int]
    """The number of each row in its trajectory: with `references` it names a row. 0 where trajectories have one."""
    extras: dict[str, list[Any]]
    """Extra columns that do not have one value per token: name -> one numpy array for each row, None without it."""
    optional: frozenset[str]
    """Columns that some trajectory of the batch lacks, on whatever rank it is."""

    def __init__(
        self,
        columns: Mapping[str, Tensor],
        row_lengths: Sequence[int],
        references: Iterable[Reference],
        extras: Mapping[str, list[Any]],
        row_numbers: Sequence[int] | None = None,
        has: Mapping[str, Tensor] | None = None,
    ) -> None:
        """references: kept as it is until `references` is asked for, so it may make them only then.

        has: of each optional column, [R] bool.
        """
        self.columns = dict(columns)
        device = next(iter(columns.values())).device if columns else torch.device("cpu")
        lengths = torch.tensor(row_lengths, dtype=torch.int64, device=device)
        ends = torch.cumsum(lengths, 0)
        self.cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        self.row_lengths = list(row_lengths)
        self.row_numbers = [0] * len(row_lengths) if row_numbers is None else list(row_numbers)
        self._references = references
        self.extras = dict(extras)
        self._has = dict(has or {})
        self.optional = frozenset(self._has)

    def __repr__(self) -> str:
        return (
            f"MicroBatch(rows={self.num_rows}, tokens={self.num_tokens}, device={str(self.cu_seqlens.device)!r}, "
            f"columns={list(self.columns)}, extras={list(self.extras)})"
        )

    @cached_property
    def has(self) -> dict[str, Tensor]:
        """[R] bool on the columns' device, by name of a column or of one of `extras`: the rows that have it."""
        every = torch.ones(self.num_rows, dtype=torch.bool, device=self.cu_seqlens.device)
        which = {name: self._has.get(name, every) for name in (*self.columns, *self.extras)}
        return {name: rows.to(self.cu_seqlens.device) for name, rows in which.items()}

    @cached_property
    def references(self) -> list[Reference]:
        """The trajectory of each row: group_id, rollout_index, reward, versions, data_source and more."""
        return list(self._references)

    @property
    def version_spans(self) -> list[tuple[int, int] | None]:
        """The oldest and the newest version that made a trainable token of the row's trajectory; None without one."""
        return [reference.versions for reference in self.references]

    @cached_property
    def position_ids(self) -> Tensor:
        """[N] int64, counts from 0 in every row. Made when first asked for: it weighs as much as two float columns."""
        offsets = self.cu_seqlens.to(torch.int64)
        starts = torch.repeat_interleave(offsets[:-1], torch.diff(offsets), output_size=self.num_tokens)
        return torch.arange(self.num_tokens, device=offsets.device) - starts

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.row_lengths)

    @property
    def num_tokens(self) -> int:
        """N, prompt tokens included."""
        return sum(self.row_lengths)

    def padded(self) -> PaddedBatch:
        """The same columns as [R, T], T the tokens of the longest row."""
        width = max(self.row_lengths, default=0)
        place = torch.arange(width, device=self.cu_seqlens.device)
        mask = place < torch.diff(self.cu_seqlens)[:, None]
        index = torch.where(mask, self.cu_seqlens[:-1, None] + place, self.num_tokens)
        columns = {**self.columns, "position_ids": self.position_ids}
        padded = {name: values_at(index, values) for name, values in columns.items()}
        return PaddedBatch({**padded, "attention_mask": mask}, self.has)

    def prompt_response(self, pad_id: int = 0) -> PromptResponse:
        """The rows as prompts, padded on the left, and responses, padded on the right, both with the id `pad_id`.

        Every column is cut to the response. Rows without a trainable token are left out.
        """
        bounds, num_tokens = self.cu_seqlens.to(torch.int64), self.num_tokens
        trainable = self.columns["response_mask"].bool().nonzero().flatten()
        row_of = torch.searchsorted(bounds, trainable, right=True) - 1
        cuts = torch.full((self.num_rows,), num_tokens, device=bounds.device)
        cuts.scatter_reduce_(0, row_of, trainable, "amin")
        rows = (cuts < num_tokens).nonzero().flatten()
        starts, cut, stops = bounds[rows], cuts[rows], bounds[rows + 1]

        longest_prompt, longest_response = (
            int(lengths.max()) if len(lengths) else 0 for lengths in (cut - starts, stops - cut)
        )
        prompt = cut[:, None] - torch.arange(longest_prompt, 0, -1, device=bounds.device)
        response = cut[:, None] + torch.arange(longest_response, device=bounds.device)
        prompt_mask, response_mask = prompt >= starts[:, None], response < stops[:, None]
        prompt = torch.where(prompt_mask, prompt, num_tokens)
        response = torch.where(response_mask, response, num_tokens)

        ids, attention_mask = self.columns["input_ids"], torch.cat([prompt_mask, response_mask], 1)
        columns = {
            name: values_at(response, values) for name, values in self.columns.items() if name != "input_ids"
        }
        columns |= {
            "prompt_ids": values_at(prompt, ids, pad_id),
            "prompt_mask": prompt_mask,
            "response_ids": values_at(response, ids, pad_id),
            "response_attention_mask": response_mask,
            "input_ids": values_at(torch.cat([prompt, response], 1), ids, pad_id),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0) * attention_mask,
        }
        return PromptResponse(columns, rows, {name: which[rows] for name, which in self.has.items()})


def values_at(index: Tensor, values: Tensor, padding: int = 0) -> Tensor:
    """The values of tokens by their numbers, `padding` for the number after the last one.

    Gathered: torch cannot write unsigned integers by index.
    """
    return torch.cat([values, values.new_full((1, *values.shape[1:]), padding)])[index]


def with_other_columns(micro_batch: MicroBatch, columns: Mapping[str, Tensor]) -> MicroBatch:
    """The same rows with `columns` instead of their own."""
    mb = micro_batch
    return MicroBatch(columns, mb.row_lengths, mb._references, mb.extras, mb.row_numbers, mb._has)


@dataclass(frozen=True)
class Delivered:
    """One trajectory of a batch with its payload and what was computed for it."""

    reference: Reference
    payload: Payload
    outputs: Mapping[str, Array]  # advantages, returns ... one value per token, rows end to end
    staleness: int | None  # in versions; None for a trajectory without one

    def trajectory(self, k: int) -> Trajectory:
        """As a line of an interchange file: everything pushed, and the outputs."""
        return payload_trajectory(
            self.reference, self.payload, self.outputs, batch=k, staleness=self.staleness
        )


@dataclass(frozen=True)
class Batch:
    """Batch k as one rank sees it: iterate over it for this rank's micro-batches, `len(batch)` of them.

    Every rank has the same number of micro-batches; the last ones may be empty. `num_tokens`, `num_rows` and
    `num_trajectories` count the whole batch on all ranks: divide a summed loss by one of them (and multiply it by the
    world size under DDP, which averages). With several ranks they also count trajectories that a rank could not read
    and has left out of its micro-batches.
    """

    version: int
    """k, the model version that is trained; training on the batch makes version k + 1."""
    id: str
    """Tells this batch k from one named after a rollback."""
    micro_batches: list[MicroBatch]
    """This rank's, in the order of the plan."""
    num_tokens: int
    """Trainable tokens of the whole batch as pushed: also those that masks or a correction of the chain take out."""
    num_rows: int
    """Rows of the whole batch."""
    num_trajectories: int
    """Trajectories of the whole batch."""
    kl: float | None
    """Mean KL to the reference policy, of a late column over this rank's share; None if the chain has no KL step.

    By rank 0's the KL coefficient adapts.
    """
    metrics: dict[str, float]
    """Figures to log, by verl's names where it has one: finite floats. docs/reference/batch-metrics.md lists them.

    The same on every rank, but for `timing_s/`, `trainer/` and metrics of steps after a late column, which are the
    rank's own, and `ledger/`, `groups/`, `trajectories/` and `dropped/`, which rank 0 alone has.
    """
    metric_weights: dict[str, float] = field(repr=False)
    """For the library: how many tokens, rows or trajectories are behind each of the chain's figures in `metrics`."""
    layout: Layout = field(repr=False)
    """For the library: the trajectories of the whole batch as arrays."""
    make_delivered: Callable[[], list[Delivered]] = field(repr=False)
    """For the library: makes `delivered`."""

    def __repr__(self) -> str:
        return (
            f"Batch(version={self.version}, id={self.id!r}, micro_batches={len(self.micro_batches)}, "
            f"trajectories={self.num_trajectories}, rows={self.num_rows}, tokens={self.num_tokens})"
        )

    @cached_property
    def references(self) -> list[Reference]:
        """All trajectories of the whole batch, sorted by (group_id, rollout_index). Made when first asked for."""
        return list(References(self.layout))

    @cached_property
    def num_trained_rows(self) -> int:
        """Rows of the whole batch with a trainable token as pushed; by them ROLL divides its means over rows."""
        return int((self.layout.members.rows["trainable"] > 0).sum())

    @cached_property
    def staleness(self) -> list[int]:
        """For each of `references`, k minus the oldest version that made its tokens.

        0 for one that was pushed without a version: it is never stale. `metrics` leave such trajectories out.
        """
        staleness: list[int] = np.nan_to_num(self.layout.members.staleness(self.version)).astype(int).tolist()
        return staleness

    @cached_property
    def delivered(self) -> list[Delivered]:
        """This rank's trajectories with payload and outputs. Made when first asked for: a training loop needs none."""
        return self.make_delivered()

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def trajectories(self) -> Iterator[Trajectory]:
        """This rank's trajectories with all columns and outputs, as interchange files have them."""
        return (item.trajectory(self.version) for item in self.delivered)


# Cutting a share

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
        numbers, cut_columns = rows.tolist(), {}
        for name, values in columns.items():
            parts = [values[start:stop] for start, stop in spans] or [values[:0]]
            # A view if one span holds all the tokens.
            cut_columns[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
        micro_batches.append(
            MicroBatch(
                cut_columns,
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
    bounds, found = offsets(share.own.members.rows["tokens"]), []
    for rows in share.rows:
        first = rows[np.diff(rows, prepend=-2) != 1]  # of each span
        last = rows[np.diff(rows, append=-2) != 1]
        found.append(list(zip(bounds[first].tolist(), bounds[last + 1].tolist(), strict=True)))
    return found
