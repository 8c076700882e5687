"""Rows of a batch as verl's workers read them: prompt and response apart, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from ...trainer.microbatch import Batch, MicroBatch
from ...trajectory.members import Reference
from .. import ROUTED_EXPERTS, trained_rows

#: An extra column with one number for each row: turns of the conversation, as verl counts them.
NUM_TURNS: Final = "num_turns"


@dataclass(frozen=True)
class Row:
    """A row of P prompt and R response tokens; a column of the response has R entries, entry t is of token t.

    | field | shape | |
    |---|---|---|
    | `prompts`, `responses`, `input_ids` | [P], [R], [P + R] int64 | |
    | `position_ids` | [P + R] int64, or [4, P + R] | from 0; with channels for models whose positions have them |
    | `response_mask`, `loss_mask` | [R] int64 | 1 = trained on |
    | `rollout_log_probs` | [R] float32 | if pushed |
    | `rm_scores` | [R] float32 | the trajectory's reward, at the last token |
    | `routed_experts` | [P + R, layers, top k] | if pushed |
    | `uid`, `data_source`, `num_turns` | | of the group, of the trajectory |
    """

    key: str
    """`{uid}_{rollout_index}_{row number}`, as verl names rows."""
    fields: Mapping[str, Any]
    tag: Mapping[str, Any]
    outputs: Mapping[str, Tensor]
    """What the chain has computed, [R] float32 each: `advantages`, `returns`, `rollout_is_weights`."""


#: Channels of the positions of a model that reads images: of text, time, height and width.
ROPE_CHANNELS: Final = 4


def rows_of(
    batch: Batch, global_steps: int, updates_per_sync: int, has_rope_channels: bool = False
) -> list[Row]:
    """The rows of a batch that have a trainable token. A first token is none: nothing comes before it.

    global_steps: of verl, whose versions of weights count syncs, each after `updates_per_sync` batches.
    has_rope_channels: of the model's positions. Rows are text, of which all channels count alike.
    """
    return [row for mb in batch for row in _rows_of(mb, global_steps, updates_per_sync, has_rope_channels)]


def uid_of(group_id: str) -> str:
    """The group's id without underscores, at which verl splits keys; different for different ids."""
    return group_id.replace("%", "%25").replace("_", "%5F")


def as_fields(rows: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Fields of rows, each with the same names, as TransferQueue takes them: tensors as jagged ones."""
    made = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if isinstance(values[0], Tensor):
            made[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        else:
            made[name] = NonTensorStack(*values)
    return TensorDict(made, batch_size=[len(rows)])


def _rows_of(
    mb: MicroBatch, global_steps: int, updates_per_sync: int, has_rope_channels: bool
) -> Iterator[Row]:
    columns = {name: column for name, column in mb.columns.items() if name not in mb.optional}
    references = mb.references
    turns = None if NUM_TURNS in mb.optional else mb.extras.get(NUM_TURNS)
    outputs = {
        name: columns[name] for name in ("advantages", "returns", "rollout_is_weights") if name in columns
    }
    if "sample_weights" in columns and "advantages" in outputs:
        outputs["advantages"] = outputs["advantages"] * columns["sample_weights"]
    for number, start, cut, stop in trained_rows(mb):
        reference = references[number]
        mask = columns["response_mask"][cut:stop].long()
        uid = uid_of(reference.group_id)
        positions, scores = torch.arange(stop - start), torch.zeros(stop - cut)
        scores[-1] = reference.reward or 0.0
        fields = {
            "uid": uid,
            "prompts": columns["input_ids"][start:cut],
            "responses": columns["input_ids"][cut:stop],
            "input_ids": columns["input_ids"][start:stop],
            "position_ids": positions.repeat(ROPE_CHANNELS, 1) if has_rope_channels else positions,
            "response_mask": mask,
            "loss_mask": mask,
            "rm_scores": scores,
            "data_source": reference.data_source or "unknown",
            "num_turns": int(turns[number][0]) if turns else _turns(mask),
        }
        if "rollout_log_probs" in columns:
            fields["rollout_log_probs"] = columns["rollout_log_probs"][cut:stop]
        if ROUTED_EXPERTS in columns:
            fields[ROUTED_EXPERTS] = columns[ROUTED_EXPERTS][start:stop]
        yield Row(
            key=f"{uid}_{reference.rollout_index}_{mb.row_numbers[number]}",
            fields=fields,
            tag=_tag(reference, cut - start, stop - cut, global_steps, updates_per_sync),
            outputs={name: column[cut:stop] for name, column in outputs.items()},
        )


def _tag(
    reference: Reference, prompt: int, response: int, global_steps: int, updates_per_sync: int
) -> dict[str, Any]:
    """verl's figures of a row. One without a version counts as played with the newest weights."""
    oldest = newest = global_steps - 1
    if reference.versions is not None:
        oldest, newest = (version // updates_per_sync for version in reference.versions)
    return {
        "status": "success",
        "prompt_len": prompt,
        "response_len": response,
        "seq_len": prompt + response,
        "global_steps": oldest,
        "min_global_steps": oldest,
        "max_global_steps": newest,
    }


def _turns(mask: Tensor) -> int:
    """A question and an answer for each run of trainable tokens."""
    return 2 * int((torch.diff(mask, prepend=mask.new_zeros(1)) == 1).sum())
