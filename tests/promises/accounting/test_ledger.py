"""Everything is accounted for: pushed = trained + dropped + dead + queued + in_flight, at every moment."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
from redis.client import Pipeline

from streamadv.cli import main
from streamadv.errors import NoBatchError
from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.store.connection import Connection
from streamadv.trainer import TrainerQueue
from tests.support import (
    compute_all,
    ended,
    group_all,
    join,
    ledger,
    make_overdue,
    problems,
    producing,
    some_of,
    trajectory,
)

SIZE = 3
SHARDS = 2


class Ways:
    """What a run may do next, each a step that some process takes whole; `told` is what producers were answered."""

    def __init__(self, run: Run, producer: Producer, queue: TrainerQueue, chance: random.Random) -> None:
        self.run, self.producer, self.queue, self.chance = run, producer, queue, chance
        self.told = Counter[str]()
        self.open: list[str] = []
        self.begun = 0

    def begin(self) -> None:
        self.begun += 1
        self.open.append(f"g{self.begun}")

    def push(self) -> None:
        """One record of an open group, or a record of it again."""
        if not self.open:
            return self.begin()
        group_id = self.chance.choice(self.open)
        index = self.chance.randrange(SIZE)
        kind = self.chance.choice(["usable", "usable", "usable", "failed", "unscorable"])
        record = {
            "usable": lambda: trajectory(group_id, index, SIZE, model_version=0),
            "unscorable": lambda: trajectory(group_id, index, SIZE, reward=None, model_version=0),
            "failed": lambda: ended(group_id, index, SIZE, "failed"),
        }[kind]()
        self.told.update(self.producer.push([record]).codes)

    def group(self) -> None:
        group_all(self.run)

    def expire(self) -> None:
        """The deadline of a group passes; some of its records come afterwards."""
        if self.open:
            group_all(self.run)
            make_overdue(self.run, self.chance.choice(self.open))
            group_all(self.run)

    def train(self) -> None:
        try:
            self.queue.next_batch(timeout=0)
        except NoBatchError:
            compute_all(self.run)

    def finish(self) -> None:
        """Every slot gets a record, groupers and workers do what there is, and the trainer all that it is given."""
        for group_id in self.open:
            records = [trajectory(group_id, index, SIZE, model_version=0) for index in range(SIZE)]
            self.told.update(self.producer.push(records).codes)
        self.producer.finish()
        group_all(self.run)
        for _ in range(100):
            try:
                if self.queue.next_batch(timeout=0) is None:
                    return
            except NoBatchError:
                compute_all(self.run)
        raise AssertionError("the run does not end")


def check(run: Run, told: Counter[str]) -> None:
    counts = ledger(run)
    assert problems(run) == []
    ends = counts["trained"] + sum(counts["dropped"].values()) + sum(counts["dead"].values())
    assert counts["pushed"] == ends + counts["queued"] + counts["in_flight"]
    assert counts["pushed"] == sum(count for code, count in told.items() if code != "duplicate")


@pytest.mark.slow
@pytest.mark.parametrize("seed", some_of(range(4), 2))
def test_the_ledger_balances_after_every_step_of_every_process(fake: Connection, seed: int) -> None:
    chance = random.Random(seed)
    settings = {
        "shards": SHARDS,
        "partial_min_usable": chance.choice([None, 2]),
        "zero_variance_filter": True,
    }
    with producing(fake, "r", settings) as producer:
        run = join(fake, "r")
        queue = TrainerQueue(
            fake, "r", batch_groups=2, min_groups=1, max_filtered_batches=None, commit="each_batch"
        )
        ways = Ways(run, producer, queue, chance)
        steps = [ways.begin, ways.push, ways.push, ways.push, ways.push, ways.group, ways.expire, ways.train]
        for _ in range(50):
            chance.choice(steps)()
            check(run, ways.told)
        ways.finish()
        check(run, ways.told)
        counts = ledger(run)
        assert (counts["queued"], counts["in_flight"]) == (0, 0)
        assert counts["trained"] > 0


def test_status_check_fails_when_the_ledger_does_not_add_up(
    redis_url: str, producer: Producer, joined: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    producer.push([trajectory()])
    command = ["status", "--redis", redis_url, "--run", joined.name, "--check"]
    assert main(command) == 0
    joined.connection.scripts.hincrby(joined.keys.home.ledger, "pushed", 1)
    assert main(command) == 1
    assert "pushed" in capsys.readouterr().out


def test_a_status_is_of_one_moment_while_everything_runs(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes come between the commands of a pipeline, and not into a transaction."""
    numbers = itertools.count()
    with producing(fake, "r") as producer:
        run = join(fake, "r")

        def push() -> None:
            producer.push([trajectory(f"g{next(numbers)}")])

        def interrupted(pipe: Any, connection: Any, commands: Any, raise_on_error: bool) -> list[Any]:
            with monkeypatch.context() as patch:
                patch.setattr(Pipeline, "_execute_pipeline", at_once)
                replies = []
                for command, options in commands:
                    push()
                    replies.append(fake.scripts.execute_command(*command, **options))
            return replies

        at_once = Pipeline._execute_pipeline  # type: ignore[attr-defined]
        push()
        monkeypatch.setattr(Pipeline, "_execute_pipeline", interrupted)
        assert problems(run, deep=False) == []
