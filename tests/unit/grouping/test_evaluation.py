"""Groups of role eval: admitted whatever the trainer does, in no batch, their rewards kept by version and source."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from typing import Any

import pytest

from streamadv.cli.status import lines_of
from streamadv.errors import Busy, TrajectoryError
from streamadv.grouping import grouper
from streamadv.producer import Producer
from streamadv.producer.tickets import Ticket
from streamadv.run import Run
from streamadv.status import read_status
from streamadv.status.evaluations import Evaluation, newest, read_evaluations
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    consumer_of,
    delivered_batch,
    group_all,
    join,
    ledger,
    logged,
    make_overdue,
    payload_keys,
    problems,
    producing,
    trajectory,
    unscored,
)

COLUMNS: dict[str, Any] = {"input_ids": [1, 2], "response_mask": [0, 1]}


def evaluate(producer: Producer, rewards: list[float | None], **options: Any) -> str:
    """One evaluation group with these rewards; None: a rollout that fails."""
    version = {"model_version": options.pop("version")} if "version" in options else {}
    with producer.group(len(rewards), role="eval", timeout=0, **options) as group:
        for rollout, reward in zip(group, rewards, strict=True):
            if reward is None:
                rollout.fail()
            else:
                rollout.push(**COLUMNS, reward=reward, **version)
    return group.group_id


def shown(run: Run) -> dict[tuple[str, int | None], Evaluation]:
    return {(each.data_source, each.version): each for each in read_evaluations(run)}


def test_an_evaluation_group_ends_as_dropped_and_shows_its_rewards(fake: Connection) -> None:
    with producing(fake, "r", {"zero_variance_filter": True}) as producer:
        run = join(fake, "r")
        evaluate(producer, [1.0, 0.0, 1.0, None], data_source="math")
        evaluate(producer, [1.0, 1.0], data_source="math")
        evaluate(producer, [None, None], data_source="code")
        assert group_all(run) == ["eval"] * 3
    assert ledger(run)["dropped"] == {"eval": 5, "failed": 3}
    assert ledger(run)["queued"] == 0
    _, figures, dropped, *_ = lines_of(read_status(run), run.manifest)  # for people it is no loss
    assert figures.strip().startswith("pushed 8 = trained 0 + evaluated 5 + dropped 3 + dead 0 + queued 0")
    assert dropped.strip() == "dropped: failed 3"
    assert (logged(run), payload_keys(run), problems(run)) == ({}, [], [])
    math_0, code_0 = shown(run)["math", 0], shown(run)["code", 0]
    assert (math_0.groups, math_0.trajectories, math_0.failed) == (2, 5, 1)
    assert (math_0.mean, math_0.best, math_0.min, math_0.max) == (0.8, 1.0, 0.0, 1.0)
    assert (code_0.groups, code_0.failed, code_0.mean, code_0.std_error) == (0, 2, None, None)
    assert newest(read_evaluations(run)) == [math_0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shards", [1, 3])
def test_mean_and_standard_error_are_those_of_groups_of_any_size(
    fake: Connection, seed: int, shards: int
) -> None:
    chance = random.Random(seed)
    groups = [[chance.gauss(5, 2) for _ in range(chance.randint(1, 6))] for _ in range(12)]
    with producing(fake, "r", {"shards": shards}) as producer:
        for rewards in groups:
            evaluate(producer, [*rewards], data_source="s")
        run = join(fake, "r")
        group_all(run)
    (found,) = shown(run).values()
    n, mean = sum(map(len, groups)), statistics.fmean(itertools.chain(*groups))
    squares = sum((sum(rewards) - len(rewards) * mean) ** 2 for rewards in groups)
    assert found.mean == pytest.approx(mean)
    assert found.std_error == pytest.approx(math.sqrt(squares * 12 / 11) / n)
    assert found.best == pytest.approx(statistics.fmean(map(max, groups)))
    assert (found.min, found.max) == (min(map(min, groups)), max(map(max, groups)))


def test_the_standard_error_of_single_rollouts_is_the_usual_one(fake: Connection) -> None:
    rewards = [0.0, 1.0, 1.0, 0.5]
    with producing(fake, "r") as producer:
        for reward in rewards:
            evaluate(producer, [reward])
        run = join(fake, "r")
        group_all(run)
    assert shown(run)["", 0].std_error == pytest.approx(statistics.stdev(rewards) / 2)


def test_a_take_that_is_repeated_counts_an_evaluation_once(fake: Connection) -> None:
    """The reply was lost, or a grouper that was thought dead wakes up."""
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        producer.push([trajectory("e", index, role="eval", data_source="math") for index in range(2)])
        entries = consumer_of(run).read(10)
        assert [grouper.take(run, entries) for _ in range(2)] == [["eval"], []]
    assert ledger(run)["dropped"] == {"eval": 2}
    (math_,) = read_evaluations(run)
    assert (math_.groups, math_.trajectories) == (1, 2)
    assert problems(run) == []


def test_evaluation_is_admitted_while_training_is_not_and_does_not_hold_it_up(fake: Connection) -> None:
    with producing(fake, "r", {"batch_groups": 1, "max_staleness": 0}) as producer:
        run = join(fake, "r")
        evaluations = [producer.begin_group(1, role="eval", timeout=0) for _ in range(5)]
        training = producer.begin_group(1, timeout=0)
        with pytest.raises(Busy, match="max_staleness"):
            producer.begin_group(1, timeout=0)
        producer.begin_group(1, role="eval", timeout=0)
        with pytest.raises(Busy):
            producer.push([trajectory("t", 0, 1)])
        assert producer.push([trajectory("e", 0, 1, role="eval")]).codes == ["pushed"]
        assert problems(run) == []
        for group in (*evaluations, training):
            group.cancel(1)
        assert sorted(group_all(run)) == ["eval"] * 6 + ["incomplete"]
        producer.begin_group(1, timeout=0)
        assert problems(run) == []


def test_evaluation_counts_in_the_byte_budget(fake: Connection) -> None:
    with producing(fake, "r", {"max_bytes": 4 << 20, "max_trajectory_bytes": 2 << 20}) as producer:
        producer.begin_group(2, role="eval", timeout=0)
        with pytest.raises(Busy, match="max_bytes"):
            producer.begin_group(1, role="eval", timeout=0)


def test_withdrawn_and_abandoned_evaluation_groups_leave_the_counts_right(fake: Connection) -> None:
    with producing(fake, "r", {"batch_groups": 1, "max_staleness": 0}) as producer:
        run = join(fake, "r")
        groups = producer.groups(1, role="eval", ahead=1)
        next(groups).cancel(1)
        groups.close()  # type: ignore[attr-defined]
        left = producer.begin_group(1, role="eval", timeout=0)
        name = producer._logic.membership.name
        shard = run.home
        assert (
            shard.call("abandon", [name, left.group_id], group_hashes=[shard.keys.group(left.group_id)]) == 0
        )
        assert problems(run) == []
        make_overdue(run, left.group_id)
        assert group_all(run) == ["eval"]
        producer.begin_group(1, timeout=0)
    assert problems(run) == []


def test_a_group_that_expires_shows_what_it_has(fake: Connection) -> None:
    with producing(fake, "r", {"keep_bytes": 0}) as producer:
        run = join(fake, "r")
        producer.push([trajectory("g", 0, 3, role="eval"), unscored("g", 1, 3, role="eval")])
        make_overdue(run, "g")
        group_all(run)
        group_all(run)
    (found,) = shown(run).values()
    assert (found.trajectories, found.failed) == (1, 2)
    assert ledger(run)["dropped"] == {"eval": 2}
    assert (payload_keys(run), problems(run)) == ([], [])


def test_rewards_that_come_later_count_whatever_filters_judge(fake: Connection) -> None:
    with producing(fake, "r", {"filter_by": "acc", "difficulty_low": 0.0}) as producer:
        run = join(fake, "r")
        producer.push([unscored("g", index, 2, role="eval", rewards={"acc": 0.0}) for index in range(2)])
        group_all(run)
        producer.score("g", 0, 3.0, {"acc": 0.0})
        producer.score("g", 1, None)
        group_all(run)
    (found,) = shown(run).values()
    assert (found.mean, found.trajectories, found.failed) == (3.0, 1, 1)
    assert problems(run) == []


def test_the_version_is_the_oldest_that_its_rollouts_were_played_with(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        fake.scripts.hset(run.keys.home.trainer, "version", "7")
        versions = [(1 << 40, 1 << 41), (1 << 40) + 1]
        members = [trajectory("g", i, 2, role="eval", model_version=v) for i, v in enumerate(versions)]
        producer.push(members)
        producer.push([trajectory("none", 0, 1, role="eval", model_version=None)])
        evaluate(producer, [0.5])  # its ticket says 7
        evaluate(producer, [None])  # so does that of one without rewards
        group_all(run)
    assert set(shown(run)) == {("", 1 << 40), ("", None), ("", 7)}
    assert shown(run)["", 7].failed == 1


def rounds(run: Run) -> list[tuple[str | None, str | None, int, float | None]]:
    """(round, versions, groups with a reward, mean) of each, in their order."""
    return [(each.round, each.versions, each.groups, each.mean) for each in read_evaluations(run)]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_round_stays_together_when_the_weights_move(fake: Connection, shards: int) -> None:
    with producing(fake, "r", {"shards": shards}) as producer:
        run = join(fake, "r")
        for number in range(8):
            evaluate(producer, [0.0, 1.0], round="step-100", version=34 + (number == 7))
        evaluate(producer, [1.0, None], round="step-200", version=(60, 62))
        evaluate(producer, [1.0], version=34)
        evaluate(producer, [0.0], version=35)
        evaluate(producer, [0.5], round="no-version", version=None)
        group_all(run)
    assert rounds(run) == [
        ("no-version", None, 1, 0.5),
        (None, "34", 1, 1.0),
        (None, "35", 1, 0.0),
        ("step-100", "34..35", 8, 0.5),
        ("step-200", "60..62", 1, 1.0),
    ]
    (last,) = newest(read_evaluations(run))
    assert (last.round, last.oldest_version, last.version) == ("step-200", 60, 62)
    assert (last.trajectories, last.failed, last.best, last.min, last.max) == (1, 1, 1.0, 1.0, 1.0)
    assert problems(run) == []


def test_rounds_of_one_version_are_in_the_order_of_their_play(
    fake: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a trainer, for instance, every version is 0."""
    with producing(fake, "r") as producer:
        run, begun = join(fake, "r"), time.time()
        for number, name in enumerate(("b", "a", "c", "b")):
            monkeypatch.setattr(time, "time", lambda at=begun + number: at)  # the server's clock
            evaluate(producer, [float(number)], round=name)
        group_all(run)
    assert [each.round for each in read_evaluations(run)] == ["a", "c", "b"]
    assert [each.round for each in newest(read_evaluations(run))] == ["b"]


