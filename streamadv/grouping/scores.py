"""Calling the user's scoring function, and checking its answer: one score for each trajectory it was asked for."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Final

from ..errors import HungError, SettingError
from ..messages import brief, one_line, place_of
from ..run.hangs import call_within
from .unscored import UnscoredTrajectory

#: A reward, None (unscorable), or named components which are summed up.
Score = float | None | Mapping[str, float]
#: Gives a score to each trajectory of a micro-batch.
ScoreFunction = Callable[[Sequence[UnscoredTrajectory]], Sequence[Score] | Awaitable[Sequence[Score]]]

#: Named rewards of a trajectory, and characters of a name, as in `schema.Trajectory`.
MAX_REWARDS: Final = 64
MAX_NAME_CHARS: Final = 200


class ScoreError(Exception):
    """A scoring function failed, or its answer is no score. `kind`: one of `metrics.instruments.UNSCORABLE_KINDS`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(one_line(text))
        self.kind = kind


def check_function(score: ScoreFunction, name: str) -> None:
    """Raise SettingError for a function that cannot be called with a list of trajectories."""
    with suppress(ValueError):  # some functions of C have no signature
        try:
            inspect.signature(score).bind(())
        except TypeError as error:
            raise SettingError(
                f"scorer {name}: {getattr(score, '__name__', score)} cannot be called with one argument, "
                f"a list of trajectories: {error}"
            ) from None


def ask(
    score: ScoreFunction,
    trajectories: Sequence[UnscoredTrajectory],
    who: str,
    timeout_s: float,
    stop: threading.Event,
) -> list[Any]:
    """Call the function for a micro-batch. Returns a score for each trajectory, which `rewards_of` has yet to check.

    `who` is for messages. Raises ScoreError, also when the function takes longer than `timeout_s` seconds, and Stopped
    when the process is to end.
    """

    def call() -> Any:
        answer = score(trajectories)
        return asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer

    try:
        answer = call_within(call, timeout_s, who, stop)
    except HungError as error:
        raise ScoreError("hang", str(error)) from error
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # whatever the user's function raises
        raise ScoreError("exception", f"{type(error).__name__}: {error}{place_of(error)}") from error
    return scores_of(answer, len(trajectories))


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


def scores_of(answer: Any, count: int) -> list[Any]:
    """The answer for a micro-batch as a list of `count` scores, each yet to be checked. Raises ScoreError."""
    try:
        if isinstance(answer, str | bytes | Mapping | Set):
            raise TypeError
        count_given = len(answer)
        scores = list(answer)
    except TypeError:
        text = f"it returned a {type(answer).__name__}, needs a list of {count} scores"
        raise ScoreError("value", text) from None
    if count_given != count:
        raise ScoreError("value", f"it returned {count_given} scores for {count} trajectories")
    return scores


def rewards_of(score: Any, name: str, trajectory: UnscoredTrajectory) -> dict[str, float] | None:
    """Named rewards from one score of scorer `name`, None for unscorable. Raises ScoreError."""
    if score is None:
        return None
    components = dict(score) if isinstance(score, Mapping) else {name: score}
    for component in components:
        if not isinstance(component, str) or len(component) > MAX_NAME_CHARS:
            raise ScoreError(
                "value", f"it named a component {brief(component)}, needs at most {MAX_NAME_CHARS} characters"
            )
    if len({*components, *trajectory.rewards}) > MAX_REWARDS:
        raise ScoreError("value", f"it gave more named rewards than the {MAX_REWARDS} a trajectory may have")
    rewards = {component: _number(component, value) for component, value in components.items()}
    if not math.isfinite(sum(rewards.values(), trajectory.reward or 0.0)):
        raise ScoreError("value", "the sum of its rewards and those before it is not finite")
    return rewards


def _number(component: str, value: Any) -> float:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a number of numpy's, or a tensor's only one
    try:
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer beyond all floats
        pass
    raise ScoreError(
        "value", f"it gave {component} {brief(value)}, needs a finite number, or None for unscorable"
    )
