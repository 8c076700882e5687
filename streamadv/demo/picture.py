"""The learning curve as a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .progress import Progress
from .settings import EVALUATION_EPISODES, GOAL


def draw(progress: Progress, path: Path) -> None:
    """Success rate, staleness and KL over policy versions, with the kills marked, as PNG at `path`."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    learning, staleness = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    versions = [update.version for update in progress.updates]

    learning.plot(
        [*progress.evaluations],
        [100 * rate for rate in progress.evaluations.values()],
        marker="o",
        label=f"success rate, {EVALUATION_EPISODES} sampled episodes",
    )
    learning.plot(
        versions,
        [100 * update.reward for update in progress.updates],
        alpha=0.4,
        label="mean reward of the training batch × 100",
    )
    if progress.settings.maps == "fixed":
        learning.axhline(100 * GOAL, color="gray", linestyle=":", linewidth=1)
    learning.set_ylabel("%")
    learning.set_ylim(0, 102)

    staleness.plot(versions, [update.staleness_mean for update in progress.updates], label="mean staleness")
    staleness.step(
        versions,
        [update.staleness_max for update in progress.updates],
        alpha=0.4,
        where="mid",
        label="max staleness",
    )
    staleness.set_ylabel("versions")
    staleness.set_ylim(bottom=0)
    staleness.set_xlabel("policy version")

    if progress.kills:
        names = ", ".join(kill.process for kill in progress.kills)
        for axes in (learning, staleness):
            axes.axvline(progress.kills[0].version, color="tab:red", linestyle="--", linewidth=1)
        learning.plot([], [], color="tab:red", linestyle="--", linewidth=1, label=f"kill -9: {names}")
    learning.legend(loc="lower right", fontsize="small")
    staleness.legend(loc="lower right", fontsize="small")
    settings = progress.settings
    learning.set_title(
        f"FrozenLake 4x4, {settings.maps} map{'s' * (settings.maps == 'random')}: "
        f"{settings.estimator}, correction {settings.correction}, seed {settings.seed}"
    )
    figure.savefig(path, format="png", dpi=120)
