"""Groups whose data break a stage: isolated, kept, requeued or purged; their neighbours are trained on."""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Any

import pytest
import torch

from streamadv.advantage import compute as computing
from streamadv.advantage.compute import MAX_ATTEMPTS, compute_safely
from streamadv.advantage.prepare import PreparedItem, prepare
from streamadv.algorithms.registry import estimator
from streamadv.cli import dead as cli_dead
from streamadv.cli import main
from streamadv.errors import ChainError, EstimatorError, StarvedError, StreamadvError
from streamadv.grouping.grouper import Housekeeping
from streamadv.run import Run, dead_letters
from streamadv.run.consumer import ADVANTAGE
from streamadv.run.dead_letters import list_dead, purge, requeue, show_dead
from streamadv.run.hangs import Stopped
from streamadv.status import read_status
from streamadv.status.causes import reasons_of
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import (
    CPU,
    Forward,
    batches_read,
    consumer_of,
    delivered_batch,
    group_all,
    join,
    ledger,
    next_batch,
    problems,
    producing,
    push_groups,
    pushed_run,
    trajectory,
)


def spoil_payload(run: Run, group_id: str, column: str, value: bytes) -> None:
    """Damage one stored column of a group whose packet is still in the rollouts stream."""
    keys = run.keys.shards[run.keys.shard_of(group_id)]
    for _, fields in run.connection.scripts.xrange(keys.rollouts):
        if fields[b"group_id"].decode() == group_id:
            run.connection.scripts.hset(fields[b"payload"], column, value)
            return
    raise AssertionError(f"{group_id} has no packet")


def spoil_table(run: Run, group_id: str) -> None:
    keys = run.keys.shards[run.keys.shard_of(group_id)]
    for entry, fields in run.connection.scripts.xrange(keys.rollouts):
        if fields[b"group_id"].decode() == group_id:
            run.connection.scripts.xdel(keys.rollouts, entry)
            run.connection.scripts.xadd(keys.rollouts, {**fields, b"table": b"nonsense"})
            return


@pytest.mark.parametrize("chain", ["grpo", {"estimator": "reinforce"}])
def test_neighbours_of_a_dead_group_keep_their_own_numbers(redis_url: str, run: str, chain: object) -> None:
    """Groups of other sizes and rewards: results that follow the dead group's must not be taken for it."""
    rewards = {"a": [0.0, 1.0], "b": [5.0, 0.0, 5.0], "c": [2.0, 4.0, 0.0], "d": [7.0, 3.0]}

    def advantages(spoil: bool, name: str) -> dict[tuple[str, int], list[float]]:
        connection = Connection(redis_url)
        with producing(connection, name) as producer:
            for group_id, values in rewards.items():
                producer.push(
                    [trajectory(group_id, i, len(values), reward=value) for i, value in enumerate(values)]
                )
            producer.finish()
        joined = join(connection, name)
        if spoil:
            spoil_payload(joined, "b", "rollout_log_probs", b"short")
        batch = next_batch(
            TrainerQueue(connection, name, batch_groups=4, chain=chain, commit="each_batch"), joined
        )  # type: ignore[arg-type]
        assert batch is not None
        return {
            (each.reference.group_id, each.reference.rollout_index): each.outputs["advantages"].tolist()
            for each in batch.delivered
        }

    whole = advantages(False, run)
    rest = advantages(True, f"{run}-spoiled")
    assert rest == {identity: numbers for identity, numbers in whole.items() if identity[0] != "b"}


def test_an_unreadable_reference_is_found_when_the_batch_is_named(redis_url: str, run: str) -> None:
    connection = Connection(redis_url)
    joined = pushed_run(connection, run, 2, finish=True)
    spoil_table(joined, "g0000")
    queue = TrainerQueue(connection, run, batch_groups=2, commit="each_batch")
    batch = delivered_batch(queue, joined)
    assert {r.group_id for r in batch.references} == {"g0001"}
    assert ledger(joined)["dead"] == {"undecodable": 2}
    assert problems(joined) == []


def let_all_die(joined: Run) -> None:
    """A column the chain needs was not pushed."""
    options = {"pushed": ["values"], "commit": "each_batch"}
    queue = TrainerQueue(joined.connection, joined.name, chain={"estimator": "gae"}, **options)  # type: ignore[arg-type]
    with pytest.raises(StarvedError, match="missing_column"):
        next_batch(queue, joined)


