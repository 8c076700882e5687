"""What you see: one line every two seconds and one for each event, and the summary at the end."""

from __future__ import annotations

from typing import Final

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table

from ..status.model import Ledger
from .progress import Progress
from .settings import EVALUATION_EPISODES, GOAL

SHOW_EVERY_S: Final = 2.0
_BARS: Final = "▁▂▃▄▅▆▇█"


class View:
    """Lines on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, progress: Progress) -> None:
        """The line of this moment, SHOW_EVERY_S after the last one at the earliest."""
        if progress.seconds >= self._next:
            self._next = progress.seconds + SHOW_EVERY_S
            self.say(line(progress))


def line(progress: Progress) -> str:
    """One reading on one line."""
    update = f"update {progress.version}/{progress.settings.updates}"
    words = [f"{progress.seconds:5.1f} s", progress.phase, update]
    if progress.evaluations:
        words.append(f"success {[*progress.evaluations.values()][-1]:.1%}")
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


def sparkline(rates: list[float]) -> str:
    """Rates in 0..1 as bars."""
    return "".join(_BARS[min(int(rate * len(_BARS)), len(_BARS) - 1)] for rate in rates)


def summary(progress: Progress) -> RenderableType:
    """What came of it, with the ledger written out."""
    result = progress.result()
    start, end = (
        "-" if rate is None else f"{rate:.1%}"
        for rate in (result["success_rate_start"], result["success_rate"])
    )
    killed = ", ".join(f"{kill.process} ({kill.pid})" for kill in progress.kills)
    if killed:
        killed += f" at version {progress.kills[0].version}; new ones took over"
    rows = [
        (
            "success rate",
            f"{start} → {end}  {sparkline([*progress.evaluations.values()])}"
            f"  ({EVALUATION_EPISODES} sampled episodes each)",
        ),
        (
            "updates",
            f"{progress.version} in {progress.seconds:.1f} s, {result['trajectories']:,} trajectories",
        ),
        ("staleness", f"mean {progress.staleness_mean:.2f}, max {progress.staleness_max}"),
        ("kill -9", killed or "none"),
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


def _identity(ledger: Ledger) -> str:
    parts = [f"{ledger.trained:,} trained"]
    for kind, by_reason in (("dropped", ledger.dropped), ("dead", ledger.dead)):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in by_reason.items())
        parts.append(f"{sum(by_reason.values()):,} {kind}" + (f" ({reasons})" if reasons else ""))
    parts += [f"{ledger.queued:,} queued", f"{ledger.in_flight:,} in flight"]
    return f"{ledger.pushed:,} pushed = " + " + ".join(parts)
