"""The command line of the demo; the processes behind it are replaced by their result."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamadv.cli import main
from streamadv.demo import supervisor
from streamadv.demo.progress import Progress
from streamadv.demo.settings import DEFAULT_UPDATES, DemoSettings
from streamadv.status.model import Ledger
from tests.support import empty_status


@pytest.fixture
def ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, Progress, dict[str, Any]]]:
    """Run the command with flags, as if the demo had ended with a success rate and a ledger."""

    def run(*flags: str, rate: float = 0.9, balanced: bool = True) -> tuple[int, Progress, dict[str, Any]]:
        seen: list[Progress] = []

        def demonstrate(settings: DemoSettings, *_: Any, **__: Any) -> Progress:
            progress = Progress(settings)
            progress.hear({"kind": "evaluation", "version": 0, "success_rate": rate})
            ledger = Ledger.of({"pushed": 1, "trained": 1})
            problems = [] if balanced else ["a counter is wrong"]
            progress.read(replace(empty_status(), ledger=ledger, problems=problems), 2.0)
            seen.append(progress)
            return progress

        monkeypatch.setattr(supervisor, "demonstrate", demonstrate)
        monkeypatch.setattr("streamadv.cli.demo.Signals", lambda _: None)
        files = ["--json", str(tmp_path / "demo.json"), "--picture", str(tmp_path / "curve.png")]
        status = main(["demo", *flags, *files])
        return status, seen[0], json.loads((tmp_path / "demo.json").read_text())

    return run


def test_exit_status_says_whether_it_learnt_and_balanced(ended: Callable[..., Any]) -> None:
    assert ended()[0] == 0
    assert ended(rate=0.79)[0] == 1
    assert ended(balanced=False)[0] == 1
    assert ended("--maps", "random", rate=0.1)[0] == 0
    assert ended("--maps", "random", balanced=False)[0] == 1


def test_defaults_follow_the_maps(ended: Callable[..., Any]) -> None:
    for maps, updates in DEFAULT_UPDATES.items():
        _, progress, _ = ended("--maps", maps)
        assert progress.settings.updates == updates
    assert ended("--maps", "random", "--updates", "7")[1].settings.updates == 7


def test_runs_have_fresh_names(ended: Callable[..., Any]) -> None:
    names = {ended()[1].settings.run for _ in range(3)}
    assert len(names) == 3


def test_json_has_what_it_promises(ended: Callable[..., Any]) -> None:
    _, _, result = ended("--seed", "11")
    promised = "ledger balanced success_rate_start success_rate staleness_mean staleness_max trajectories kills seconds"
    assert set(promised.split()) <= result.keys()
    assert result["seed"] == 11
    assert set(result["ledger"]) == {"pushed", "trained", "dropped", "dead", "queued", "in_flight"}


def test_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "gymnasium" else find_spec(name)
    )
    assert main(["demo"]) == 1
    error = capsys.readouterr().err
    assert "streamadv demo needs gymnasium: pip install 'streamadv[demo]'" in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--estimator", "gae"], "--estimator gae needs values"),
        (["--estimator", "remax"], "needs a baseline rollout"),
        (["--estimator", "nonsense"], "estimator 'nonsense' is unknown"),
        (["--updates", "0"], "--updates 0"),
        (["--max-staleness", "-1"], "--max-staleness -1"),
        (["--json", "no/such/folder/demo.json"], "no/such/folder"),
        (["--picture", "no/such/folder/x.png"], "there is no folder"),
    ],
)
def test_wrong_settings(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *flags]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
