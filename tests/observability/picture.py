"""Draws the boards from what Prometheus answered during the test of the faults; Grafana takes no part in it.

python -m tests.observability.picture RESULTS.json FOLDER
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any, Final

import matplotlib

from .lab import BOARDS

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLUMNS: Final = 3
#: Lines of a panel; further ones would hide each other at this size.
MAX_LINES: Final = 8
NAMES: Final = ("streamadv_", "job", "instance", "run", "__name__")


def draw(results: dict[str, Any], board: str, file: Path) -> None:
    """All panels of a board, with the times of the faults in grey and their letters."""
    model = json.loads((BOARDS / f"{board}.json").read_text())
    titles = [panel["title"] for panel in model["panels"] if panel["type"] != "row"]
    rows = math.ceil(len(titles) / COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(15, 2.1 * rows), layout="constrained")
    faults = [fault for fault in results["faults"] if "ended" in fault]
    for axis, title in zip(axes.flat, titles, strict=False):
        _panel(axis, title, results["panels"][f"{board}/{title}"], results["began"])
        for letter, fault in zip("abcdefghijk", faults, strict=False):
            span = [(fault[when] - results["began"]) / 60 for when in ("began", "ended")]
            axis.axvspan(*span, color="0.88", zorder=0)
            axis.text(sum(span) / 2, 1.0, letter, transform=axis.get_xaxis_transform(), fontsize=6, va="top")
    for axis in list(axes.flat)[len(titles) :]:
        axis.axis("off")
    legend = "   ".join(
        f"{letter}: {fault['name']}" for letter, fault in zip("abcdefghijk", faults, strict=False)
    )
    text = f"{model['title']}. Drawn with matplotlib from what Prometheus answered; minutes on the x axis. {legend}"
    figure.suptitle(textwrap.fill(text, 170), fontsize=8)
    figure.savefig(file, dpi=70)
    plt.close(figure)


def _panel(axis: Any, title: str, queries: list[list[dict[str, Any]]], began: float) -> None:
    series = [row for query in queries for row in query]
    series.sort(
        key=lambda row: -max((float(value) for _, value in row["values"] if value != "NaN"), default=0)
    )
    for row in series[:MAX_LINES]:
        points = [((at - began) / 60, float(value)) for at, value in row["values"]]
        words = [value for name, value in row["metric"].items() if not name.startswith(NAMES)]
        axis.plot(*zip(*points, strict=True), ".", markersize=1.5, label=" ".join(words)[:24])
    axis.set_title(title, fontsize=8)
    axis.tick_params(labelsize=6)
    if any(not name.startswith(NAMES) for row in series for name in row["metric"]):
        axis.legend(fontsize=5, loc="upper left", framealpha=0.5)


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    for name in ("training", "flow", "processes"):
        draw(found, name, Path(sys.argv[2]) / f"board-{name}.png")
