"""A batch that is kept is computed again, bit for bit; or it says where not, or why it cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import streamadv as sa
from streamadv import MicroBatch, cli
from streamadv.algorithms import build_chain, estimator_names, preset_names
from streamadv.algorithms.registry import get_estimator
from streamadv.batch.session import random_job
from streamadv.trainer.late_columns import NEVER_LATE
from streamadv.trajectory.columns import KNOWN_COLUMNS
from tests.support import (
    Run,
    TrainerQueue,
    change_late,
    change_results,
    delivered_batch,
    problems,
    producing,
    push_groups,
    some_of,
    trajectory,
)

from .test_kept import kept_run, train

OWN = {name for name in estimator_names() if get_estimator(name).function.__module__.startswith("tests.")}
CHAINS = [name for name in preset_names() if name not in OWN]
SOURCES = ("math", "code")
Rewind = Callable[..., tuple[int, str]]


@pytest.fixture
def rewound(redis_url: str, run: str, capsys: pytest.CaptureFixture[str]) -> Rewind:
    """`streamadv rewind` of the run: exit status and all lines."""

    def rewind(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()  # what the run has logged before
        where = ("--redis", redis_url, "--run", run)
        status = cli.main(["rewind", "--batch", "0", "--device", "cpu", *arguments, *where])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return rewind


def push(producer: Any, groups: int, seed: int = 0, **fields: Any) -> None:
    """Groups of three with all columns, two rows, steps, several sources, and a baseline."""
    rng = np.random.default_rng(seed)
    for number in range(groups):
        members = []
        for index in range(4):
            rows = []
            for _ in range(2):
                tokens = int(rng.integers(4, 12))
                row = {"input_ids": np.arange(tokens), "response_mask": [0, *[1] * (tokens - 1)]}
                row["rollout_log_probs"] = -rng.random(tokens)
                for name in ("old_log_probs", "ref_log_probs", "teacher_log_probs"):
                    row[name] = row["rollout_log_probs"] - 0.2 * rng.random(tokens)
                for name in ("values", "sum_pi_squared", "token_level_rewards"):
                    row[name] = rng.random(tokens)
                rows.append(row)
            steps = [{"row": 0, "start": 1, "end": 3, "state_key": "a", "reward": 0.5}]
            steps += [{"row": 1, "start": 2, "end": 4, "state_key": "b"}]
            members.append(
                trajectory(
                    f"g{number}", index, 4, rows=rows, steps=steps, reward=float(rng.integers(-2, 3)),
                    rewards={"format": float(rng.integers(2))}, role="baseline" if index == 3 else "train",
                    data_source=SOURCES[number % 2], **fields,
                )
            )  # fmt: skip
        producer.push(members)


@pytest.mark.slow
@pytest.mark.parametrize("chain", some_of(CHAINS, 3))
def test_every_preset_gives_the_same_bits(redis_url: str, run: str, rewound: Rewind, chain: str) -> None:
    joined = kept_run(redis_url, run, shards=2)
    pushed = [name for name in ("old_log_probs", "values") if name in build_chain(chain).needs]
    with producing(redis_url, run) as producer:
        push(producer, 5)
        train(joined, 5, chain, pushed=pushed)
    assert rewound() == (0, "batch 0: 5 groups, 20 rollouts\nbit-identical\n")


def test_all_estimators_are_among_them() -> None:
    given = {
        name for name in estimator_names() if not get_estimator(name).function.__module__.startswith("tests.")
    }
    assert given == {build_chain(name).config.estimator for name in CHAINS}


def trained_by_ranks(joined: Run, world_size: int, chain: Any, **more: Any) -> None:
    """One batch of 7 groups."""
    options: dict[str, Any] = {
        "job": random_job(),
        "batch_groups": 7,
        "tokens_per_micro_batch": 48,
        "commit": "manual",
        "chain": chain,
        **more,
    }
    ranks = [
        TrainerQueue(joined.connection, joined.name, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    for queue, part in [(queue, delivered_batch(queue, joined)) for queue in ranks]:
        queue.trained(part)
    ranks[0].commit(ranks[0].state_dict())
    for queue in ranks:
        queue.close()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("chain", ["grpo", {"estimator": "grpo", "whiten_advantages": True}])
def test_any_number_of_ranks_has_the_same_bits(
    redis_url: str, run: str, rewound: Rewind, world_size: int, chain: Any
) -> None:
    joined = kept_run(redis_url, run, shards=2)
    with producing(redis_url, run) as producer:
        push(producer, 7)
        trained_by_ranks(joined, world_size, chain)
    assert rewound() == (0, "batch 0: 7 groups, 28 rollouts\nbit-identical\n")


RUNNING = {"estimator": "reinforce", "reward": {"mean": "running", "std": "running"}}


def test_moments_of_the_rewards_are_those_of_its_record(redis_url: str, run: str, rewound: Rewind) -> None:
    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        push(producer, 3)
        train(joined, 3, RUNNING)
        push_later = [trajectory("later", index, 2, reward=9.0 + index) for index in range(2)]
        producer.push(push_later)
        train(joined, 1, RUNNING)
    assert rewound("--batch", "1") == (0, "batch 1: 1 group, 2 rollouts\nbit-identical\n")
    assert rewound()[0] == 0


def test_a_bit_that_differs_is_named(redis_url: str, run: str, rewound: Rewind) -> None:
    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        push(producer, 2)
        train(joined, 2, "ppo", pushed=["values"])
    change_results(joined, "g1", "advantages", 3)
    status, out = rewound()
    assert status == 1
    assert out.splitlines()[1].startswith("first difference: group g1, rollout 0, token 3, advantages: kept ")
    assert out.endswith(" differ)\n")
    assert "(1 of " in out


def some_kept(redis_url: str, run: str, chain: Any) -> Run:
    """A run that has kept some of the 12 groups of its batch."""
    joined = kept_run(redis_url, run, keep={"trained": 0.5})
    with producing(redis_url, run) as producer:
        push(producer, 12)
        train(joined, 12, chain)
    return joined


def test_groups_that_are_not_there_are_named(redis_url: str, run: str, rewound: Rewind) -> None:
    some_kept(redis_url, run, "grpo")
    status, out = rewound()
    first, absent, last = out.splitlines()
    there = int(first.split()[2])
    assert (status, last) == (0, "bit-identical")
    assert 0 < there < 12
    assert absent.startswith(f"not there: {12 - there} of 12 groups: g")


def test_a_chain_over_the_batch_needs_all_of_it(redis_url: str, run: str, rewound: Rewind) -> None:
    some_kept(redis_url, run, {"estimator": "grpo", "whiten_advantages": True})
    status, out = rewound()
    assert status == 1
    assert "step advantages of its chain looks at the whole batch, and run" in out
    assert "keep all of them (keep={'trained': 1})" in out
    assert "groups: g" in out
    assert rewound("--chain", "rloo")[0] == 0  # which looks at single groups


def late_values(micro_batch: MicroBatch) -> torch.Tensor:
    """What weights might make of a token: a number of it and of its place."""
    place = torch.cat([torch.arange(int(rows)) for rows in micro_batch.cu_seqlens.diff()])
    return -torch.frac(micro_batch.input_ids.float() * 0.37 + place * 0.11)


def late_of(chain: Any) -> dict[str, Any]:
    """Suppliers of all columns of the chain that the trainer could make."""
    needs = {*build_chain(chain).needs} - {"rollout_log_probs"}
    return dict.fromkeys(needs & {*KNOWN_COLUMNS} - NEVER_LATE, late_values)


@pytest.mark.slow
@pytest.mark.parametrize("chain", some_of([name for name in CHAINS if late_of(name)], 3))
def test_every_preset_gives_the_same_bits_with_late_columns(
    redis_url: str, run: str, rewound: Rewind, chain: str
) -> None:
    joined = kept_run(redis_url, run, shards=2)
    with producing(redis_url, run) as producer:
        push(producer, 5)
        made = train(joined, 5, chain, late=late_of(chain))
    assert problems(joined) == []
    assert rewound() == (0, "batch 0: 5 groups, 20 rollouts\nbit-identical\n")
    assert_kept_as_delivered(joined, made)


def assert_kept_as_delivered(joined: Run, made: Any) -> None:
    """Late columns and what was computed from them can be looked at."""
    kept = {(each.group_id, each.rollout_index): each for each in sa.kept(joined.connection, run=joined.name)}
    for identity, delivered in made.items():
        for row, was in zip(kept[identity].rows, delivered.rows, strict=True):
            assert np.array_equal(row.advantages, was.advantages)
            assert np.array_equal(row.returns, was.returns)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_number_of_ranks_has_the_same_late_bits(
    redis_url: str, run: str, rewound: Rewind, world_size: int
) -> None:
    joined = kept_run(redis_url, run, shards=2)
    with producing(redis_url, run) as producer:
        push(producer, 7)
        trained_by_ranks(joined, world_size, {"estimator": "gae"}, late={"values": late_values})
    assert problems(joined) == []
    assert rewound() == (0, "batch 0: 7 groups, 28 rollouts\nbit-identical\n")


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("chain", CHAINS)
def test_every_preset_gives_the_same_bits_with_late_columns_for_any_number_of_ranks(
    redis_url: str, run: str, rewound: Rewind, chain: str, world_size: int
) -> None:
    joined = kept_run(redis_url, run, shards=2)
    late = late_of(chain)
    if build_chain(chain).cut(frozenset(late))[1].scope != "row":  # several ranks have these columns pushed
        late = {}
    pushed = [
        name for name in ("old_log_probs", "values") if name in build_chain(chain).needs and name not in late
    ]
    with producing(redis_url, run) as producer:
        push(producer, 7)
        trained_by_ranks(joined, world_size, chain, late=late, pushed=pushed)
    assert problems(joined) == []
    assert rewound() == (0, "batch 0: 7 groups, 28 rollouts\nbit-identical\n")


def test_a_batch_that_was_delivered_twice_has_the_late_columns_of_the_second_time(
    redis_url: str, run: str, rewound: Rewind
) -> None:
    joined = kept_run(redis_url, run)
    options: dict[str, Any] = {"batch_groups": 2, "chain": {"estimator": "gae"}, "commit": "manual"}
    with producing(redis_url, run) as producer:
        push(producer, 2)
        first = TrainerQueue(
            joined.connection, run, late={"values": lambda batch: late_values(batch) / 2}, **options
        )
        delivered_batch(first, joined)
        first.close()
        assert problems(joined) == []  # also while it is in flight
        made = train(joined, 2, {"estimator": "gae"}, late={"values": late_values})
    assert problems(joined) == []
    assert rewound()[0] == 0
    assert_kept_as_delivered(joined, made)


def test_a_late_bit_that_differs_is_named(
    redis_url: str, run: str, rewound: Rewind, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        push(producer, 2)
        train(joined, 2, {"estimator": "gae"}, late={"values": late_values})
    change_late(joined, "g1", "values", 1)
    status, out = rewound()
    assert status == 1
    assert "first difference: group g1, rollout 0, token " in out
    assert ", advantages: kept " in out


def test_without_late_columns_the_workers_part_is_compared(redis_url: str, run: str, rewound: Rewind) -> None:
    joined = kept_run(redis_url, run)
    chain = {"estimator": "gae", "reward": {"clip": 1.0}}
    with producing(redis_url, run) as producer:
        producer.push([trajectory("g", index, 2, reward=2.0 * index) for index in range(2)])
        # Rank 1 never gets its part of the batch.
        rank = TrainerQueue(
            joined.connection, run, world_size=2, rank=0, job="j", batch_groups=1, commit="manual", chain=chain,
            late={"values": late_values},
        )  # fmt: skip
        rank.trained(delivered_batch(rank, joined))
        rank.commit(rank.state_dict())
        rank.close()
    status, out = rewound()
    assert status == 0
    assert (
        "late: what the trainer made of values is not kept of 1 rollout; the steps before are compared" in out
    )
    status, out = rewound("--chain", "ppo")
    assert (status, "the chain needs column values, which was not pushed" in out) == (1, True)


def test_another_chain_has_the_late_columns(redis_url: str, run: str, rewound: Rewind) -> None:
    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        producer.push([trajectory("g", index, 2, reward=2.0 * index) for index in range(2)])
        train(joined, 1, {"estimator": "gae"}, late={"values": late_values})
    status, out = rewound("--chain", "ppo")
    assert (status, " of 6" in out) == (0, True)


def test_another_chain_says_what_would_have_changed(
    redis_url: str, run: str, rewound: Rewind, tmp_path: Path
) -> None:
    joined = kept_run(redis_url, run)
    with producing(redis_url, run) as producer:
        for source, rewards in (("code", [0.0, 0.0]), ("math", [0.0, 1.0])):
            producer.push(
                [trajectory(source, i, 2, reward=r, data_source=source) for i, r in enumerate(rewards)]
            )
        train(joined, 2, {"estimator": "reinforce"})
    chain = tmp_path / "chain.json"
    chain.write_text(json.dumps({"estimator": "rloo", "masks": {"difficulty_low": 0.1}}))
    status, out = rewound("--chain", str(chain))
    rows = [line.split("  ") for line in out.splitlines()[1:]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert status == 0
    assert cells == [
        ["data source", "groups", "that learn", "tokens", "effective", "opposite sign"],
        ["code", "1", "0 -> 0", "6 -> 0", "6.0 -> 0.0", "0 of 0"],
        ["math", "1", "1 -> 1", "6 -> 6", "6.0 -> 6.0", "0 of 6"],
    ]
    assert "--chain nowhere.json: no such file" in rewound("--chain", "nowhere.json")[1]


def test_nothing_of_the_batch_is_kept(redis_url: str, run: str, rewound: Rewind) -> None:
    kept_run(redis_url, run)
    status, out = rewound("--batch", "7")
    assert status == 1
    assert "no group of batch 7 is kept in run" in out


def test_a_batch_that_was_trained_on_twice_is_the_last_one(redis_url: str, run: str, rewound: Rewind) -> None:
    joined = kept_run(redis_url, run)
    options: dict[str, Any] = {"chain": "grpo", "commit": "manual"}
    before: dict[str, Any] = {}
    for prefix, groups in (("a", 2), ("b", 3)):
        queue = TrainerQueue(joined.connection, run, batch_groups=groups, **options)
        if before:
            queue.load_state_dict(before)
        with producing(redis_url, run) as producer:
            push_groups(producer, groups, prefix=prefix)
            batch = delivered_batch(queue, joined)
        before = before or queue.state_dict()
        queue.trained(batch)
        queue.commit(queue.state_dict())
        queue.close()
    assert rewound()[1].startswith("batch 0: 3 groups")
