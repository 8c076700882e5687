"""`streamadv demo`: the main job in one go."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..demo.settings import CORRECTIONS, DEFAULT_ESTIMATOR, DEFAULT_UPDATES, MAPS, DemoSettings
from ..errors import SettingError
from ..extras import TO_COMPUTE, TO_VIEW, require
from ..processes.machine import Signals
from . import INTERRUPTED, add_log_options, settings_from
from .view import open_page

SUPPLIED: Final = ("input_ids", "response_mask", "rollout_log_probs", "token_level_rewards")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="the whole pipeline at work: real rollouts, all stages, a policy that learns",
        description="Rollouts of a real environment, all stages as processes, and a trainer that learns. At 40 % of "
        "the run three processes are killed with SIGKILL and new ones started. Exit status 0 if the policy learnt "
        "(fixed map: success rate of at least 80 %) and every trajectory is accounted for.",
    )
    parser.add_argument(
        "--redis",
        dest="redis_url",
        metavar="URL",
        help="use this server (STREAMADV_REDIS_URL; default: an embedded one)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, episodes and evaluation (default 0)")
    parser.add_argument("--maps", choices=MAPS, default=MAPS[0], help="random is harder, without a goal")
    parser.add_argument(
        "--estimator", default=DEFAULT_ESTIMATOR, metavar="NAME", help="of the advantages (grpo)"
    )
    parser.add_argument(
        "--correction", choices=CORRECTIONS, default="ppo", help="of the loss for stale rollouts"
    )
    parser.add_argument(
        "--max-staleness", type=int, default=4, metavar="N", help="in policy versions (default 4)"
    )
    parser.add_argument(
        "--updates",
        type=int,
        metavar="N",
        help="policy updates (default "
        + ", ".join(f"{maps} {n}" for maps, n in DEFAULT_UPDATES.items())
        + ")",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="P",
        help="/metrics of the processes at P and the ports after it, for a Prometheus (default: free ones)",
    )
    parser.add_argument("--view", action="store_true", help="serve the page of streamadv view, and open it")
    parser.add_argument("--no-kill", action="store_true", help="kill nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        default=Path("demo-learning-curve.png"),
        help="learning curve (default demo-learning-curve.png)",
    )
    add_log_options(parser)
    parser.set_defaults(run=run, packages=(*TO_COMPUTE, "gymnasium", "matplotlib"))


def run(arguments: argparse.Namespace) -> int:
    if arguments.updates is None:
        arguments.updates = DEFAULT_UPDATES[arguments.maps]
    check_arguments(arguments)
    if arguments.view:
        require("--view", *TO_VIEW)
    # After the checks: these need the packages of the demo.
    from rich.console import Console

    from ..demo.picture import draw
    from ..demo.supervisor import demonstrate
    from ..demo.view import View, summary

    given = {
        field.name: getattr(arguments, field.name) for field in fields(DemoSettings) if field.name != "run"
    }
    settings = DemoSettings(run=f"demo-{secrets.token_hex(4)}", **given)
    process = settings_from(arguments)
    console, signals = Console(), Signals("demo")
    try:
        progress = demonstrate(
            settings,
            process.redis_url,
            View(console),
            signals,
            kill=not arguments.no_kill,
            server_binary=process.server_binary,
            metrics_port=process.metrics_port,
            page=partial(open_page, signals=signals) if arguments.view else None,
        )
    except KeyboardInterrupt:
        print("demo: interrupted, all its processes have ended", file=sys.stderr)
        return INTERRUPTED
    draw(progress, arguments.picture)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(progress.result(), indent=2) + "\n")
    console.print(summary(progress))
    console.print(f"learning curve: {arguments.picture}", markup=False, highlight=False)
    return 0 if progress.learnt and progress.balanced else 1


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise SettingError for what the processes would trip over later."""
    if arguments.updates < 1:
        raise SettingError(f"--updates {arguments.updates}: give at least 1")
    if arguments.max_staleness < 0:
        raise SettingError(f"--max-staleness {arguments.max_staleness}: give 0 or more")
    for flag, path in (("--json", arguments.json), ("--picture", arguments.picture)):
        if path is not None and not path.absolute().parent.is_dir():
            raise SettingError(f"{flag} {path}: there is no folder {path.absolute().parent}")
    if (name := arguments.estimator) == DEFAULT_ESTIMATOR:
        return
    from ..algorithms.chain.config import parse_config  # imports torch
    from ..algorithms.registry import get_estimator

    parse_config({"estimator": name})
    lacking = [column for column in get_estimator(name).needs if column not in SUPPLIED]
    if name == "remax":
        lacking.append("a baseline rollout in each group")
    if lacking:
        raise SettingError(
            f"--estimator {name} needs {', '.join(lacking)}, which the demo does not have: choose another"
        )
