"""A training job that restarts with another number of ranks gets the same batches, planned anew."""

from __future__ import annotations

import pytest

from streamadv.connection import Connection
from streamadv.microbatch import Batch
from streamadv.trainer_queue import TrainerQueue
from tests.support import identities, join, ledger, next_batch, problems, producing, push_groups


def delivered(batch: Batch) -> list[tuple[str, int]]:
    return identities([item.reference for item in batch.delivered])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
def test_another_world_size_after_a_restart(redis_url: str, run: str, before: int, after: int) -> None:
    connection = Connection(redis_url)
    with producing(connection, run) as producer:
        push_groups(producer, 6, size=3)
        producer.finish()
    joined = join(connection, run)

    def job(world_size: int, state: dict[str, object] | None) -> list[TrainerQueue]:
        """The ranks of a job, as one process group would start them: rank 0 first."""
        ranks: list[TrainerQueue] = []
        for rank in range(world_size):
            epoch = ranks[0].epoch if ranks else None
            queue = TrainerQueue(
                connection,
                run,
                rank=rank,
                world_size=world_size,
                batch_groups=2,
                commit="manual",
                epoch=epoch,
            )
            if state is not None:
                queue.load_state_dict(state)
            ranks.append(queue)
        return ranks

    def step(ranks: list[TrainerQueue]) -> list[tuple[str, int]]:
        """One batch on every rank; what the ranks got together."""
        parts = [next_batch(queue, joined) for queue in ranks]
        members: list[tuple[str, int]] = []
        for queue, part in zip(ranks, parts, strict=True):
            assert part is not None
            assert len(part) == len(parts[0] or ())  # the same number of micro-batches
            members += delivered(part)
            queue.trained(part)
        return members

    first = job(before, None)
    start = step(first)
    state = first[0].state_dict()
    lost = [step(first), step(first)]  # trained after the checkpoint, by weights that are gone
    second = job(after, state)
    again = [step(second), step(second)]
    assert [sorted(part) for part in again] == [sorted(part) for part in lost]
    everything = start + again[0] + again[1]
    assert len(everything) == len(set(everything)) == 18
    second[0].commit(second[0].state_dict())
    assert ledger(joined)["trained"] == 18
    assert problems(joined) == []