def test_requeued_groups_are_trained_on_when_they_can_be(redis_url: str, run: str) -> None:
    """Another trainer does not need the missing column."""
    connection = Connection(redis_url)
    joined = pushed_run(connection, run, 2, finish=True)
    let_all_die(joined)
    assert ledger(joined)["dead"] == {"missing_column": 4}
    assert {dead.reason for dead in list_dead(joined)} == {"missing_column"}
    assert requeue(joined, "g0000") == 2
    assert ledger(joined)["queued"] == 2
    assert read_status(joined).groups.outcomes["dead"] == 2  # a counter: it never falls
    assert problems(joined) == []
    batch = delivered_batch(TrainerQueue(connection, run, commit="each_batch"), joined)
    assert {r.group_id for r in batch.references} == {"g0000"}
    purge(joined, "g0001")
    Housekeeping(joined).round()
    assert list(list_dead(joined)) == []
    assert ledger(joined)["dead"] == {"missing_column": 2}  # what is purged stays counted
    assert problems(joined) == []
    with pytest.raises(StreamadvError, match="g0001"):
        show_dead(joined, "g0001")


def test_dead_bytes_bound_what_is_kept(redis_url: str, run: str) -> None:
    connection = Connection(redis_url)
    joined = pushed_run(connection, run, 1, settings={"dead_bytes": 0}, finish=True)
    let_all_die(joined)
    Housekeeping(joined).round()
    (dead,) = list_dead(joined)
    assert dead.emptied
    with pytest.raises(StreamadvError, match="payloads"):
        requeue(joined, dead.group_id)
    assert problems(joined) == []


