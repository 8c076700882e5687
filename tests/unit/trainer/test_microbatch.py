"""Micro-batches: packed and padded hold the same numbers; what is missing is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.store.connection import Connection
from streamadv.trainer.microbatch import MicroBatch
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.columns import EXTRA_DTYPES, KNOWN_COLUMNS
from streamadv.trajectory.fields import check_names
from tests.shares import examples
from tests.support import delivered_batch, join, producing, push_groups


def micro_batch(lengths: list[int], dtype: str = "<f4", shape: tuple[int, ...] = ()) -> MicroBatch:
    rng = np.random.default_rng(0)
    total = sum(lengths)
    columns = {
        "input_ids": torch.tensor(rng.integers(0, 99, total).astype(np.int32)),
        "extra": torch.tensor(rng.integers(1, 99, (total, *shape)).astype(dtype)),
    }
    return MicroBatch(columns, lengths, [], {})


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), max_size=5),
    dtype=st.sampled_from(sorted(EXTRA_DTYPES)),
    shape=st.sampled_from([(), (2,), (2, 3)]),
)
def test_padded_rows_are_the_packed_ones(lengths: list[int], dtype: str, shape: tuple[int, ...]) -> None:
    packed = micro_batch(lengths, dtype, shape)
    padded = packed.padded()
    width = max(lengths, default=0)
    assert padded.attention_mask.shape == (len(lengths), width)
    assert packed.cu_seqlens.tolist() == [0, *np.cumsum(lengths).tolist()]
    for name, values in packed.columns.items():
        column = getattr(padded, name)
        assert column.dtype == values.dtype
        assert column.shape == (len(lengths), width, *values.shape[1:])
        for row, length in enumerate(lengths):
            start = int(packed.cu_seqlens[row])
            want = values[start : start + length].numpy()
            np.testing.assert_array_equal(column[row, :length].numpy(), want)
            assert not column[row, length:].numpy().any()
            assert padded.attention_mask[row].tolist() == [1] * length + [0] * (width - length)
            assert padded.position_ids[row, :length].tolist() == list(range(length))
    assert padded.attention_mask.dtype == torch.bool


def test_positions_count_from_zero_in_every_row() -> None:
    assert micro_batch([2, 3]).position_ids.tolist() == [0, 1, 0, 1, 2]
    assert micro_batch([2, 3]).num_rows == 2


def test_a_micro_batch_prints_its_sizes() -> None:
    assert repr(micro_batch([2, 3])) == (
        "MicroBatch(rows=2, tokens=5, device='cpu', columns=['input_ids', 'extra'], extras=[])"
    )
    padded = micro_batch([2, 3]).padded()
    assert repr(padded).startswith("PaddedBatch(shape=(2, 3), columns=['input_ids', 'extra',")


def test_a_column_cannot_have_the_name_of_what_a_micro_batch_has_itself() -> None:
    mb = MicroBatch(
        {"input_ids": torch.arange(2), "response_mask": torch.ones(2, dtype=torch.bool)}, [2], [], {}
    )
    for made in (mb, mb.padded(), mb.prompt_response()):
        names = {name for name in dir(made) if not name.startswith("_")} | made.columns.keys()
        for name in names - KNOWN_COLUMNS.keys():
            with pytest.raises(ValueError, match=name):
                check_names([name])


def test_an_empty_micro_batch_keeps_ranks_in_step() -> None:
    empty = micro_batch([])
    assert (empty.num_rows, empty.cu_seqlens.tolist(), len(empty.input_ids)) == (0, [0], 0)
    assert empty.padded().input_ids.shape == (0, 0)


def test_a_missing_column_is_named() -> None:
    batch = micro_batch([2])
    assert "input_ids" in batch
    assert "old_log_probs" not in batch
    with pytest.raises(AttributeError, match="no column old_log_probs: this batch has input_ids, extra"):
        _ = batch.old_log_probs


def test_ids_and_masks_index_tensors_as_they_are(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        push_groups(producer, 1)
    late = {"old_log_probs": _by_index}
    queue = TrainerQueue(fake, "r", batch_groups=1, prefetch=0, late=late, commit="each_batch")
    batch = delivered_batch(queue, join(fake, "r"))
    (mb,) = batch
    for columns in (mb, mb.padded()):
        assert (columns.input_ids.dtype, columns.response_mask.dtype) == (torch.int64, torch.bool)
    assert mb.old_log_probs.tolist() == mb.input_ids.tolist()
    assert mb.advantages[mb.response_mask].shape == (6,)
    assert (~mb.response_mask).sum() == 4
    assert torch.nn.functional.cross_entropy(torch.zeros(mb.num_tokens, 30), mb.input_ids) > 0
    (first, _) = batch.trajectories()
    assert first.rows[0].input_ids.dtype == np.int32, "what travels stays narrow"


def _by_index(mb: MicroBatch) -> torch.Tensor:
    scores = torch.arange(30.0).expand(mb.num_tokens, 30)
    return scores.gather(-1, mb.input_ids[:, None])[:, 0]
