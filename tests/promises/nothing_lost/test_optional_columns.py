"""A column that a part of a batch was pushed without is delivered, and says which rows have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamadv.errors import TrajectoryError
from streamadv.store.connection import Connection
from streamadv.trainer.microbatch import Batch, MicroBatch
from streamadv.trainer.queue import TrainerQueue
from tests.support import delivered_batch, join, producing, trajectory

FULL: dict[str, Any] = {
    "ref_log_probs": [-0.5, -0.25, -1.0, -1.5, -2.0],
    "entropy": np.array([0.5, 1.5, 2.5, 3.5, 4.5], np.float32),
    "pixels": {"data": np.arange(4, dtype=np.uint8), "per_token": False},
}


def batch_of(connection: Connection, groups: dict[str, list[dict[str, Any]]], **options: Any) -> Batch:
    with producing(connection, "r") as producer:
        for group_id, members in groups.items():
            given = [{"ref_log_probs": None, **fields} for fields in members]
            size = len(members)
            producer.push([trajectory(group_id, index, size, **one) for index, one in enumerate(given)])
    options = {"batch_groups": len(groups), "prefetch": 0, **options}
    return delivered_batch(TrainerQueue(connection, "r", **options), join(connection, "r"))


def rows_with(mb: MicroBatch, name: str) -> list[str]:
    return [each.group_id for each, has in zip(mb.references, mb.has[name].tolist(), strict=True) if has]


def test_rows_that_lack_a_column_read_0(fake: Connection) -> None:
    [mb] = batch_of(fake, {"a": [FULL, FULL], "b": [{}, {}]})
    assert mb.optional == {"ref_log_probs", "entropy", "pixels"}
    for name in mb.optional:
        assert rows_with(mb, name) == ["a", "a"]
    for name in mb.columns.keys() - mb.optional:
        assert rows_with(mb, name) == ["a", "a", "b", "b"]
    bounds = mb.cu_seqlens.tolist()
    for row, reference in enumerate(mb.references):
        span = slice(bounds[row], bounds[row + 1])
        is_full = reference.group_id == "a"
        assert mb.ref_log_probs[span].tolist() == ([-0.5, -0.25, -1.0, -1.5, -2.0] if is_full else [0.0] * 5)
        assert mb.entropy[span].tolist() == ([0.5, 1.5, 2.5, 3.5, 4.5] if is_full else [0.0] * 5)
        pixels = mb.extras["pixels"][row]
        assert pixels.tolist() == [0, 1, 2, 3] if is_full else pixels is None


def test_one_member_of_a_group_may_lack_it(fake: Connection) -> None:
    [mb] = batch_of(fake, {"a": [FULL, {}]})
    full = [reference.rollout_index == 0 for reference in mb.references]
    assert mb.has["entropy"].tolist() == full
    assert mb.padded().has["entropy"].tolist() == full
    assert mb.prompt_response().has["entropy"].tolist() == full


def test_all_ranks_and_micro_batches_have_the_same_columns(fake: Connection) -> None:
    batch = batch_of(fake, {"a": [FULL, FULL], "b": [{}, {}]}, tokens_per_micro_batch=5)
    assert len(batch) == 4
    assert len({(tuple(mb.columns), mb.optional) for mb in batch}) == 1


def test_what_is_written_to_a_file_has_what_was_pushed(fake: Connection) -> None:
    batch = batch_of(fake, {"a": [FULL, FULL], "b": [{}, {}]})
    for line in batch.trajectories():
        [row] = line.rows
        assert (row.ref_log_probs is not None) == ("entropy" in row.extras) == (line.group_id == "a")


def test_a_late_column_takes_the_place_of_one_that_some_have(fake: Connection) -> None:
    seen = []

    def ref_log_probs(mb: MicroBatch) -> Any:
        seen.append(rows_with(mb, "ref_log_probs"))
        return mb.response_mask * -1.0

    [mb] = batch_of(fake, {"a": [FULL, FULL], "b": [{}, {}]}, late={"ref_log_probs": ref_log_probs})
    assert seen == [["a", "a"]]
    assert "ref_log_probs" not in mb.optional
    assert rows_with(mb, "ref_log_probs") == ["a", "a", "b", "b"]


@pytest.mark.parametrize("name", ["has", "optional"])
def test_no_column_takes_the_name(fake: Connection, name: str) -> None:
    with pytest.raises(TrajectoryError, match=f"'{name}' is what every micro-batch has by itself"):
        batch_of(fake, {"a": [{name: [1, 2, 3, 4, 5]}, {}]})
