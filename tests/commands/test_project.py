"""`streamadv up --example`: a project that one owns is written, runs by `streamadv up` in its folder, and goes on."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest

from streamadv import weights
from streamadv.cli import main

FILES = {"streamadv.toml", "tasks.jsonl", "policy.py", "producer.py", "judge.py", "trainer.py"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STREAMADV_REDIS_URL", raising=False)
    monkeypatch.delenv("STREAMADV_RUN", raising=False)
    return tmp_path


def change(file: Path, **values: object) -> None:
    """As its owner would: other values of keys in streamadv.toml."""
    text = file.read_text()
    for name, value in values.items():
        text, changed = re.subn(rf"^({name} = )\S+", rf"\g<1>{value}", text, flags=re.MULTILINE)
        assert changed == 1, name
    file.write_text(text)


def test_an_example_is_a_few_short_files(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--example", "tool_use"]) == 0
    written = {file.name: file.read_text() for file in (folder / "tool_use").iterdir()}
    printed = capfd.readouterr()
    assert {Path(line).name for line in printed.out.splitlines()} == FILES == set(written)
    assert "cd tool_use && streamadv up" in printed.err
    assert all(len(text.splitlines()) < 60 for text in written.values())
    assert tomllib.loads(written["streamadv.toml"])["up"]["run"] == "tool_use"


def test_nothing_is_written_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "tool_use").mkdir()
    (folder / "tool_use" / "trainer.py").write_text("mine")
    assert main(["up", "--example", "tool_use"]) == 1
    assert "tool_use/ already has trainer.py" in capsys.readouterr().err
    assert [file.name for file in (folder / "tool_use").iterdir()] == ["trainer.py"]
    assert (folder / "tool_use" / "trainer.py").read_text() == "mine"


def test_an_engine_is_asked_with_its_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--example", "tool_use", "--engine", "http://gpu:8000"]) == 1
    assert "--engine and --model belong together" in capsys.readouterr().err
    url, model = "http://gpu:8000", "models/small \\ one"
    assert main(["up", "--example", "tool_use", "--engine", url, "--model", model]) == 0
    settings = tomllib.loads((folder / "tool_use" / "streamadv.toml").read_text())
    assert (settings["policy"]["engine"], settings["policy"]["model"]) == (url, model)
    policy = (folder / "tool_use" / "policy.py").read_text()
    compile(policy, "policy.py", "exec")
    assert len(policy.splitlines()) < 60
    assert "EngineClient" in policy


def test_the_agents_wait_for_vllm_that_still_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="pip install 'streamadv[examples]'")
    assert main(["up", "--example", "tool_use", "--engine", "http://gpu:8000", "--model", "small"]) == 0
    monkeypatch.chdir(folder / "tool_use")
    engine = runpy.run_path("policy.py")["new_engine"]()
    weights.publish("weights", 3, {"a": np.zeros(2, np.float32)})
    answers: list[object] = [URLError("refused"), ConnectionResetError("reset"), BytesIO()]

    def answer(*_: object) -> object:
        if isinstance(answers[0], Exception):
            raise answers.pop(0)  # type: ignore[misc]
        return answers[0]

    async def soon(_: float) -> None: ...

    monkeypatch.setattr("urllib.request.urlopen", answer)
    monkeypatch.setattr("asyncio.sleep", soon)
    asyncio.run(engine.refresh(None))
    assert engine.version == 3
    assert "waiting for vLLM at http://gpu:8000: <urlopen error refused>" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[up", "streamadv.toml: "),
        ("[run]\nname = 1", "has no table [up]"),
        ("[up]\ncommands = [3]", "commands: 3 is no command"),
        ("[up]\ncommands = ['say \"no']", "is no command"),
        ("[up]\nworker = 2", "unrecognized option --worker: did you mean --workers?"),
    ],
)
def test_a_wrong_file_is_told(
    text: str, problem: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "streamadv.toml").write_text(text)
    with suppress(SystemExit):
        assert main(["up"]) == 1
    assert problem in capsys.readouterr().err


@pytest.fixture
def up(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `streamadv up` in a folder."""
    started: list[subprocess.Popen[str]] = []

    def start(where: Path, *words: str) -> subprocess.Popen[str]:
        paths = os.pathsep.join(filter(None, sys.path))
        process = subprocess.Popen(
            [sys.executable, "-m", "streamadv", "up", *words],
            **{"cwd": where, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
            env={
                **os.environ,
                "PYTHONPATH": paths,
                "OMP_NUM_THREADS": "1",
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            },
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def until_line(process: subprocess.Popen[str], text: str) -> list[str]:
    """The lines until one has the text."""
    assert process.stdout is not None
    seen: list[str] = []
    for line in process.stdout:
        seen.append(line)
        print(line, end="")  # a test that times out shows how far it came
        if text in line:
            return seen
    raise AssertionError("".join(seen))


@pytest.mark.processes
@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_options_and_commands_that_are_given_win(
    folder: Path, up: Callable[..., subprocess.Popen[str]]
) -> None:
    (folder / "streamadv.toml").write_text('[up]\nrun = "a"\ngroupers = 2\ncommands = ["sh -c \'exit 3\'"]\n')
    process = up(folder)
    assert process.wait(240) == 3
    assert "run a, 2 groupers" in process.stdout.read()  # type: ignore[union-attr]
    process = up(folder, "--run", "b", "--", "sh", "-c", "echo $STREAMADV_RUN; exit 4")
    assert process.wait(240) == 4
    assert "run b, 2 groupers" in process.stdout.read()  # type: ignore[union-attr]


@pytest.mark.processes
@pytest.mark.server
@pytest.mark.slow
@pytest.mark.release
@pytest.mark.timeout(600)
def test_it_runs_is_killed_and_goes_on(folder: Path, up: Callable[..., subprocess.Popen[str]]) -> None:
    pytest.importorskip("transformers", reason="pip install 'streamadv[examples]'")
    assert main(["up", "--example", "tool_use"]) == 0
    project = folder / "tool_use"
    change(project / "streamadv.toml", epochs=4, checkpoint_every=4, hidden_size=32)
    first = up(project)
    seen = until_line(first, "trainer | version 6: reward")
    assert any("view http://" in line for line in seen)
    first.kill()
    first.wait()
    assert {path.name for path in (project / "checkpoints").iterdir()} == {"4"}

    second = up(project)
    seen = until_line(second, "trainer | version 16: reward")
    assert not any("trainer | version 4:" in line for line in seen), "it goes on behind the checkpoint"
    assert second.wait(240) == 0
    assert "16" in {path.name for path in (project / "checkpoints").iterdir()}
    rest = second.stdout.read()  # type: ignore[union-attr]
    assert "version 17" not in rest, "each of 4 x 32 prompts was trained on once"
