"""What an experiment has found: `python examples/tool_use/report.py OUT` writes OUT/table.md and OUT/learning.png."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

#: Batches that a reward is the mean of: one batch has eight questions.
WINDOW: Final = 10
CORRECTIONS: Final = {"none": "no correction", "tis": "truncated importance sampling", "clip": "PPO clip"}
#: Kinds of arms as they are called in tables and plot; an asynchronous one has a row for its three corrections.
KINDS: Final = {
    "sync": "synchronous",
    "sync-32-groups": "synchronous, 32 groups a batch",
    "sync-32-groups-lr2": "the same at twice the learning rate",
    **{f"async{staleness}": f"staleness {staleness}" for staleness in (1, 2, 4, 8)},
}
COLOURS: Final = dict(
    zip(KINDS, ("black", "tab:gray", "silver", "tab:blue", "tab:green", "tab:orange", "tab:red"), strict=True)
)

Line = dict[str, Any]


def read(results: Path) -> list[Line]:
    return [json.loads(line) for line in results.open()] if results.exists() else []


def row_and_correction(arm: str) -> tuple[str, str]:
    """async2-tis -> async2, tis; synchronous arms correct nothing."""
    kind, _, correction = arm.rpartition("-")
    return (kind, correction) if correction in CORRECTIONS else (arm, "none")


def smooth(line: Line) -> list[float]:
    """Reward after each update: the mean of its last batches."""
    rewards = line["reward"]
    return [mean(rewards[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(rewards))]


def waited(line: Line) -> list[float]:
    """Seconds after the first update: what starting the processes took is no matter of the arm."""
    return [seconds - line["seconds"][0] for seconds in line["seconds"]]


def reached(line: Line, target: float) -> tuple[float, int, int] | None:
    """Seconds, trajectories and updates until the reward was at the target; None: it never was."""
    for i, reward in enumerate(smooth(line)):
        if i >= WINDOW - 1 and reward >= target:
            return waited(line)[i], line["samples"][i], i + 1
    return None


def summary(line: Line, target: float) -> str:
    found = reached(line, target)
    end = (
        f"{target:g} after {found[0]:.0f} s and {found[1]} trajectories" if found else f"never at {target:g}"
    )
    return f"{len(line['reward'])} updates, reward {smooth(line)[-1]:.2f}, {end}"


def table(lines: list[Line], target: float) -> str:
    """One row an arm: means over its seeds, the reached ones where that is said."""
    rows = [
        f"| arm | seeds at {target:g} | seconds to {target:g} (each) | trajectories | updates | s per update | "
        "staleness mean, max | dropped | KL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    arms: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        arms[line["arm"]].append(line)
    for arm, of_arm in arms.items():
        ends = [found for line in of_arm if (found := reached(line, target))]
        times = ", ".join(
            f"{found[0]:.0f}" if (found := reached(line, target)) else "never" for line in of_arm
        )
        means = [f"{mean(end[place] for end in ends):.0f}" if ends else "-" for place in range(3)]
        pace = mean(waited(line)[-1] / max(1, len(line["reward"]) - 1) for line in of_arm)
        staleness = f"{mean(mean(line['staleness_mean']) for line in of_arm):.2f}"
        staleness += f", {max(max(line['staleness_max']) for line in of_arm)}"
        lost = mean(sum(line["dropped"]) / (sum(line["dropped"]) + line["samples"][-1]) for line in of_arm)
        kl = mean(mean(line["kl"]) for line in of_arm)
        rows.append(
            f"| {arm} | {len(ends)} of {len(of_arm)} | {means[0]} ({times}) | {means[1]} | {means[2]} | {pace:.2f} | "
            f"{staleness} | {lost:.0%} | {kl:.4f} |"
        )
    return "\n".join(rows) + "\n"


def overview(lines: list[Line], target: float) -> str:
    """Seconds to the target, each seed's, by staleness and correction."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for line in sorted(lines, key=lambda line: line["seed"]):
        end = reached(line, target)
        found[row_and_correction(line["arm"])].append(f"{end[0]:.0f}" if end else "never")
    rows = [f"| seconds to {target:g} | {' | '.join(CORRECTIONS.values())} |", "|---" * 4 + "|"]
    for kind, name in KINDS.items():
        cells = [", ".join(found[kind, correction]) or "-" for correction in CORRECTIONS]
        if any(cell != "-" for cell in cells):
            rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def plot(lines: list[Line], target: float, picture: Path) -> None:
    """Reward against wall time, above, and against trajectories; a column for each correction, a line for each seed."""
    figure = Figure(figsize=(12, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(CORRECTIONS), sharey=True, sharex="row")
    for line in lines:
        kind, correction = row_and_correction(line["arm"])
        of_column = (
            range(len(CORRECTIONS)) if kind.startswith("sync") else [list(CORRECTIONS).index(correction)]
        )
        style: dict[str, Any] = {"color": COLOURS[kind], "linewidth": 1.1, "alpha": 0.85}
        for column in of_column:
            axes[0, column].plot(waited(line), smooth(line), label=KINDS[kind], **style)
            axes[1, column].plot(line["samples"], smooth(line), **style)
    for row, what in enumerate(("seconds", "trajectories trained on")):
        axes[row, 0].set_ylabel(f"reward, mean of {WINDOW} batches")
        for column, name in enumerate(CORRECTIONS.values()):
            axes[row, column].axhline(target, color="grey", linewidth=0.6)
            axes[row, column].set(xlabel=what, title=name, ylim=(0, 1), xlim=(0, None))
    labelled = dict(zip(*reversed(axes[0, 0].get_legend_handles_labels()), strict=True))
    figure.legend(labelled.values(), labelled.keys(), loc="outside lower center", ncols=len(labelled))
    figure.savefig(picture, dpi=100)


def write(folder: Path, target: float) -> None:
    """The tables, also printed, and the plot of a folder's results."""
    lines = read(folder / "results.jsonl")
    if not lines:
        return
    text = f"{overview(lines, target)}\n{table(lines, target)}"
    (folder / "table.md").write_text(text)
    plot(lines, target, folder / "learning.png")
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", type=float, default=0.8)
    options = parser.parse_args()
    write(options.folder, options.target)
