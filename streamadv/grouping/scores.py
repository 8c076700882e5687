"""Calls the user's scoring function and checks its answer: one score for each trajectory."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Final

from ..errors import HungError, JudgeAwayError, SettingError
from ..messages import brief, one_line, place_of
from ..run.hangs import GRACE_S, call_within
from ..trajectory.fields import MAX_SHORT_TEXT, is_plain
from ..trajectory.schema import MAX_REWARDS
from .scoring_streams import UnscoredTrajectory

#: A reward, None (unscorable), named components which are summed up, or why there is none: it is tried again alone.
Score = float | None | Mapping[str, float] | BaseException
#: Gives a score to each trajectory of a micro-batch.
ScoreFunction = Callable[[Sequence[UnscoredTrajectory]], Sequence[Score] | Awaitable[Sequence[Score]]]

#: Kind of an error: the judge cannot be asked now.
AWAY: Final = "away"


class ScoreError(Exception):
    """A scoring function failed, or its answer is no score. `kind`: exception, value, hang, crash or away.

    wait_s: seconds for which a judge that is away asked to be left alone.
    """

    def __init__(self, kind: str, text: str, wait_s: float = 0.0) -> None:
        super().__init__(one_line(text))
        self.kind = kind
        self.wait_s = wait_s


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


def is_coroutine(score: ScoreFunction) -> bool:
    """Whether several calls of the function may go on side by side."""
    return inspect.iscoroutinefunction(score) or inspect.iscoroutinefunction(type(score).__call__)


def ask(
    score: ScoreFunction,
    batches: Sequence[Sequence[UnscoredTrajectory]],
    who: str,
    timeout_s: float,
    stop: threading.Event,
) -> list[list[Any] | ScoreError]:
    """Call the function for each micro-batch, side by side; only a coroutine function is given several.

    Returns of each micro-batch a score for each trajectory, which `rewards_of` has yet to check, or why there is none:
    its call has raised, or taken longer than `timeout_s` seconds. `who` is for messages. Raises Stopped when the
    process is to end.
    """
    outcomes: dict[int, list[Any] | ScoreError] = {}

    async def await_one(number: int, answer: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                outcomes[number] = scores_of(await answer, len(batches[number]))
        except ScoreError as error:
            outcomes[number] = error
        # Whatever the user's function raises.
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # another call blocks, which ends all
            hang = f"{who} did not return within {timeout_s:g} s: bound what it waits for"
            outcomes[number] = ScoreError("hang", hang) if limit.expired() else failure(error)

    async def await_all(answers: Sequence[Awaitable[Any]]) -> None:
        await asyncio.gather(*(await_one(number, answer) for number, answer in enumerate(answers)))

    def call() -> None:
        answers: list[Any] = [score(batch) for batch in batches]
        if inspect.isawaitable(answers[0]):
            asyncio.run(await_all(answers))
        else:
            outcomes[0] = scores_of(answers[0], len(batches[0]))

    # A coroutine that waits too long is ended above; one that blocks its event loop is interrupted here.
    limit_s = timeout_s + GRACE_S if is_coroutine(score) else timeout_s
    try:
        call_within(call, limit_s, who, stop)
        return [outcomes[number] for number in range(len(batches))]
    except HungError as error:
        problem = ScoreError("hang", str(error))
    except ScoreError as error:
        problem = error
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        problem = failure(error)
    if len(batches) == 1:
        return [outcomes.get(0, problem)]
    return [  # any one may have blocked the others
        outcomes[number] if number in outcomes else ask(score, [batch], who, timeout_s, stop)[0]
        for number, batch in enumerate(batches)
    ]


def failure(error: BaseException) -> ScoreError:
    """What an exception of the user's function makes of a score."""
    if isinstance(error, JudgeAwayError):
        return ScoreError(AWAY, str(error), error.wait_s)
    return ScoreError("exception", f"{type(error).__name__}: {error}{place_of(error)}")


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
    if isinstance(score, BaseException):
        raise failure(score)
    try:
        components: dict[Any, Any] = dict(score) if isinstance(score, Mapping) else {name: score}
        for component in components:
            is_name = isinstance(component, str) and is_plain(str(component))
            if not is_name or len(component) > MAX_SHORT_TEXT:
                text = f"it named a component {brief(component)}, needs at most {MAX_SHORT_TEXT} characters"
                raise ScoreError("value", text)
        if len({*components, *trajectory.rewards}) > MAX_REWARDS:
            text = f"it gave more named rewards than the {MAX_REWARDS} a trajectory may have"
            raise ScoreError("value", text)
        rewards = {component: _number(component, value) for component, value in components.items()}
        if not math.isfinite(sum(rewards.values(), trajectory.reward or 0.0)):
            raise ScoreError("value", "the sum of its rewards and those before it is not finite")
        return rewards
    except Exception as error:  # a score may be an object of the user's
        raise error if isinstance(error, ScoreError) else failure(error) from None


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
