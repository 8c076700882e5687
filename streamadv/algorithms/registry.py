"""Estimators by name. An estimator is a function of a packed batch; its keyword arguments are its options."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args, get_type_hints

from torch import Tensor

from ..errors import SettingError
from ..messages import brief
from ..plugins import REMEDY, load_estimators
from ..trajectory.columns import COLUMN_NAME
from .packed import LEVELS, Level

Scope = Literal["row", "group", "batch"]
MOST_NAMED: Final = 30  # estimators in an error
SCOPES: tuple[Scope, ...] = get_args(Scope)  # from narrow to wide


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an estimator returns: one value per row or step, float64 until the chain rounds it, or per token."""

    level: Level
    advantages: Tensor  # [R] or [S]; at level "token" [N], of which masked ones do not count
    returns: Tensor | None = None  # same shape; None = equal to the advantages


@dataclass(frozen=True, slots=True)
class Estimator:
    """A registered estimator: what it computes with, how much of a batch it must see, what it can be told."""

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

    scope: how much must be in the batch for a result: one "row", the whole "group", the whole "batch".
    `check_estimator` finds one that is too narrow.
    level: what one value of its result belongs to: a "row", a "step" or a "token".
    needs: columns it reads. `token_level_rewards` is made by the chain from rewards if nobody supplies it.
    Raises SettingError for an unknown scope or level, a column's name that no column can have, a name already
    taken by another function, or an option without a default or of an unknown type.
    """
    _check_declared(name, scope, level, needs)

    def register(function: Callable[..., Estimate]) -> Callable[..., Estimate]:
        known = _REGISTRY.get(name)
        if known is not None and known.function.__qualname__ != function.__qualname__:
            raise SettingError(f"estimator {name} is registered already: choose another name")
        options, types = _options(name, function)
        _REGISTRY[name] = Estimator(name, scope, level, tuple(needs), function, options, types)
        return function

    return register


def _check_declared(name: object, scope: object, level: object, needs: object) -> None:
    if not isinstance(name, str) or not name:
        raise SettingError(f"estimator: name is {brief(name)}, needs a text")
    for field, value, known in (("scope", scope, SCOPES), ("level", level, LEVELS)):
        if value not in known:
            raise SettingError(
                f"estimator {name}: {field} is {brief(value)}, needs one of {', '.join(known)}"
            )
    if isinstance(needs, str) or not isinstance(needs, Sequence):
        raise SettingError(f"estimator {name}: needs is {brief(needs)}, needs a list of column names")
    for column in needs:
        if not isinstance(column, str) or not COLUMN_NAME.fullmatch(column):
            raise SettingError(f"estimator {name}: needs names {brief(column)}, which no column is called")


def _options(name: str, function: Callable[..., Estimate]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of `function` by name: their defaults, their annotations."""
    batch, *parameters = inspect.signature(function).parameters.values() or (None,)
    if batch is None or batch.kind is batch.KEYWORD_ONLY:
        raise SettingError(f"estimator {name}: its function takes no batch, needs one as first argument")
    for parameter in parameters:
        if parameter.kind is not parameter.KEYWORD_ONLY or parameter.default is parameter.empty:
            raise SettingError(
                f"estimator {name}: option {parameter.name} must be keyword-only with a default"
            )
    try:
        hints = get_type_hints(function) if parameters else {}
    except NameError as error:
        raise SettingError(
            f"estimator {name}: an annotation is unknown ({error}): import it where the function is defined"
        ) from error
    options = {parameter.name: parameter.default for parameter in parameters}
    return options, {option: hints.get(option, Any) for option in options}


def get_estimator(name: str) -> Estimator:
    """The estimator registered as `name`, by an entry point too; SettingError with names like it if there is none."""
    if name not in _REGISTRY:
        load_estimators()
    try:
        return _REGISTRY[name]
    except KeyError:
        known = estimator_names()
        choices = difflib.get_close_matches(str(name), known) or known[:MOST_NAMED]
        raise SettingError(
            f"estimator {brief(name)} is unknown: {REMEDY}, or choose one of {', '.join(choices)}"
        ) from None


def estimator_names() -> list[str]:
    """Names of all registered estimators, sorted."""
    load_estimators()
    return sorted(_REGISTRY)
