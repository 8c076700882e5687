"""The three boards and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from . import flow, processes, training
from .health import health
from .panels import board

FOLDER: Final = Path(__file__).parents[1] / "dashboards"


def boards() -> dict[str, Any]:
    """Board by file name."""
    first = ("Is it healthy, and if not, why", health())
    made = {
        "training": (training, "Training", "Does the policy learn, from which data, and how old is it."),
        "flow": (flow, "Flow", "Where every trajectory is, who waits for whom and why, how long it takes."),
        "processes": (processes, "Workers and server", "Which processes are there, and are they well."),
    }
    return {
        f"{name}.json": board(f"streamadv: {title}", f"streamadv-{name}", text, [first, *module.ROWS])
        for name, (module, title, text) in made.items()
    }


def render() -> dict[str, str]:
    """Text by file name."""
    return {
        name: json.dumps(made, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for name, made in boards().items()
    }
