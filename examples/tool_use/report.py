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
DASHES: Final = {"none": "-", "tis": "--", "clip": ":"}
COLOURS: Final = {
    "sync": "black",
    "async1": "tab:blue",
    "async2": "tab:green",
    "async4": "tab:orange",
    "async8": "tab:red",
}

Line = dict[str, Any]


def read(results: Path) -> list[Line]:
    return [json.loads(line) for line in results.open()] if results.exists() else []


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


def plot(lines: list[Line], target: float, picture: Path) -> None:
    """Reward against wall time and against trajectories; a line for each arm and seed."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    by_time, by_samples = figure.subplots(1, 2, sharey=True)
    labelled: set[str] = set()
    for line in lines:
        kind, _, correction = line["arm"].partition("-")
        large = "groups" in correction
        style: dict[str, Any] = {"color": "grey" if large else COLOURS[kind], "alpha": 0.8, "linewidth": 1.3}
        style["linestyle"] = DASHES.get(correction, "--" if correction.endswith("lr2") else "-")
        label = None if line["arm"] in labelled else line["arm"]
        labelled.add(line["arm"])
        by_time.plot(waited(line), smooth(line), label=label, **style)
        by_samples.plot(line["samples"], smooth(line), **style)
    for axes, what in ((by_time, "seconds"), (by_samples, "trajectories trained on")):
        axes.axhline(target, color="grey", linewidth=0.6)
        axes.set(xlabel=what, ylim=(0, 1))
    by_time.set_ylabel(f"reward, mean of {WINDOW} batches")
    by_time.legend(fontsize=8, loc="lower right")
    figure.savefig(picture, dpi=110)


def write(folder: Path, target: float) -> None:
    """The table, also printed, and the plot of a folder's results."""
    lines = read(folder / "results.jsonl")
    if not lines:
        return
    text = table(lines, target)
    (folder / "table.md").write_text(text)
    plot(lines, target, folder / "learning.png")
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", type=float, default=0.8)
    options = parser.parse_args()
    write(options.folder, options.target)
