"""What you see: a live screen on a terminal, plain lines elsewhere, and the summary at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..processes.worker import Worker
from ..status.model import Ledger
from .progress import Progress
from .settings import EVALUATION_EPISODES, GOAL

EVENTS_SHOWN: Final = 5
PLAIN_EVERY_S: Final = 2.0
_BARS: Final = "▁▂▃▄▅▆▇█"
_PHASES: Final = {
    "starting": "starting processes",
    "learning": "learning",
    "draining": "rollouts finish, the rest is trained",
    "evaluating": "evaluating the last version",
    "done": "done",
}


@contextmanager
def open_view(console: Console) -> Iterator[LiveView | PlainView]:
    """The live view on a terminal, plain lines otherwise."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield LiveView(live)


class LiveView:
    """Redraws one screen."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)

    def say(self, text: str) -> None:
        self._events.append(text)

    def note(self, text: str) -> None:
        """A line that stays above the screen."""
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, progress: Progress, crew: Mapping[str, Worker]) -> None:
        self._live.update(screen(progress, crew, list(self._events)), refresh=True)


class PlainView:
    """One line every two seconds, and one per event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    note = say

    def show(self, progress: Progress, crew: Mapping[str, Worker]) -> None:
        if progress.seconds >= self._next:
            self._next = progress.seconds + PLAIN_EVERY_S
            self.say(line(progress))


def line(progress: Progress) -> str:
    """One reading on one line."""
    words = [
        f"{progress.seconds:5.1f} s",
        progress.phase,
        f"update {progress.version}/{progress.settings.updates}",
    ]
    if progress.evaluations:
        words.append(f"success {progress.evaluations[-1].success_rate:.1%}")
    if progress.updates:
        last = progress.updates[-1]
        words += [f"reward {last.reward:.2f}", f"kl {last.kl:.4f}", f"staleness {last.staleness_mean:.1f}"]
    ledger = progress.ledger
    words += [
        f"{progress.trajectories_per_second:,.0f} trajectories/s",
        f"queued {ledger.queued:,}",
        f"in flight {ledger.in_flight:,}",
    ]
    return "  ".join(words)


def screen(progress: Progress, crew: Mapping[str, Worker], events: list[str]) -> RenderableType:
    """The live screen: progress, learning beside pipeline, processes, events."""
    settings = progress.settings
    top = Table.grid(padding=(0, 1), expand=True)
    top.add_column()
    top.add_column(ratio=1)
    top.add_column(justify="right")
    top.add_row(
        f"update {progress.version}/{settings.updates}",
        ProgressBar(total=settings.updates, completed=min(progress.version, settings.updates)),
        f"{progress.seconds:.0f} s",
    )
    middle = Columns([_learning(progress), _pipeline(progress), _processes(progress, crew)], padding=(0, 3))
    return Panel(
        Group(top, Text(), middle, Text(), *(Text(event, style="dim") for event in events)),
        title=f"streamadv demo: FrozenLake 4x4, {settings.maps} map{'s' * (settings.maps == 'random')}",
        subtitle=f"{settings.estimator}, correction {settings.correction}: {_PHASES[progress.phase]}",
    )


def sparkline(rates: list[float]) -> str:
    """Rates in 0..1 as bars."""
    return "".join(_BARS[min(int(rate * len(_BARS)), len(_BARS) - 1)] for rate in rates)


def _facts(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in rows:
        table.add_row(name, value)
    return table


def _learning(progress: Progress) -> Table:
    rows = [("success rate", "-"), ("curve", "")]
    if progress.evaluations:
        last = progress.evaluations[-1]
        curve = sparkline([evaluation.success_rate for evaluation in progress.evaluations][-11:])
        rows = [("success rate", f"{last.success_rate:.1%} (v{last.version})"), ("curve", curve)]
    if progress.updates:
        newest = progress.updates[-1]
        rows += [
            ("batch reward", f"{newest.reward:.3f}"),
            ("KL", f"{newest.kl:.4f}"),
            ("entropy", f"{newest.entropy:.3f}"),
            ("clipped", f"{newest.clip_fraction:.3f}"),
            ("staleness", f"{newest.staleness_mean:.1f}, max {newest.staleness_max}"),
        ]
    return _facts("Learning", rows)


def _pipeline(progress: Progress) -> Table:
    ledger = progress.ledger
    rows = [
        ("trajectories/s", f"{progress.trajectories_per_second:,.0f}"),
        ("pushed", f"{ledger.pushed:,}"),
        ("trained", f"{ledger.trained:,}"),
        *_reasons("dropped", ledger.dropped),
        *_reasons("dead", ledger.dead),
        ("queued", f"{ledger.queued:,}"),
        ("in flight", f"{ledger.in_flight:,}"),
        *((name, f"{depth:,}") for name, depth in progress.depths.items()),
    ]
    return _facts("Pipeline", rows)


def _reasons(kind: str, counts: dict[str, int]) -> list[tuple[str, str]]:
    return [(kind, "")] * bool(counts) + [(f"  {reason}", f"{count:,}") for reason, count in counts.items()]


def _processes(progress: Progress, crew: Mapping[str, Worker]) -> Table:
    killed = {kill.process for kill in progress.kills}
    rows = []
    for name, worker in crew.items():
        state = f"{worker.pid}" if worker.pid else "ended" if worker.done else "waits"
        if name in killed:
            state = f"[yellow]new[/] {state}"
        rows.append((name, state))
    return _facts("Processes", rows)


def summary(progress: Progress) -> RenderableType:
    """What came of it, with the ledger written out."""
    start, end = progress.success_rate(0), progress.success_rate(progress.version)
    result = progress.result()
    rows = [
        (
            "success rate",
            f"{_percent(start)} → {_percent(end)}  {sparkline([e.success_rate for e in progress.evaluations])}"
            f"  ({EVALUATION_EPISODES} sampled episodes each)",
        ),
        (
            "updates",
            f"{progress.version} in {progress.seconds:.1f} s, {result['trajectories']:,} trajectories",
        ),
        ("staleness", f"mean {progress.staleness_mean:.2f}, max {progress.staleness_max}"),
        ("kill -9", _killed(progress) or "none"),
        ("ledger", _identity(progress.ledger)),
        ("", "[green]balanced[/]" if progress.balanced else "[red]NOT balanced[/]"),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    if progress.settings.maps == "random":
        verdict = "random maps: no goal is set"
    else:
        verdict = (
            f"[green]learnt: {GOAL:.0%} reached[/]" if progress.learnt else f"[red]{GOAL:.0%} not reached[/]"
        )
    return Panel(table, title="streamadv demo", expand=False, subtitle=verdict)


def _killed(progress: Progress) -> str:
    names = ", ".join(f"{kill.process} ({kill.pid})" for kill in progress.kills)
    return f"{names} at version {progress.kills[0].version}; new ones took over" if progress.kills else ""


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _identity(ledger: Ledger) -> str:
    parts = [f"{ledger.trained:,} trained"]
    for kind, by_reason in (("dropped", ledger.dropped), ("dead", ledger.dead)):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in by_reason.items())
        parts.append(f"{sum(by_reason.values()):,} {kind}" + (f" ({reasons})" if reasons else ""))
    parts += [f"{ledger.queued:,} queued", f"{ledger.in_flight:,} in flight"]
    return f"{ledger.pushed:,} pushed = " + " + ".join(parts)
