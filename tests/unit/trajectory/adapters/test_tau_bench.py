"""tau-bench results: identity from task_id and trial, one line for anything odd, and the recorded file."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from streamadv.errors import TrajectoryError
from streamadv.trajectory.adapters import FORMATS
from streamadv.trajectory.adapters.records import read_records
from streamadv.trajectory.adapters.tau_bench import read_tau_bench

TRAJ = [
    {"role": "system", "content": "# Policy"},
    {"role": "user", "content": "Book a flight."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"to":"SEA"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "search", "content": "[]"},
    {"role": "assistant", "content": "There is none."},
    {"role": "user", "content": "###STOP###"},
]


def record(task_id=0, trial=0, **fields):
    return {"task_id": task_id, "reward": 0.0, "info": {}, "traj": TRAJ, "trial": trial, **fields}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.json"


def read(path, *records):
    path.write_text(json.dumps(records))
    return list(read_tau_bench(path))


def identities(trajectories):
    return [(t.group_id, t.group_size, t.rollout_index) for t in trajectories]


def test_a_record_is_a_trajectory(path):
    (trajectory,) = read(path, record(12, 0, reward=1))
    assert identities([trajectory]) == [("12", 1, 0)]
    assert (trajectory.reward, trajectory.status, trajectory.data_source) == (1.0, "completed", "tau-bench")
    assert trajectory.metadata == {"task_id": 12, "trial": 0}
    assert len(trajectory.steps) == 2
    (row,) = trajectory.rows
    trained = bytes(i for i in row.input_ids[row.response_mask == 1].tolist() if i < 256).decode()
    assert trained.endswith("There is none.")
    assert "STOP" not in trained


def test_the_group_is_all_trials_of_the_task_in_any_order(path):
    trajectories = read(path, record(1, 1), record("x", 0), record(1, 0), record(1, 2))
    assert identities(trajectories) == [("1", 3, 1), ("x", 1, 0), ("1", 3, 0), ("1", 3, 2)]


def test_a_repeated_record_does_not_make_the_group_larger(path):
    trajectories = read(path, record(1, 0), record(1, 1), record(1, 0, reward=1.0))
    assert identities(trajectories) == [("1", 2, 0), ("1", 2, 1), ("1", 2, 0)]


def test_trials_with_gaps_are_renumbered_in_order(path):
    trajectories = read(path, record(1, 9), record(1, 4), record(2, 0), record(1, 10**30))
    assert identities(trajectories) == [("1", 3, 1), ("1", 3, 0), ("2", 1, 0), ("1", 3, 2)]
    assert trajectories[0].metadata["trial"] == 9


def test_reward_null_is_unscorable(path):
    (trajectory,) = read(path, record(reward=None))
    assert trajectory.scored
    assert trajectory.reward is None


def test_info_may_be_missing_or_null(path):
    bare = record(1)
    del bare["info"]
    assert len(read(path, bare, record(2, info=None))) == 2


def test_a_run_that_crashed_is_a_failed_trajectory(path):
    error = {"error": "RateLimitError", "traceback": "..."}
    failed, fine = read(path, record(1, 0, traj=[], info=error), record(1, 1))
    assert (failed.status, failed.reward, failed.rows) == ("failed", None, [])
    assert (failed.group_size, fine.group_size, fine.status) == (2, 2, "completed")


def without(field):
    return {name: value for name, value in record().items() if name != field}


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (without("task_id"), "task_id: is missing"),
        (without("trial"), "trial: is missing"),
        (without("reward"), "reward: is missing"),
        (without("traj"), "traj: is missing"),
        (record(task_id=None), "task_id: is None"),
        (record(task_id=1.5), "task_id: is 1.5"),
        (record(task_id=True), "task_id: is True"),
        (record(task_id=""), "task_id: is ''"),
        (record(task_id="a b"), "task_id: is 'a b'"),
        (record(task_id=10**100), "task_id: is an integer of"),
        (record(task_id="x" * 300), "group_id"),
        (record(trial="0"), "trial: is '0'"),
        (record(trial=-1), "trial: is -1"),
        (record(trial=None), "trial: is None"),
        (record(reward="1.0"), "reward: is the text '1.0'"),
        (record(reward=float("nan")), "reward"),
        (record(reward=[1.0]), "reward"),
        (record(info=[]), "info: is a list"),
        (record(traj=None), "traj: is None"),
        (record(traj=[]), "traj: has no assistant message"),
        (record(traj=[{"role": "user", "content": 3}]), "traj.0.content: is 3"),
        ("text", "is 'text', needs an object"),
    ],
)
def test_an_odd_record_is_one_line_that_names_it(path, bad, problem):
    with pytest.raises(TrajectoryError) as error:
        read(path, record(7), bad)
    assert str(error.value).startswith(f"{path}: record 1: ")
    assert problem in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[" * 10**5, b'[{"task_id": 1e999}]', b"[0", b"[null]"]
)
def test_garbage_is_an_error(path, content):
    path.write_bytes(content)
    with pytest.raises(TrajectoryError) as error:
        list(read_tau_bench(path))
    assert str(error.value).startswith(str(path))
    assert str(error.value).isprintable()


def test_a_file_beyond_the_limit_is_refused(path):
    path.write_bytes(b" " * 101)
    with pytest.raises(TrajectoryError, match="larger than 100 bytes"):
        read_records(path, max_bytes=100)


def test_the_recorded_airline_runs():
    folder = os.environ.get("STREAMADV_DATA")
    if not folder:
        pytest.skip("STREAMADV_DATA names no folder with tau_bench_airline_open.json")
    trajectories = list(FORMATS["tau-bench"](Path(folder) / "tau_bench_airline_open.json"))
    assert len(trajectories) == 100
    groups = Counter(t.group_id for t in trajectories)
    assert len(groups) == 25
    assert set(groups.values()) == {4}
    assert {t.group_size for t in trajectories} == {4}
    assert len({(t.group_id, t.rollout_index) for t in trajectories}) == 100
    assert all(t.rows[0].response_mask.any() and t.steps and t.scored for t in trajectories)
    assert {t.reward for t in trajectories} == {0.0, 1.0}
