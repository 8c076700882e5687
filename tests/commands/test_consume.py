"""`consume` and `replay`: files in, files out, each trajectory once, whatever is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamadv.cli import main
from streamadv.errors import EpochFencedError
from streamadv.run import Run
from streamadv.status import read_status
from streamadv.store.connection import Connection
from streamadv.store.keys import EntryKeys
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.interchange import write_trajectory
from tests.clusters import until
from tests.support import (
    ended,
    identities,
    join,
    ledger,
    problems,
    producing,
    push_groups,
    trajectory,
    working,
)


@pytest.fixture
def stages(redis_url: str, run: str) -> Iterator[Run]:
    """A run with a grouper and a worker."""
    joined = join(redis_url, run)
    with working(joined, lease_s=1):
        yield joined


def call(run: Run, command: str, *words: object) -> int:
    return main([command, *map(str, words), "--redis", run.connection.url, "--run", run.name])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_batch(path: Path) -> list[dict[str, Any]]:
    """Lines but for the batch they came in: it depends on when their groups were complete."""
    return [{name: value for name, value in line.items() if name != "batch"} for line in lines_of(path)]


def identities_of(path: Path) -> list[tuple[str, int]]:
    return [(line["group_id"], line["rollout_index"]) for line in lines_of(path)]


def test_what_is_consumed_has_advantages(
    stages: Run, redis_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with producing(redis_url, stages.name) as producer:
        push_groups(producer, 3, model_version=0, metadata={"a": [1]})
        producer.finish()
    out = tmp_path / "out.jsonl"
    assert call(stages, "consume", "-o", out) == 0
    (said,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("consumed ")]
    assert said.startswith("consumed 6 trajectories of 3 groups in ")
    assert said.endswith(f": {out}")
    assert sorted(identities_of(out)) == [(f"g{n:04d}", i) for n in range(3) for i in range(2)]
    for line in lines_of(out):
        assert len(line["advantages"]) == len(line["input_ids"]) == 5
        assert line["metadata"] == {"a": [1]}
        assert (line["batch"] >= 0, line["staleness"] >= 0) == (True, True)
    assert ledger(stages)["trained"] == 6
    assert problems(stages) == []


def test_consume_continues_a_file(stages: Run, redis_url: str, tmp_path: Path) -> None:
    """Killed between writing and committing, in the middle of a line: written once, trained once."""
    out = tmp_path / "out.jsonl"
    with producing(redis_url, stages.name) as producer:
        push_groups(producer, 4)
        with out.open("wb") as file:
            write_trajectory(file, trajectory("g0001", 0))
            write_trajectory(file, trajectory("g0002", 1))
            file.write(b'{"group_id":"g0002","rollou')
        assert call(stages, "consume", "-o", out, "--max-groups", 4, "--timeout", 120) == 0
        found = identities_of(out)
        assert len(found) == len(set(found)) == 8
        assert ledger(stages)["trained"] == 8
        assert call(stages, "consume", "-o", out, "--max-groups", 4) == 0
        push_groups(producer, 3, prefix="more")
        assert call(stages, "consume", "-o", out, "--max-groups", 6, "--timeout", 120) == 0
    assert len({group_id for group_id, _ in identities_of(out)}) == 6
    assert problems(stages) == []


def heard_of_trainer(run: Run) -> bool:
    return read_status(run).trainer.silent_s is not None


def test_consume_refuses_a_run_whose_trainer_is_alive_unless_told_to_take_it(
    stages: Run, redis_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    with producing(redis_url, stages.name) as producer:
        push_groups(producer, 2)
        queue = TrainerQueue(redis_url, stages.name, batch_groups=1, prefetch=0, job="my-job").open()
        until(lambda: heard_of_trainer(stages), "no heartbeat")
        assert call(stages, "consume", "-o", out, "--max-groups", 2) == 1
        (refusal,) = capfd.readouterr().err.splitlines()
        assert f"run {stages.name} is in use by its trainer (job my-job, heard of " in refusal
        assert "--take-over" in refusal
        assert not out.exists()
        batch = queue.next_batch(timeout=120)
        assert batch is not None
        queue.trained(batch)  # nobody has taken its run
        assert call(stages, "consume", "-o", out, "--max-groups", 1, "--take-over", "--timeout", 120) == 0
        with pytest.raises(EpochFencedError):
            queue.next_batch()
        queue.close()
    assert problems(stages) == []


@pytest.mark.processes
def test_a_killed_consume_continues_its_file_at_once_and_no_other_one_does(
    stages: Run, redis_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    words = ["consume", "-o", str(out), "--redis", redis_url, "--run", stages.name]
    first = subprocess.Popen([sys.executable, "-m", "streamadv", *words], stderr=subprocess.DEVNULL)
    try:
        with producing(redis_url, stages.name) as producer:
            push_groups(producer, 2)
            until(lambda: ledger(stages)["trained"] == 4 and heard_of_trainer(stages), "nothing is consumed")
            assert call(stages, "consume", "-o", out) == 1
            assert f"{out} is being written by another" in capfd.readouterr().err
            first.kill()
            first.wait()
            push_groups(producer, 2, prefix="more")
            producer.finish()
        assert call(stages, "consume", "-o", tmp_path / "other.jsonl") == 1
        assert "is in use by its trainer (job consume@" in capfd.readouterr().err
        assert call(stages, "consume", "-o", out) == 0
    finally:
        first.kill()
        first.wait()
    assert len(identities_of(out)) == len(set(identities_of(out))) == 8
    assert problems(stages) == []


def test_batches_named_by_another_trainer_come_whole_and_the_summary_says_so(
    stages: Run, redis_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    with producing(redis_url, stages.name) as producer:
        push_groups(producer, 3)
        queue = TrainerQueue(redis_url, stages.name, batch_groups=3, prefetch=0)
        assert queue.next_batch(timeout=120) is not None
        queue.close()
        assert call(stages, "consume", "-o", out, "--max-groups", 1, "--timeout", 120) == 0
    said = capfd.readouterr().err
    assert "in 1 batch (2 beyond --max-groups: a batch named by another trainer comes whole): " in said


def test_consume_writes_to_what_is_no_file(stages: Run, redis_url: str) -> None:
    with producing(redis_url, stages.name) as producer:
        push_groups(producer, 1)
        producer.finish()
    assert call(stages, "consume", "-o", "/dev/null") == 0
    assert ledger(stages)["trained"] == 2


def test_consume_fails_when_it_cannot_do_what_it_was_told(
    stages: Run, redis_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert call(stages, "consume", "-o", out, "--timeout", 0.1) == 1
    assert "no new group for 0.1 s" in capfd.readouterr().err
    with producing(redis_url, stages.name) as producer:
        push_groups(producer, 1)
        producer.finish()
    assert call(stages, "consume", "-o", out, "--max-groups", 2) == 1
    assert "the run ended after 1 of --max-groups 2" in capfd.readouterr().err
    (tmp_path / "other.txt").write_text("hello\n")
    assert call(stages, "consume", "-o", tmp_path / "other.txt") == 1


def test_consume_fails_when_all_was_dropped(
    stages: Run, redis_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with producing(redis_url, stages.name) as producer:
        producer.push([ended("g", index, 2, "failed") for index in range(2)])
        producer.finish()
    assert call(stages, "consume", "-o", tmp_path / "out.jsonl") == 1
    said = capfd.readouterr().err
    assert (
        f"error: run {stages.name} has ended at version 0 and nothing was trained: 2 of 2 trajectories"
        in said
    )


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        for number in range(5):
            for index in range(3):
                usable = index < 2 or number != 3
                write_trajectory(
                    file,
                    trajectory(f"g{number}", index, 3) if usable else ended(f"g{number}", index, 3, "failed"),
                )
    return path


def test_a_file_is_replayed_once(stages: Run, recording: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(stages, "replay", recording) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "pushed 15, duplicates 0"
    assert call(stages, "replay", recording) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "pushed 0, duplicates 15"
    assert call(stages, "consume", "-o", recording.with_name("out")) == 0
    assert len(identities_of(recording.with_name("out"))) == 12
    assert ledger(stages)["dropped"] == {"failed": 1, "incomplete": 2}
    assert problems(stages) == []


def test_refused_groups_are_set_aside_and_members_of_open_ones_pass(
    stages: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Budget for one open group; the members of all of them alternate in the file."""
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        for index in range(2):
            for number in range(6):
                write_trajectory(file, trajectory(f"g{number}", index, 2))
    mb = 1 << 20
    words = ("--max-bytes", 2 * mb + 5000, "--max-trajectory-bytes", mb)
    assert call(stages, "runs", "create", *words) == 0
    capfd.readouterr()
    assert call(stages, "replay", path) == 0
    assert "pushed 12, duplicates 0" in capfd.readouterr().out
    assert call(stages, "consume", "-o", tmp_path / "out") == 0
    assert len(identities_of(tmp_path / "out")) == 12


