"""A scorer process: brings rewards by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamadv.errors import SettingError
from streamadv.grouping.scorer import Scorer
from streamadv.grouping.scores import check_function
from streamadv.settings import Settings

from .process import join_run, leave, say_ready, stop_on_signals


def main(settings: Settings, function: Callable[..., Any], name: str | None = None, **options: Any) -> int:
    """Score with `function` until SIGTERM or SIGINT. name, options: of the `Scorer`."""
    stop = stop_on_signals()
    run = join_run(settings, stop, name or "scorer")
    name = name or name_of(function, run.manifest.scorers, run.name)
    scorer = Scorer(run.connection, run.name, name, **options)
    check_function(function, name)
    say_ready(run)
    scorer.run(function, stop)
    leave()


def name_of(function: Callable[..., Any], scorers: Sequence[str], run: str) -> str:
    """Which of the run's scorers a function is: the one called so, or the only one. Raises SettingError."""
    function_name = getattr(function, "__name__", "")
    if function_name in scorers:
        return function_name
    if len(scorers) == 1:
        return scorers[0]
    remedy = (
        "say which by --name"
        if scorers
        else f"name them by `streamadv runs create --run {run} --scorers {function_name}`"
    )
    raise SettingError(
        f"run {run} has the scorers {', '.join(scorers) or 'none'}, not {function_name!r}: {remedy}"
    )
