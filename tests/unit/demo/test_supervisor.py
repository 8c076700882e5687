"""The conductor with stand-ins for the real processes: each is a few lines that speak the same messages."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from streamadv.demo import supervisor
from streamadv.demo.progress import Progress
from streamadv.demo.settings import DemoSettings
from streamadv.demo.supervisor import Conductor
from streamadv.demo.view import View
from streamadv.errors import ProcessEndedError
from streamadv.processes import machine
from streamadv.processes.machine import Plan, Signals
from streamadv.status.model import Ledger, Status
from tests.children import SEND, runs
from tests.support import empty_status

pytestmark = pytest.mark.processes
DEPLOY = Path(__file__).parents[3] / "deploy"

UPDATE = "reward=.5, kl=0, trajectories=8, staleness_sum=8, staleness_max=2"
STAND_INS = {
    "rollouts-0": "",
    "trainer": f"send('published', version=0)\nfor v in range(1, 11): send('update', version=v, {UPDATE})\n"
    "send('finished', version=10)\n",
    "evaluate": "for v in (0, 10): send('evaluation', version=v, success_rate=v / 10)\n",
}


class Listener(View):
    """A view that remembers."""

    def __init__(self, react: Callable[[str], None] = lambda _: None) -> None:
        self.said: list[str] = []
        self.pids: set[int] = set()
        self._react = react

    def show(self, progress: Progress) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)
        self.pids |= {int(pid) for pid in re.findall(r"\w \((\d+)\)", text)}
        self._react(text)


class NoSignals(Signals):
    """Without handlers: `number` is set by the test."""

    def __init__(self) -> None:
        threading.Event.__init__(self)


@pytest.fixture
def conduct(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Progress]:
    """Conduct stand-ins, some of them changed."""

    def python(code: str) -> list[str]:
        return [sys.executable, "-c", SEND + code]

    def run(
        view: Listener, *, kill: bool = False, signals: Signals | None = None, **changes: str
    ) -> Progress:
        monkeypatch.setattr(machine, "worker_command", lambda words: python("signal.pause()"))
        codes = STAND_INS | {name.replace("_", "-"): code for name, code in changes.items()}
        conductor = Conductor(Progress(DemoSettings(run="test", updates=10)), status, view, kill=kill)
        programs = {name: python(code) for name, code in codes.items()}
        plan = Plan({}, programs=programs, show=conductor.listener, tell=view.say)
        try:
            conductor.conduct(replace(plan, workers=2), signals or NoSignals())
        finally:
            assert not any(map(runs, view.pids))
        return conductor.progress

    return run


def status() -> Status:
    return replace(empty_status(), ledger=Ledger.of({"pushed": 8, "trained": 8}))


def once(marker: Path, code: str) -> str:
    """What a process does at its first start alone."""
    return (
        f"import pathlib\np = pathlib.Path({str(marker)!r})\nif not p.exists():\n    p.touch()\n    {code}\n"
    )


def test_the_whole_course(conduct: Callable[..., Progress]) -> None:
    progress = conduct(Listener())
    assert progress.phase == "done"
    assert progress.version == 10
    assert progress.evaluations[0] == 0.0
    assert progress.evaluations[10] == 1.0
    assert progress.balanced
    assert progress.kills == []


def test_three_processes_are_killed_at_40_percent_and_started_again(
    conduct: Callable[..., Progress], tmp_path: Path
) -> None:
    view = Listener()
    first = tmp_path / "first"
    waits = once(first, "signal.pause()")
    # Killed before that it would wait again.
    trains = (
        f"import os, time\nwhile not os.path.exists({str(first)!r}): time.sleep(0.01)\n"
        + STAND_INS["trainer"]
    )
    progress = conduct(view, kill=True, rollouts_0=waits, trainer=trains)
    assert [kill.process for kill in progress.kills] == ["rollouts-0", "advantage-0", "grouper"]
    assert {kill.version for kill in progress.kills} == {4}
    starts = " ".join(text for text in view.said if text.startswith("started "))
    assert [starts.count(f"{name} (") for name in ("rollouts-0", "trainer")] == [2, 1]
    assert any("kill -9" in text for text in view.said)


def test_an_accident_is_made_good(conduct: Callable[..., Progress], tmp_path: Path) -> None:
    view = Listener()
    dies = once(tmp_path / "died", "sys.exit(3)")
    assert conduct(view, evaluate=dies + STAND_INS["evaluate"]).evaluations[0] == 0.0
    assert any(text.startswith("evaluate ended with status 3") for text in view.said)


def test_a_process_that_refuses_to_start_is_an_error(conduct: Callable[..., Progress]) -> None:
    with pytest.raises(ProcessEndedError, match=r"trainer ended with status 1: .*trainer: no such estimator"):
        conduct(Listener(), trainer="sys.exit('no such estimator')\n")


def test_standing_still_is_an_error(
    conduct: Callable[..., Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STALL_S", 0.1)
    with pytest.raises(ProcessEndedError, match="while starting"):
        conduct(Listener(), trainer="signal.pause()\n", evaluate="signal.pause()\n")


def test_a_signal_ends_every_process(conduct: Callable[..., Progress]) -> None:
    signals = NoSignals()

    def interrupt(_: str) -> None:
        signals.number = signal.SIGINT
        signals.set()

    conduct(Listener(interrupt), signals=signals, trainer="signal.pause()\n")


def test_a_prometheus_beside_the_demo_scrapes_the_ports_of_its_processes(tmp_path: Path) -> None:
    settings = DemoSettings(run="test", updates=10)
    ports = supervisor.plan_of(settings, "redis://nowhere", tmp_path, metrics_port=9101).ports
    names = ("grouper", "advantage-0", "advantage-1", "rollouts-0", "rollouts-1", "trainer", "evaluate")
    assert ports == {name: 9101 + place for place, name in enumerate(names)}
    config = yaml.safe_load((DEPLOY / "prometheus" / "demo.yml").read_text())
    (job,) = config["scrape_configs"]
    targets = {
        target: group["labels"]["process"] for group in job["static_configs"] for target in group["targets"]
    }
    del ports["evaluate"]
    assert targets == {f"127.0.0.1:{port}": name.partition("-")[0] for name, port in ports.items()}
