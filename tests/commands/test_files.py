"""Files on the command line: their formats, what commands say at the end, and progress on a terminal."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from streamadv.cli import main
from streamadv.cli.files import number_in, progress
from streamadv.trajectory.interchange import write_trajectory
from tests.support import trajectory

TURNS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture
def tau_bench(tmp_path: Path) -> Path:
    file = tmp_path / "tau.json"
    runs = [
        {"task_id": 1, "trial": trial, "reward": float(trial), "info": {}, "traj": TURNS} for trial in (0, 1)
    ]
    file.write_text(json.dumps(runs))
    return file


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    file = tmp_path / "chat.jsonl"
    lines = [
        {"uid": "a", "trial": index, "attempts": 2, "reward": 1.0, "messages": TURNS} for index in (0, 1)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("name", ["tau-bench", "chat"])
@pytest.mark.parametrize("command", ["compute", "replay"])
def test_a_file_of_another_format_names_it(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    command: str,
) -> None:
    file = request.getfixturevalue(name.replace("-", "_"))
    words = ["-o", str(tmp_path / "out")] if command == "compute" else ["--redis", "redis://127.0.0.1:1"]
    assert main([command, str(file), *words]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(f"; the file looks like {name}: give --format {name}")


@pytest.mark.parametrize("name", ["tau-bench", "chat"])
def test_compute_reads_every_format(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    file, out = request.getfixturevalue(name.replace("-", "_")), tmp_path / "out.jsonl"
    assert main(["compute", str(file), "--format", name, "-o", str(out)]) == 0
    assert [len(json.loads(line)["advantages"]) > 0 for line in out.read_text().splitlines()] == [True, True]
    assert capsys.readouterr().out == f"computed 2 of 2 trajectories in 1 group: {out}\n"


def test_a_file_that_looks_like_nothing_gets_no_advice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "in"
    for text in ("[", "nonsense", "[]", "{}", "7", "", "[7]"):
        file.write_text(text)
        assert main(["compute", str(file), "-o", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert "looks like" not in error
        assert error.count("\n") == 1


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for file, shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", file)
        with progress("pushed", 4) as advance:
            advance(1)
            advance(3)
        assert ("pushed" in file.getvalue()) == shown
        assert ("4/4" in file.getvalue()) == shown


def test_lines_are_counted_in_files_only(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    with file.open("wb") as target:
        for index in range(3):
            write_trajectory(target, trajectory("g", index, 3))
    assert number_in(file, None) == 3
    assert number_in(tmp_path, None) is None
    assert number_in(tmp_path / "none", None) is None


def test_what_a_push_refuses_names_the_file(
    tmp_path: Path, redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sizes.jsonl"
    lines = [
        {
            "group_id": "g",
            "group_size": size,
            "rollout_index": 0,
            "reward": 1.0,
            "input_ids": [1],
            "response_mask": [1],
        }
        for size in (2, 3)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(file), "--redis", redis_url, "--run", run]) == 1
    assert f"error: {file}: group g of 3 is pushed together with group g of 2" in capsys.readouterr().err
