"""Estimators by name: functions of a packed batch, with their options as keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_type_hints

from pydantic import Field

from ..errors import SettingError
from ..messages import brief, did_you_mean
from ..plugins import REMEDY, load_estimators
from ..trajectory.columns import COLUMN_NAME
from .packed import LEVELS, Level

if TYPE_CHECKING:
    from torch import Tensor

Scope = Literal["row", "group", "batch"]
#: Annotations of options, which the chain checks; numbers without one have to be finite.
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
MOST_NAMED: Final = 30  # estimators in an error
SCOPES: tuple[Scope, ...] = get_args(Scope)  # from narrow to wide


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an estimator returns: one value per row, step or token, float64 or float32; the chain rounds it."""

    level: Level
    advantages: Tensor  # [R], [S] or [N]; at level "token" masked ones do not count
    returns: Tensor | None = None  # same shape; None = equal to the advantages


@dataclass(frozen=True, slots=True)
class Estimator:
    """A registered estimator: its function and options, the columns it needs, how much of a batch it must see."""

    name: str
    scope: Scope
    level: Level
    needs: tuple[str, ...]
    function: Callable[..., Estimate]
    options: Mapping[str, Any]  # name -> default
    types: Mapping[str, Any]  # name -> annotation


_REGISTRY: dict[str, Estimator] = {}


def estimator(
    name: str, *, scope: Scope, needs: Sequence[str] = (), level: Level = "row"
) -> Callable[[Callable[..., Estimate]], Callable[..., Estimate]]:
    """Register `function(batch, *, option=default, ...) -> Estimate` under `name`.

    Args:
      name: what configurations call it.
      scope: how much must be in the batch for a result: one "row", the whole "group" or the whole "batch".
        `check_estimator` tells if it is too narrow.
      needs: columns that the function reads. The chain makes `token_level_rewards` from rewards if nobody supplies it.
      level: what one value of its result belongs to: a "row", a "step" or a "token".

    Raises SettingError for an unknown scope or level, an invalid column name, a name that another function has, or an
    option without a default or of an unknown type.
    """
    if not isinstance(name, str) or not name:
        raise SettingError(f"estimator: name is {brief(name)}, needs a text")
    for field, value, choices in (("scope", scope, SCOPES), ("level", level, LEVELS)):
        if value not in choices:
            raise SettingError(
                f"estimator {name}: {field} is {brief(value)}, needs one of {', '.join(choices)}"
            )
    if isinstance(needs, str) or not isinstance(needs, Sequence):
        raise SettingError(f"estimator {name}: needs is {brief(needs)}, needs a list of column names")
    for column in needs:
        if not isinstance(column, str) or not COLUMN_NAME.fullmatch(column):
            raise SettingError(f"estimator {name}: needs names {brief(column)}, which no column is called")

    def register(function: Callable[..., Estimate]) -> Callable[..., Estimate]:
        registered = _REGISTRY.get(name)
        if registered is not None and registered.function.__qualname__ != function.__qualname__:
            raise SettingError(f"estimator {name} is registered already: choose another name")
        options, types = _options(name, function)
        _REGISTRY[name] = Estimator(name, scope, level, tuple(needs), function, options, types)
        return function

    return register


def _options(name: str, function: Callable[..., Estimate]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(defaults, annotations) of the options of `function`, by name."""
    batch, *parameters = inspect.signature(function).parameters.values() or (None,)
    if batch is None or batch.kind is batch.KEYWORD_ONLY:
        raise SettingError(f"estimator {name}: its function takes no batch, needs one as first argument")
    for parameter in parameters:
        if parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is parameter.empty:
            raise SettingError(
                f"estimator {name}: option {parameter.name} must be keyword-only with a default"
            )
    try:
        hints = get_type_hints(function, include_extras=True) if parameters else {}
    except NameError as error:
        raise SettingError(
            f"estimator {name}: an annotation is unknown ({error}): import it where the function is defined"
        ) from error
    options = {parameter.name: parameter.default for parameter in parameters}
    return options, {option: hints.get(option, Any) for option in options}


def is_estimator(name: str) -> bool:
    """Whether an estimator is registered as `name`, also by an entry point; they are loaded if nobody else has it."""
    if name not in _REGISTRY:
        load_estimators()
    return name in _REGISTRY


def get_estimator(name: str) -> Estimator:
    """The estimator registered as `name`, also by an entry point. Raises SettingError, with similar names."""
    if is_estimator(name):
        return _REGISTRY[name]
    names = estimator_names()
    nearest = did_you_mean(str(name), names)
    others = (
        f" If it is one of yours, {REMEDY}"
        if nearest
        else f": {REMEDY}, or choose one of {', '.join(names[:MOST_NAMED])}"
    )
    raise SettingError(f"estimator {brief(name)} is unknown{nearest}{others}")


def find_estimator(estimator: str | Callable[..., Estimate]) -> Estimator:
    """The registered estimator of this name or function. Raises SettingError."""
    if isinstance(estimator, str):
        return get_estimator(estimator)
    for definition in _REGISTRY.values():
        if definition.function is estimator:
            return definition
    raise SettingError(
        f"estimator {brief(estimator)} is not registered: put @estimator(name, scope=...) above the function"
    )


def estimator_names() -> list[str]:
    """Names of all registered estimators, sorted."""
    load_estimators()
    return sorted(_REGISTRY)
