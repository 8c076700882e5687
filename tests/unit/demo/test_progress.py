"""What the demo knows and says of itself."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from streamadv.demo.progress import Kill, Progress
from streamadv.demo.settings import DemoSettings
from streamadv.demo.view import View, line, sparkline, summary
from streamadv.status.model import Ledger, Status
from tests.support import empty_status


def update(version: int, staleness: list[int]) -> dict[str, Any]:
    return {
        "kind": "update",
        "version": version,
        "reward": 0.5,
        "kl": 0.001,
        "trajectories": len(staleness),
        "staleness_sum": sum(staleness),
        "staleness_max": max(staleness),
    }


def evaluation(version: int, rate: float) -> dict[str, Any]:
    return {"kind": "evaluation", "version": version, "success_rate": rate}


def status(**changes: int) -> Status:
    counters = {"pushed": 10, "trained": 6, "dropped:zero_variance": 3, "grouped": 1}
    return replace(empty_status(), ledger=Ledger.of(counters | changes))


@pytest.fixture
def progress() -> Progress:
    demo = Progress(DemoSettings(run="demo-test", seed=7))
    demo.hear(evaluation(2, 0.9))
    demo.hear(evaluation(0, 0.02))
    demo.hear(update(1, [0, 1]))
    demo.hear(update(2, [3, 4]))
    demo.kills.append(Kill("grouper", 123, 1))
    demo.read(status(), 3.0)
    demo.seconds = 4.0
    return demo


def test_result(progress: Progress) -> None:
    result = progress.result()
    assert result["success_rate_start"] == 0.02
    assert result["success_rate"] == 0.9
    assert result["staleness_mean"] == 2.0
    assert result["staleness_max"] == 4
    assert result["trajectories"] == 10
    assert result["kills"] == 1
    assert result["killed"] == ["grouper"]
    assert result["seconds"] == 4.0
    assert result["seed"] == 7
    assert result["balanced"] is True
    assert result["ledger"]["dropped"] == {"zero_variance": 3}
    assert progress.learnt


def test_a_ledger_that_does_not_add_up_is_not_balanced(progress: Progress) -> None:
    progress.read(status(trained=7), 4.0)
    assert not progress.balanced
    progress.read(replace(status(), problems=["a counter is wrong"]), 5.0)
    assert not progress.balanced


def test_only_the_last_version_counts_as_learnt(progress: Progress) -> None:
    progress.hear(update(3, [1]))
    assert not progress.learnt
    progress.hear(evaluation(3, 0.79))
    assert not progress.learnt
    progress.settings = DemoSettings(run="demo-test", maps="random")
    assert progress.learnt


def test_a_trainer_that_came_back_repeats_versions(progress: Progress) -> None:
    progress.hear(update(1, [2, 2]))
    assert progress.version == 1
    assert progress.staleness_mean == 2.0


def test_throughput_is_measured_over_a_window(progress: Progress) -> None:
    for second in range(4, 20):
        progress.read(status(pushed=100 * second), float(second))
    assert progress.trajectories_per_second == pytest.approx(100.0)


def rendered(renderable: Any, width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def test_summary_writes_the_ledger_out(progress: Progress) -> None:
    text = rendered(summary(progress))
    assert "10 pushed = 6 trained + 3 dropped (zero_variance 3) + 0 dead + 1 queued + 0 in flight" in text
    assert "2.0% → 90.0%" in text
    assert "grouper (123)" in text
    assert "NOT" not in text
    progress.read(status(trained=7), 4.0)
    assert "NOT balanced" in rendered(summary(progress))


def test_lines_of_events_and_moments(progress: Progress) -> None:
    output = io.StringIO()
    view = View(Console(file=output))
    view.say("started")
    view.show(progress)
    view.show(progress)  # same second: no second line
    assert output.getvalue() == f"started\n{line(progress)}\n"
    assert "\x1b" not in output.getvalue()


def test_sparkline() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"


def test_picture_is_a_png(progress: Progress, tmp_path: Path) -> None:
    from streamadv.demo.picture import draw  # which brings matplotlib

    draw(progress, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