def test_the_output_of_consume_can_be_replayed(stages: Run, redis_url: str, tmp_path: Path) -> None:
    with producing(redis_url, stages.name) as producer:
        push_groups(producer, 2)
        producer.finish()
    out, again = tmp_path / "out", tmp_path / "again"
    assert call(stages, "consume", "-o", out) == 0
    other = f"{stages.name}-2"
    words = ["--redis", stages.connection.url, "--run", other]
    assert main(["replay", str(out), *words]) == 0
    joined = join(redis_url, other)
    with working(joined):
        assert main(["consume", "-o", str(again), *words]) == 0
    assert without_batch(out) == without_batch(again)
    assert problems(joined) == []


def test_a_line_without_an_identity_stops_the_replay(
    stages: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    wrong = '{"input_ids": [1], "response_mask": [1]}\n'
    path.write_text(wrong)
    assert call(stages, "replay", path) == 1
    printed = capfd.readouterr()
    assert (f"{path}:1" in printed.err, printed.out) == (True, "")
    with path.open("wb") as file:
        for group_id in ("g0", "g1"):
            write_trajectory(file, trajectory(group_id, 0, 1))
        file.write(wrong.encode())
    assert call(stages, "replay", path) == 1
    printed = capfd.readouterr()
    assert (f"{path}:3" in printed.err, printed.out) == (True, "pushed 1, duplicates 0\n")


def test_a_line_without_a_reward_stops_the_replay_unless_somebody_brings_it(
    stages: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.jsonl"
    line = '"group_size": 1, "rollout_index": 0, "input_ids": [1], "response_mask": [1]'
    path.write_text(f'{{"group_id": "forgotten", {line}}}\n')
    assert call(stages, "replay", path) == 1
    assert "reward: trajectory forgotten/0 has none" in capfd.readouterr().err
    path.write_text(f'{{"group_id": "later", {line}, "reward_later": true}}\n')
    assert call(stages, "replay", path) == 0
    assert ledger(stages)["pushed"] == 1


def test_replay_into_a_run_of_another_release_has_no_summary(
    redis_url: str, run: str, recording: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Connection(redis_url) as connection:
        connection.scripts.hset(EntryKeys(run).manifest, mapping={"schema_version": "99", "salts": "[0]"})
    assert main(["replay", str(recording), "--redis", redis_url, "--run", run]) == 1
    printed = capfd.readouterr()
    assert ("schema version 99" in printed.err, printed.out) == (True, "")


def test_status_and_runs(stages: Run, recording: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(stages, "replay", recording) == 0
    capfd.readouterr()
    assert call(stages, "status", "--json", "--check") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["balanced"]
    assert found["ledger"]["pushed"] == 15
    assert main(["runs", "list", "--json", "--redis", stages.connection.url]) == 0
    assert json.loads(capfd.readouterr().out)["run"] == stages.name
    stages.connection.scripts.hincrby(stages.keys.home.ledger, "trained", 1)
    assert call(stages, "status", "--check") == 1
    assert "PROBLEM shard 0: pushed is 15, accounted for are 16" in capfd.readouterr().out
    assert identities([]) == []