def test_all_groups_that_have_their_payloads_are_requeued(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    connection = Connection(redis_url)
    joined = pushed_run(connection, run, 3, finish=True)
    let_all_die(joined)
    (size,) = {dead.bytes for dead in list_dead(joined)}
    dead_letters.trim_dead(joined.home, 2 * size)
    capsys.readouterr()
    assert main(["dead", "requeue", "--all", "--redis", redis_url, "--run", run]) == 0
    printed = capsys.readouterr()
    assert printed.err == "not requeued, payloads deleted (dead_bytes): 1 group\n"
    assert printed.out.splitlines()[-1] == "requeued 2 groups, 4 trajectories"
    assert [dead.emptied for dead in list_dead(joined)] == [True]
    assert problems(joined) == []


def test_emptied_letters_are_bounded_in_number_and_bytes(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group dies, for as long as anybody pushes."""
    monkeypatch.setattr(dead_letters, "DEAD_KEPT", 20)
    connection = Connection(redis_url)
    joined = join(connection, run)
    queue = TrainerQueue(
        connection, run, chain={"estimator": "gae"}, pushed=["values"], batch_groups=8, commit="each_batch"
    )
    sizes = []
    with producing(connection, run, {"dead_bytes": 4000}) as producer:
        for number in range(4):
            push_groups(producer, 16, size=8, prefix=f"g{number}-")
            with pytest.raises(StreamadvError, match="no new group"):
                next_batch(queue, joined)
            Housekeeping(joined).round()
            letters = list(list_dead(joined))
            sizes.append(
                sum(connection.scripts.memory_usage(key) or 0 for key in connection.scripts.keys("*:dead*"))
            )
            assert len(letters) <= 20
            assert [letter.age_s for letter in letters] == sorted(
                (each.age_s for each in letters), reverse=True
            )
            assert [letter.emptied for letter in letters] == sorted(
                (each.emptied for each in letters), reverse=True
            )
            assert not letters[-1].emptied
            assert letters[0].reason == "missing_column"
            assert letters[0].trajectories == 8
            assert read_status(joined).bytes.dead <= 4000
    assert sizes[-1] < 20 * 2000 + 4000
    status = read_status(joined)
    assert status.ledger.dead == {"missing_column": 4 * 16 * 8}  # what is forgotten stays counted
    assert status.groups.outcomes["dead"] == 64
    assert "dead" in [reason.name for reason in reasons_of(status)]
    assert problems(joined) == []


@estimator("brittle", scope="group")
def brittle(batch: object) -> object:
    """Breaks on groups whose first reward is 13, and on everything while `broken` is set."""
    from streamadv.algorithms.estimators.outcomes import grpo

    if brittle.broken or float(batch.rewards[0]) == 13.0 or 13.0 in batch.rewards.tolist():  # type: ignore[attr-defined]
        brittle.wait()  # type: ignore[attr-defined]
        raise ZeroDivisionError("thirteen")
    return grpo(batch)  # type: ignore[arg-type]


brittle.broken = False  # type: ignore[attr-defined]
brittle.wait = lambda: None  # type: ignore[attr-defined]


@pytest.fixture
def named(redis_url: str, run: str) -> Run:
    """A run with one named batch of three groups, one of which breaks the estimator `brittle`."""
    connection = Connection(redis_url)
    with producing(connection, run) as producer:
        push_groups(producer, 2)
        push_groups(producer, 1, prefix="x", reward=13.0)
        producer.finish()
    joined = join(connection, run)
    group_all(joined)
    queue = TrainerQueue(connection, run, batch_groups=3, chain="grpo", commit="each_batch")
    sessions = queue._sessions
    sessions.naming = dataclasses.replace(sessions.naming, chain={"estimator": "brittle"})
    with pytest.raises(StreamadvError, match="no new group"):
        queue.next_batch(timeout=0)
    return joined


def test_a_group_that_breaks_the_computation_is_left_out_alone(named: Run) -> None:
    ((entry,),) = batches_read(consumer_of(named, ADVANTAGE), 1)
    computed = compute_safely(named, prepare(named, entry), CPU)
    dead = json.loads(computed.header)["dead"]
    assert list(dead) == ["x0000"]
    assert dead["x0000"][0] == "compute_error"
    assert "thirteen" in dead["x0000"][1]
    assert not named.connection.scripts.exists(named.keys.home.attempts)


def test_an_exception_of_a_group_alone_is_final(named: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The computation is deterministic: with the whole item, each group alone, and without the bad one."""
    sizes: list[int] = []

    def compute(prepared: PreparedItem, device: torch.device) -> object:
        sizes.append(len(prepared.living))
        return original(prepared, device)

    original = computing.compute
    monkeypatch.setattr(computing, "compute", compute)
    ((entry,),) = batches_read(consumer_of(named, ADVANTAGE), 1)
    compute_safely(named, prepare(named, entry), CPU)
    assert sizes == [3, 1, 1, 1, 2]


def test_only_a_crash_leaves_its_count(named: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is stopped while it computes a group alone does not count against the group."""

    def stopped() -> None:
        raise Stopped("this process is to end")

    monkeypatch.setattr(brittle, "wait", stopped)
    ((entry,),) = batches_read(consumer_of(named, ADVANTAGE), 1)
    with pytest.raises(Stopped):
        compute_safely(named, prepare(named, entry._replace(reclaimed=True)), CPU)
    assert not named.connection.scripts.exists(named.keys.home.attempts)


def test_a_group_that_kills_its_worker_is_left_out_after_ten_attempts(named: Run) -> None:
    """A crash leaves only the count of attempts behind."""
    ((entry,),) = batches_read(consumer_of(named, ADVANTAGE), 1)
    named.connection.scripts.hset(named.keys.home.attempts, "g0001", MAX_ATTEMPTS)
    reclaimed = prepare(named, entry._replace(reclaimed=True))
    dead = json.loads(compute_safely(named, reclaimed, CPU).header)["dead"]
    assert sorted(dead) == ["g0001", "x0000"]
    assert "crashed the process" in dead["g0001"][1]


@pytest.mark.parametrize("error", [TypeError("no number"), SystemExit("bye")], ids=["code", "exit"])
def test_what_looks_like_a_fault_of_the_code_is_one_of_the_data_where_others_compute(
    named: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(brittle, "wait", fail)
    ((entry,),) = batches_read(consumer_of(named, ADVANTAGE), 1)
    dead = json.loads(compute_safely(named, prepare(named, entry), CPU).header)["dead"]
    assert list(dead) == ["x0000"]
    assert f"estimator brittle raised {type(error).__name__}: {error}" in dead["x0000"][1]
    assert not named.connection.scripts.exists(named.keys.home.attempts)


def test_a_group_on_which_the_computation_does_not_end_is_left_out(
    named: Run, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang() -> None:
        forward(2 * computing.TIMEOUT_S)
        threading.Event().wait()

    monkeypatch.setattr(brittle, "wait", hang)
    ((entry,),) = batches_read(consumer_of(named, ADVANTAGE), 1)
    computed = compute_safely(named, prepare(named, entry), CPU)
    dead = json.loads(computed.header)["dead"]
    assert list(dead) == ["x0000"]
    assert "the chain (brittle)" in dead["x0000"][1]
    assert "did not return within" in dead["x0000"][1]
    assert not named.connection.scripts.exists(named.keys.home.attempts)


def test_a_chain_that_breaks_on_every_group_stops_the_worker(
    named: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brittle, "broken", True)
    ((entry,),) = batches_read(consumer_of(named, ADVANTAGE), 1)
    with pytest.raises(ChainError, match="every group fails"):
        compute_safely(named, prepare(named, entry), CPU)


def test_a_batch_that_fails_only_as_a_whole_is_the_fault_of_the_chain(
    named: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker does not survive other errors, no worker would."""

    def compute_alone(prepared: PreparedItem, device: torch.device) -> object:
        if len(prepared.living) > 1:
            raise EstimatorError("advantages/mean is nan")
        return compute(prepared, device)

    compute = computing.compute
    monkeypatch.setattr(computing, "compute", compute_alone)
    ((entry,),) = batches_read(consumer_of(named, ADVANTAGE), 1)
    with pytest.raises(ChainError, match=r"groups that compute alone fail together: advantages/mean is nan"):
        compute_safely(named, prepare(named, entry), CPU)


def test_a_fault_of_the_code_buries_nothing(named: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group is no evidence against several, but a TypeError is no data."""
    ((entry,),) = batches_read(consumer_of(named, ADVANTAGE), 1)
    prepared = prepare(named, entry)
    one = dataclasses.replace(prepared, groups=prepared.groups[:1])
    monkeypatch.setattr(computing, "compute", raise_type_error)
    with pytest.raises(ChainError, match="TypeError: wrong arguments"):
        compute_safely(named, one, CPU)


def raise_type_error(*_: object) -> None:
    raise TypeError("wrong arguments")


def test_the_command(redis_url: str, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    connection = Connection(redis_url)
    joined = pushed_run(connection, run, 2, finish=True)
    let_all_die(joined)
    where = ["--redis", redis_url, "--run", run]
    assert main(["dead", "list", *where]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 2
    assert all("missing_column" in line for line in listed)
    assert main(["dead", "show", "g0000", *where]) == 0
    assert len(json.loads(capsys.readouterr().out)["members"]) == 2
    capsys.readouterr()
    assert main(["dead", "requeue", "g0000", *where]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "requeued 1 group, 2 trajectories"
    assert main(["dead", "purge", "--all", *where]) == 0
    assert main(["dead", "show", "g0000", *where]) == 1
    assert "g0000" in capsys.readouterr().err
    assert main(["dead", "purge", *where]) == 1
    capsys.readouterr()
    assert main(["dead", "list", *where]) == 0
    assert capsys.readouterr().out == "no dead letters\n"
    assert main(["dead", "list", "--json", *where]) == 0
    assert capsys.readouterr().out == ""


# What a letter shows


def dead_group(url: str, run: str, **fields: object) -> Run:
    """A run with the dead group g of two: it misses a column."""
    with producing(url, run) as producer:
        producer.push([trajectory("g", index, **fields) for index in range(2)])
        producer.finish()
    joined = join(url, run)
    queue = TrainerQueue(
        url, run, batch_groups=1, chain={"estimator": "gae"}, pushed=("values",), commit="each_batch"
    )
    with pytest.raises(StarvedError):
        next_batch(queue, joined)
    queue.close()
    return joined


def test_a_letter_shows_its_trajectories_in_words(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"row": 0, "start": 2, "end": 5, "reward": 0.5}
    dead_group(redis_url, run, model_version=[3, 4], steps=[step], rewards={"format": 1.0})
    assert main(["dead", "show", "g", "--redis", redis_url, "--run", run]) == 0
    shown = json.loads(capsys.readouterr().out)
    keys = {member.pop("packet") for member in shown["members"]}
    assert len(keys) == 1
    assert shown["members"] == [
        {
            **{
                "index": index,
                "status": "completed",
                "role": "train",
                "rows": 1,
                "tokens": 5,
                "trainable": 3,
            },
            **{"reward": float(index), "rewards": {"format": 1.0}, "versions": [3, 4], "steps": 1},
        }
        for index in range(2)
    ]
    assert shown["text"] == ""


def test_a_letter_shows_why_a_table_cannot_be_read(redis_url: str, run: str) -> None:
    joined = dead_group(redis_url, run)
    key, scripts = joined.keys.home.dead_group("g"), joined.connection.scripts
    for table in (b"nonsense", b"\xff" * 64, b"", scripts.hget(key, "log:tables")[:-1]):
        scripts.hset(key, "log:tables", table)
        (member,) = show_dead(joined, "g").members
        assert "member table" in member["problem"]
        assert "}:payload:" in member["packet"]


def test_a_note_about_foreign_data_shows_its_table_in_words(redis_url: str, run: str) -> None:
    with producing(redis_url, run) as producer:
        producer.push([trajectory("g", 0)])
    joined = join(redis_url, run)
    scripts, stream = joined.connection.scripts, joined.keys.home.rollouts
    ((_, fields),) = scripts.xrange(stream)
    scripts.xadd(stream, {**fields, b"members": b"0 unheard of\n"})
    scripts.xadd(stream, {**fields, b"members": b"0 unheard of\n", b"table": b"nonsense"})
    group_all(joined)
    right, wrong = (dead.text for dead in list_dead(joined))
    assert "'index': 0, 'status': 'completed'" in right
    assert "member table" in wrong
    assert problems(joined) == []


def test_only_dead_letters_that_exceed_their_budget_lose_their_payloads_whatever_the_ledger_says(
    redis_url: str, run: str
) -> None:
    """A producer can write any number into the ledger; dead letters are not in its reach."""
    joined = pushed_run(redis_url, run, 3, finish=True)
    for group_id in ("g0000", "g0001"):
        spoil_payload(joined, group_id, "rollout_log_probs", b"short")
    group_all(joined)
    delivered_batch(TrainerQueue(redis_url, run, batch_groups=3, chain={"estimator": "reinforce"}), joined)
    keys = joined.keys.home
    joined.connection.scripts.hincrby(keys.ledger, "dead_bytes", 10**15)
    Housekeeping(joined).round()
    first, second = list_dead(joined)
    assert [first.emptied, second.emptied] == [False, False]
    dead_letters.trim_dead(joined.home, first.bytes + second.bytes - 1)
    assert [dead.emptied for dead in list_dead(joined)] == [True, False]


def test_a_letter_that_no_process_of_the_run_wrote_is_not_requeued(redis_url: str, run: str) -> None:
    joined = join(redis_url, run)
    keys, scripts = joined.keys.home, joined.connection.scripts
    fields = {f"log:{number}": "x" for number in range(9000)}
    scripts.zadd(keys.dead, {"forged": 1})
    scripts.hset(
        keys.dead_group("forged"), mapping={"reason": "x", "detail": "", "count": "1", "bytes": "1", **fields}
    )
    with pytest.raises(StreamadvError, match="cannot be requeued"):
        requeue(joined, "forged")
    assert scripts.xlen(keys.groups) == 0


def test_an_id_that_dies_again_has_one_letter_and_leaks_nothing(redis_url: str, run: str) -> None:
    """Its id is free again, since more groups than dedupe_groups have ended; both of its groups die."""
    with producing(redis_url, run, {"dedupe_groups": 1}) as producer:
        joined = join(redis_url, run)
        for names in ("g", "x", "y", "g"):
            push_groups(producer, 1, prefix=names)
            group_all(joined)
            queue = TrainerQueue(
                joined.connection, run, chain={"estimator": "gae"}, pushed=["values"], commit="each_batch"
            )
            with pytest.raises(StreamadvError):
                next_batch(queue, joined)
        assert problems(joined) == []


@pytest.mark.parametrize("command", ["requeue", "purge"])
def test_all_goes_on_when_somebody_else_takes_a_letter(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A grouper (more than DEAD_KEPT letters), another operator, or the lost reply of the own call."""
    joined = pushed_run(Connection(redis_url), run, 3, finish=True)
    let_all_die(joined)
    original = getattr(cli_dead, command)
    calls = []

    def late(run_: Any, group_id: str) -> Any:
        if not calls:
            calls.append(original(run_, group_id))  # somebody else, in between
        return original(run_, group_id)

    monkeypatch.setattr(cli_dead, command, late)
    code = main(["dead", command, "--all", "--redis", redis_url, "--run", run])
    assert [each.group_id for each in list_dead(joined)] == []
    assert code == 0