def test_a_round_travels_with_tickets_and_with_records(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        group = producer.begin_group(2, role="eval", round="a", data_source="x y", timeout=0)
        texts = [ticket.to_json() for ticket in group.tickets]
        fake.scripts.flushall()  # what is pushed opens the group again, in its round
        producer._drive(producer._logic.heartbeat())
        producer.rollout(Ticket.from_json(texts[0])).push(**COLUMNS, reward=0.5)
        producer.rollout(Ticket.from_json(texts[1])).push(
            **COLUMNS, reward=0.5, status="truncated", rewards={}
        )
        producer.push([trajectory("b", 0, 1, role="eval", round="b")])
        producer.push([trajectory("bare", 0, 1, role="eval")])
        next(producer.groups(1, role="eval", round="c")).push(
            [{**COLUMNS, "reward": 1.0, "rollout_index": 0}]
        )
        group_all(run)
    assert {(each.round, each.data_source) for each in read_evaluations(run)} == {
        *(("a", "x y"), ("b", ""), (None, ""), ("c", ""))
    }


def test_a_round_is_of_evaluation_and_has_a_name(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        with pytest.raises(TrajectoryError, match=r"round 'a' stands beside role train, needs role eval"):
            producer.begin_group(1, round="a")
        for wrong in ("", "step 100", "a\n", "x" * 201, 100):
            with pytest.raises(TrajectoryError, match=r"^group: round: "):
                producer.begin_group(1, role="eval", round=wrong)  # type: ignore[arg-type]
        group = producer.begin_group(1, role="eval", timeout=0)
        with pytest.raises(TrajectoryError, match=r"round is 'a', group .* None: give it to producer\.group"):
            next(iter(group)).push(**COLUMNS, reward=1.0, round="a")
        assert producer.begin_group(1, role="eval", round="ä" * 200, timeout=0).tickets[0].round == "ä" * 200


def test_so_many_rounds_are_kept(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        evals, sums = run.keys.home.evals, " ".join(["1"] * 10)
        stored = {f"round r{i} s{j}": f"{sums} 0 {i} {i}" for i in range(500) for j in range(2)}
        fake.scripts.hset(evals, mapping=stored)
        evaluate(producer, [1.0], round="r7", data_source="s0", version=7)
        group_all(run)
        assert fake.scripts.hlen(evals) == 1000
        for name in ("new", "newer"):
            evaluate(producer, [1.0], round=name, version=500)
            group_all(run)
        names = {each.round for each in read_evaluations(run)}
        assert names == {*(f"r{i}" for i in range(1, 500)), "new", "newer"}
        evaluate(producer, [1.0], version=0)  # a round that went hides no version
        group_all(run)
        assert (None, "0", 1, 1.0) in rounds(run)


def test_a_foreign_round_of_a_group_is_not_read(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        for foreign in ("x" * 5000, "two words", ""):
            group = producer.begin_group(1, role="eval", round="a", timeout=0)
            fake.scripts.hset(run.keys.home.group(group.group_id), "round", foreign)
            next(iter(group)).push(**COLUMNS, reward=1.0)
        group_all(run)
        fake.scripts.hset(run.keys.home.evals, mapping={"round a": "1", "round b c": "x", "round d ": "1 2"})
    assert rounds(run) == [(None, "0", 3, 1.0)]


def test_roles_are_not_mixed_in_a_group(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        group = producer.begin_group(2, role="eval", group_id="e", timeout=0)
        for role in ("train", "baseline"):
            with pytest.raises(TrajectoryError, match=f"role is {role} .*begun with role='eval'"):
                next(iter(group)).push(**COLUMNS, reward=1.0, role=role)
        with pytest.raises(TrajectoryError, match="role is eval"):
            next(iter(producer.begin_group(2, timeout=0))).push(**COLUMNS, reward=1.0, role="eval")
        with pytest.raises(TrajectoryError, match="role is train, group e is open with role eval"):
            producer.push([trajectory("e", 0)])
        with pytest.raises(TrajectoryError, match="role is train, group e is open with role eval"):
            producer.begin_group(2, group_id="e", timeout=0)
        with pytest.raises(TrajectoryError, match="begun with role='eval'"):
            producer.push([trajectory("m", 0, role="eval"), trajectory("m", 1)])
        with pytest.raises(TrajectoryError, match="role is 'test', needs one of train, eval"):
            producer.begin_group(2, role="test")
        assert problems(run) == []
    assert ledger(run)["pushed"] == 0


def test_a_ticket_knows_the_role_of_its_group(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        texts = [ticket.to_json() for ticket in producer.begin_group(2, role="eval", timeout=0).tickets]
        fake.scripts.flushall()  # what is pushed opens the group again, with its role
        producer._drive(producer._logic.heartbeat())
        producer.rollout(Ticket.from_json(texts[0])).push(**COLUMNS, reward=0.5)
        producer.rollout(Ticket.from_json(texts[1])).fail()
        assert group_all(run) == ["eval"]
    assert problems(run) == []


def test_a_foreign_member_of_another_role_is_neither_trained_on_nor_counted_as_evaluation(
    fake: Connection,
) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        producer.push([trajectory("g", index) for index in range(2)])
        ((entry, fields),) = fake.scripts.xrange(run.keys.home.rollouts)
        fake.scripts.xdel(run.keys.home.rollouts, entry)
        text = fields[b"members"].replace(b"train", b"eval", 1)
        fake.scripts.xadd(run.keys.home.rollouts, {**fields, b"members": text})
        assert group_all(run) == ["incomplete"]
    assert ledger(run)["dropped"] == {"incomplete": 1, "wrong_role": 1}
    assert (logged(run), read_evaluations(run)) == ({}, [])
    assert problems(run) == []


def test_so_many_results_are_kept(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        evals = run.keys.home.evals
        sums = " ".join(["1"] * 10)
        fake.scripts.hset(evals, mapping={f"{k} s{i}": sums for k in range(10, 20) for i in range(100)})
        producer.push([trajectory("g", 0, 1, role="eval", model_version=19, data_source="s3")])
        group_all(run)
        assert fake.scripts.hlen(evals) == 1000
        producer.push([trajectory("h", 0, 1, role="eval", model_version=20)])
        group_all(run)
        assert {version for _, version in shown(run)} == {*range(11, 21)}
        # part of a version tells nothing
        producer.push([trajectory("i", 0, 1, role="eval", model_version=10)])
        group_all(run)
        assert {version for _, version in shown(run)} == {*range(11, 21)}
    assert ledger(run)["dropped"] == {"eval": 3}


def test_more_sources_of_one_version_than_are_kept_share_a_name(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        sums = " ".join(["1"] * 10)
        fake.scripts.hset(run.keys.home.evals, mapping={f"0 s{i}": sums for i in range(1000)})
        for group_id in ("g", "h"):
            producer.push([trajectory(group_id, 0, 1, role="eval", model_version=0, data_source=group_id)])
        group_all(run)
    assert shown(run)["other", 0].groups == 2
    assert len(shown(run)) == 1001


def test_results_of_weights_that_were_taken_back_go(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        queue = TrainerQueue(fake, "r", batch_groups=1, max_staleness=None, prefetch=0, commit="each_batch")
        state = queue.state_dict()
        for number in range(3):
            producer.push([trajectory(f"t{number}", 0, 1)])
            batch = delivered_batch(queue, run)
            queue.trained(batch)
            evaluate(producer, [0.0])
        under_way = producer.begin_group(1, role="eval", timeout=0)
        group_all(run)
        assert set(shown(run)) == {("", 1), ("", 2), ("", 3)}
        later = TrainerQueue(fake, "r", batch_groups=1, max_staleness=None, prefetch=0, commit="each_batch")
        later.load_state_dict({**state, "version": 1})
        assert set(shown(run)) == {("", 1)}
        next(iter(under_way)).push(**COLUMNS, reward=0.0)  # its ticket says 3
        evaluate(producer, [1.0])
        group_all(run)
        assert set(shown(run)) == {("", 1)}
        assert shown(run)["", 1].mean == 0.5
        # played by then, under the new epoch
        producer.push([trajectory("a", 0, 1, role="eval", model_version=3)])
        group_all(run)
        assert set(shown(run)) == {("", 1), ("", 3)}
    assert ledger(run)["dropped"]["eval"] == 6
    assert problems(run) == []


@pytest.mark.parametrize("shards", [1, 3])
def test_rounds_of_weights_that_were_taken_back_go_whole(fake: Connection, shards: int) -> None:
    with producing(fake, "r", {"shards": shards}) as producer:
        run = join(fake, "r")
        queue = TrainerQueue(fake, "r", batch_groups=1, max_staleness=None, prefetch=0)
        state = queue.state_dict()
        for number in range(8):
            evaluate(producer, [0.0], round="kept", version=(0, 1))
            evaluate(producer, [0.0], round="gone", version=3 if number == 7 else 0)
            evaluate(producer, [0.5], round="gone", data_source="other", version=0)
        evaluate(producer, [0.5], round="no-version", version=None)
        under_way = producer.begin_group(1, role="eval", round="gone", timeout=0)
        group_all(run)
        later = TrainerQueue(fake, "r", batch_groups=1, max_staleness=None, prefetch=0)
        later.load_state_dict({**state, "version": 1})
        assert rounds(run) == [("no-version", None, 1, 0.5), ("kept", "0..1", 8, 0.0)]
        next(iter(under_way)).push(**COLUMNS, reward=0.0, model_version=(1, 2))
        evaluate(producer, [1.0], round="gone", version=2)  # played again, under the new epoch
        group_all(run)
        assert rounds(run) == [
            ("no-version", None, 1, 0.5),
            ("kept", "0..1", 8, 0.0),
            ("gone", "2", 1, 1.0),
        ]
    assert problems(run) == []
