"""What a scoring function may answer, checked: one score for each trajectory it was asked for."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any, Final

from ..messages import brief, one_line
from ..trajectory.payload import Payload
from ..trajectory.reference import Reference

#: A reward, None (unscorable), or named components which are summed up.
Score = float | None | Mapping[str, float]
#: Scores a micro-batch: references (identity, lengths, rewards so far) and payloads (header, columns).
ScoreFunction = Callable[
    [Sequence[Reference], Sequence[Payload]], Sequence[Score] | Awaitable[Sequence[Score]]
]

#: Named rewards of a trajectory, and characters of a name, as in `schema.Trajectory`.
MAX_REWARDS: Final = 64
MAX_NAME_CHARS: Final = 200


class ScoreError(Exception):
    """A scoring function failed, or its answer is no score. `kind`: one of `metrics.instruments.UNSCORABLE_KINDS`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(one_line(text))
        self.kind = kind


def scores_of(answer: Any, count: int) -> list[Any]:
    """The answer for a micro-batch as a list of `count` scores, each yet to be checked. Raises ScoreError."""
    try:
        if isinstance(answer, str | bytes | Mapping | Set):
            raise TypeError
        found = len(answer)
        scores = list(answer)
    except TypeError:
        text = f"it returned a {type(answer).__name__}, needs a list of {count} scores"
        raise ScoreError("value", text) from None
    if found != count:
        raise ScoreError("value", f"it returned {found} scores for {count} trajectories")
    return scores


def rewards_of(score: Any, name: str, reference: Reference) -> dict[str, float] | None:
    """Named rewards from one score of scorer `name`, None for unscorable. Raises ScoreError."""
    if score is None:
        return None
    components = dict(score) if isinstance(score, Mapping) else {name: score}
    for component in components:
        if not isinstance(component, str) or len(component) > MAX_NAME_CHARS:
            raise ScoreError(
                "value", f"it named a component {brief(component)}, needs at most {MAX_NAME_CHARS} characters"
            )
    if len({*components, *reference.rewards}) > MAX_REWARDS:
        raise ScoreError("value", f"it gave more named rewards than the {MAX_REWARDS} a trajectory may have")
    found = {component: _number(component, value) for component, value in components.items()}
    if not math.isfinite(sum(found.values(), reference.reward or 0.0)):
        raise ScoreError("value", "the sum of its rewards and those before it is not finite")
    return found


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
