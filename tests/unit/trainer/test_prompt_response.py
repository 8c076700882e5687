"""Prompts and responses: a loop over the rows writes the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.store.connection import Connection
from streamadv.trainer.microbatch import MicroBatch, PromptResponse
from streamadv.trainer.queue import TrainerQueue
from tests.shares import examples
from tests.support import delivered_batch, join, next_batch, producing, push_groups, trajectory

PAD = 77


def micro_batch(masks: list[list[bool]]) -> MicroBatch:
    rng = np.random.default_rng(0)
    total = sum(map(len, masks))
    columns = {
        "input_ids": torch.tensor(rng.integers(0, 50, total)),
        "response_mask": torch.tensor([value for mask in masks for value in mask], dtype=torch.bool),
        "advantages": torch.tensor(rng.normal(size=total), dtype=torch.float32),
        "experts": torch.tensor(rng.integers(1, 9, (total, 2, 3)), dtype=torch.uint8),
    }
    return MicroBatch(columns, [len(mask) for mask in masks], [], {})


def by_row(mb: MicroBatch, name: str) -> list[list[object]]:
    bounds = mb.cu_seqlens.tolist()
    return [mb.columns[name][a:b].tolist() for a, b in pairwise(bounds)]


@settings(max_examples=examples(100), deadline=None)
@given(masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=6), max_size=5))
def test_rows_are_cut_at_their_first_trainable_token(masks: list[list[bool]]) -> None:
    mb = micro_batch(masks)
    cut = mb.prompt_response(PAD)
    kept = [row for row, mask in enumerate(masks) if any(mask)]
    assert cut.rows.tolist() == kept
    first = [masks[row].index(True) for row in kept]
    longest_prompt = max(first, default=0)
    longest = max((len(masks[row]) - at for row, at in zip(kept, first, strict=True)), default=0)
    assert cut.prompt_ids.shape == cut.prompt_mask.shape == (len(kept), longest_prompt)
    assert cut.response_ids.shape == (len(kept), longest)
    ids, experts = by_row(mb, "input_ids"), by_row(mb, "experts")
    for place, (row, at) in enumerate(zip(kept, first, strict=True)):
        left, right = longest_prompt - at, longest - (len(masks[row]) - at)
        assert cut.prompt_ids[place].tolist() == [PAD] * left + ids[row][:at]
        assert cut.prompt_mask[place].tolist() == [False] * left + [True] * at
        assert cut.response_ids[place].tolist() == ids[row][at:] + [PAD] * right
        assert cut.response_mask[place].tolist() == masks[row][at:] + [False] * right
        assert cut.response_attention_mask[place].tolist() == [True] * (longest - right) + [False] * right
        assert cut.input_ids[place].tolist() == [PAD] * left + ids[row] + [PAD] * right
        tokens = len(masks[row])
        assert cut.attention_mask[place].tolist() == [False] * left + [True] * tokens + [False] * right
        assert cut.position_ids[place].tolist() == [0] * left + [*range(tokens)] + [0] * right
        assert cut.experts[place].tolist() == experts[row][at:] + [[[0] * 3] * 2] * right
    dtypes = {name: cut.columns[name].dtype for name in ("response_ids", "response_mask", "experts")}
    if masks:
        assert dtypes == {"response_ids": torch.int64, "response_mask": torch.bool, "experts": torch.uint8}


def test_sums_over_trainable_tokens_are_those_of_the_packed_rows() -> None:
    mb = micro_batch([[False, True, False, True], [False, False], [True]])
    cut = mb.prompt_response()
    assert cut.advantages[cut.response_mask].tolist() == mb.advantages[mb.response_mask].tolist()


def test_it_prints_its_sizes() -> None:
    cut = micro_batch([[False, True, True], [False, False, True]]).prompt_response()
    assert isinstance(cut, PromptResponse)
    assert repr(cut).startswith("PromptResponse(prompts=(2, 2), responses=(2, 2), columns=['response_mask', ")


def test_a_row_is_named_by_trajectory_and_number(fake: Connection) -> None:
    rows = [
        {"input_ids": [1, 2, 3], "response_mask": [0, 1, 1]},
        {"input_ids": [4, 5], "response_mask": [0, 0]},
    ]
    with producing(fake, "r") as producer:
        producer.push(
            [
                trajectory("g", 0, 2, rows=rows, model_version=(0, 2)),
                trajectory("g", 1, 2, model_version=None),
            ]
        )
    batch = next_batch(
        TrainerQueue(fake, "r", batch_groups=1, prefetch=0, max_staleness=None), join(fake, "r")
    )
    assert batch is not None
    (mb,) = batch
    names = [(each.rollout_index, number) for each, number in zip(mb.references, mb.row_numbers, strict=True)]
    assert names == [(0, 0), (0, 1), (1, 0)]
    assert mb.version_spans == [(0, 2), (0, 2), None]
    cut = mb.prompt_response()
    assert cut.rows.tolist() == [0, 2], "the second row has nothing to train on"


@pytest.mark.parametrize("keep", [True, False])
def test_groups_stay_in_one_micro_batch_if_that_is_asked_for(fake: Connection, keep: bool) -> None:
    with producing(fake, "r") as producer:
        push_groups(producer, 4, size=3)
    budget = {"tokens_per_micro_batch": 20, "keep_groups": keep}
    batch = delivered_batch(TrainerQueue(fake, "r", batch_groups=4, prefetch=0, **budget), join(fake, "r"))
    places: dict[str, set[int]] = {}
    for number, mb in enumerate(batch):
        for reference in mb.references:
            places.setdefault(reference.group_id, set()).add(number)
    assert all(len(numbers) == 1 for numbers in places.values()) == keep
