"""The supervisor with stand-ins for the real processes: each is a few lines that speak the same messages."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
import yaml

from streamadv.demo import supervisor
from streamadv.demo.progress import Progress
from streamadv.demo.settings import DemoSettings
from streamadv.errors import ProcessEndedError
from streamadv.processes.children import Child, Message
from streamadv.status.model import Ledger, Status
from tests.children import child
from tests.support import empty_status

pytestmark = pytest.mark.processes
DEPLOY = Path(__file__).parents[3] / "deploy"

UPDATE = "reward=.5, kl=0, entropy=1, clip_fraction=0, trajectories=8, staleness_sum=8, staleness_max=2"
TRAINER = f"send('published', version=0)\nfor v in range(1, 11): send('update', version=v, {UPDATE})\n"
STAND_INS = {
    "rollouts-0": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nsend('ready')\nsignal.pause()\n",
    "grouper": "signal.pause()\n",
    "advantage-0": "signal.pause()\n",
    "trainer": TRAINER + "send('finished', version=10)\n",
    "evaluate": "for v in sys.stdin: send('evaluation', version=int(v), success_rate=int(v) / 10)\n",
}


class Listener:
    """A view that remembers, and may do something when told."""

    def __init__(self, react: Callable[[str], None] = lambda _: None) -> None:
        self.said: list[str] = []
        self.crew: dict[str, Child] = {}
        self._react = react

    def show(self, progress: Progress, crew: dict[str, Child]) -> None:
        self.crew = crew

    def say(self, text: str) -> None:
        self.said.append(text)
        self._react(text)


def status() -> Status:
    return replace(empty_status(), ledger=Ledger.of({"pushed": 8, "trained": 8}))


@pytest.fixture
def crews(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Child]]]:
    """Replace the processes by stand-ins; returns the crews made since."""
    made: list[dict[str, Child]] = []

    def stand_in(**changes: str) -> list[dict[str, Child]]:
        def new_crew(
            _: DemoSettings, url: str, directory: Path, inbox: SimpleQueue[Message], metrics_port: int | None
        ) -> dict[str, Child]:
            codes = STAND_INS | {name.replace("_", "-"): code for name, code in changes.items()}
            made.append({name: child(name, code, directory, inbox) for name, code in codes.items()})
            return made[-1]

        monkeypatch.setattr(supervisor, "new_crew", new_crew)
        return made

    return stand_in


def conduct(view: Listener, *, kill: bool = False, interrupted: threading.Event | None = None) -> Progress:
    return supervisor.conduct(
        DemoSettings(run="test", updates=10),
        "redis://nowhere",
        status,
        view,
        kill=kill,
        interrupted=interrupted or threading.Event(),
    )


def test_the_whole_course(crews: Callable[..., list[dict[str, Child]]], tmp_path: Path) -> None:
    fifo = tmp_path / "run has ended"  # the trainer's iteration ends when the producers have finished
    os.mkfifo(fifo)
    finish = (
        "def stop(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"    open({str(fifo)!r}, 'w').close(); sys.exit(0)\n"
    )
    made = crews(
        rollouts_0=finish + "signal.signal(signal.SIGTERM, stop)\nsend('ready')\nsignal.pause()\n",
        trainer=TRAINER + f"open({str(fifo)!r}).close()\nsend('finished', version=10)\n",
    )
    progress = conduct(Listener())
    assert progress.phase == "done"
    assert progress.version == 10
    assert progress.success_rate(0) == 0.0
    assert progress.success_rate(10) == 1.0
    assert progress.balanced
    assert progress.kills == []
    assert all(not process.running and process.starts == 1 for process in made[0].values())
    assert made[0]["rollouts-0"].exit_status == 0


def test_three_processes_are_killed_at_40_percent_and_started_again(
    crews: Callable[..., list[dict[str, Child]]],
) -> None:
    made = crews()
    view = Listener()
    progress = conduct(view, kill=True)
    assert [kill.process for kill in progress.kills] == ["rollouts-0", "advantage-0", "grouper"]
    assert {kill.version for kill in progress.kills} == {4}
    starts = {name: process.starts for name, process in made[0].items()}
    assert starts == {"rollouts-0": 2, "advantage-0": 2, "grouper": 2, "trainer": 1, "evaluate": 1}
    assert any("kill -9" in text for text in view.said)


def test_an_accident_is_made_good(crews: Callable[..., list[dict[str, Child]]], tmp_path: Path) -> None:
    marker = tmp_path / "died"
    dies_once = (
        f"import pathlib\np = pathlib.Path({str(marker)!r})\nif not p.exists(): p.touch(); sys.exit(3)\n"
    )
    made = crews(evaluate=dies_once + STAND_INS["evaluate"])
    view = Listener()
    assert conduct(view).success_rate(0) == 0.0  # the question it had not answered is asked again
    assert made[0]["evaluate"].starts == 2
    assert "evaluate ended with exit status 3: (empty log)" in view.said


def test_a_process_that_keeps_ending_is_an_error(crews: Callable[..., list[dict[str, Child]]]) -> None:
    made = crews(trainer="sys.exit('no such estimator')\n")
    with pytest.raises(
        ProcessEndedError, match=r"trainer keeps ending, last with exit status 1: .*no such estimator"
    ):
        conduct(Listener())
    assert all(not process.running for process in made[0].values())


def test_standing_still_is_an_error(
    crews: Callable[..., list[dict[str, Child]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = crews(trainer="signal.pause()\n")
    monkeypatch.setattr(supervisor, "STALL_S", 0.1)
    with pytest.raises(ProcessEndedError, match="while starting"):
        conduct(Listener())
    assert all(not process.running for process in made[0].values())


def test_ctrl_c_ends_every_process(crews: Callable[..., list[dict[str, Child]]]) -> None:
    made = crews(trainer=TRAINER + "signal.pause()\n")

    interrupted = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        conduct(Listener(lambda _: interrupted.set()), interrupted=interrupted)
    assert all(not process.running for process in made[0].values())


def test_processes_have_the_metrics_ports_that_were_asked_for(tmp_path: Path) -> None:
    crew = supervisor.new_crew(
        DemoSettings(run="test", updates=10), "redis://nowhere", tmp_path, SimpleQueue(), 9101
    )
    ports = {name: child.environment["STREAMADV_METRICS_PORT"] for name, child in crew.items()}
    names = ("rollouts-0", "rollouts-1", "grouper", "advantage-0", "advantage-1", "trainer")
    assert ports == {name: str(9101 + place) for place, name in enumerate(names)} | {"evaluate": "0"}


def test_a_prometheus_beside_the_demo_scrapes_these_ports() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "demo.yml").read_text())
    (job,) = config["scrape_configs"]
    targets = {
        target: group["labels"]["process"] for group in job["static_configs"] for target in group["targets"]
    }
    assert targets == {
        f"127.0.0.1:{port}": name.partition("-")[0] for name, port in supervisor.metrics_ports(9101).items()
    }
