"""A micro-batch as prompts and responses: the layout that TRL, verl, SkyRL and slime train on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .columns import Columns

if TYPE_CHECKING:
    from .microbatch import MicroBatch


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
        super().__init__(columns)
        self.rows = rows
        self.has = has

    def __repr__(self) -> str:
        prompts, responses = (tuple(self.columns[name].shape) for name in ("prompt_ids", "response_ids"))
        return f"PromptResponse(prompts={prompts}, responses={responses}, columns={list(self.columns)})"


def prompt_response(micro_batch: MicroBatch, pad_id: int) -> PromptResponse:
    """As `MicroBatch.prompt_response`."""
    columns, bounds = micro_batch.columns, micro_batch.cu_seqlens.to(torch.int64)
    num_tokens, device = micro_batch.num_tokens, bounds.device
    trainable = columns["response_mask"].bool().nonzero().flatten()
    row_of = torch.searchsorted(bounds, trainable, right=True) - 1
    cuts = torch.full((micro_batch.num_rows,), num_tokens, device=device)
    cuts.scatter_reduce_(0, row_of, trainable, "amin")
    rows = (cuts < num_tokens).nonzero().flatten()
    starts, cut, stops = bounds[rows], cuts[rows], bounds[rows + 1]

    prompt = cut[:, None] - torch.arange(_longest(cut - starts), 0, -1, device=device)
    response = cut[:, None] + torch.arange(_longest(stops - cut), device=device)
    prompt_mask, response_mask = prompt >= starts[:, None], response < stops[:, None]
    # Gathered from the tokens and a padding value after the last one.
    prompt = torch.where(prompt_mask, prompt, num_tokens)
    response = torch.where(response_mask, response, num_tokens)

    ids = columns["input_ids"]
    padded_ids = torch.cat([ids, ids.new_full((1,), pad_id)])
    attention_mask = torch.cat([prompt_mask, response_mask], 1)
    made = {
        name: torch.cat([values, values.new_zeros((1, *values.shape[1:]))])[response]
        for name, values in columns.items()
        if name != "input_ids"
    }
    made |= {
        "prompt_ids": padded_ids[prompt],
        "prompt_mask": prompt_mask,
        "response_ids": padded_ids[response],
        "response_attention_mask": response_mask,
        "input_ids": padded_ids[torch.cat([prompt, response], 1)],
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0) * attention_mask,
    }
    has = {name: which[rows] for name, which in micro_batch.has.items()}
    return PromptResponse(made, rows, has)


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if len(lengths) else 0
