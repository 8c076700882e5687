"""Every number of a chain is checked where the chain is read: finite, in its range, with an effect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from streamadv.algorithms.chain.config import ChainConfig, parse_config
from streamadv.algorithms.registry import estimator_names, get_estimator
from streamadv.errors import SettingError

#: What the configurations need beside the number that a test is about.
REQUIRED = {
    "OverlongConfig": {"max_length": 9, "buffer": 3},
    "RejectionConfig": {"kind": "token_k1", "upper": 2.0},
}


def parts(annotation: Any) -> set[Any]:
    """The types that an annotation names, at any depth."""
    return {annotation}.union(*(parts(inner) for inner in get_args(annotation)))


def numbers(config: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the numeric fields of a configuration, and of those in it."""
    for name, field in config.model_fields.items():
        for part in parts(field.annotation):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from numbers(part, (*path, name))
        if parts(field.annotation) & {float, int}:
            yield (*path, name)


def field_of(path: tuple[str, ...], value: float, config: type[BaseModel] = ChainConfig) -> Any:
    """A configuration with `value` at `path`, and nothing else that is not needed."""
    name, *rest = path
    kinds = parts(config.model_fields[name].annotation)
    if not rest:
        inner: Any = (
            {"some": value} if dict in {getattr(kind, "__origin__", None) for kind in kinds} else value
        )
    else:
        (of,) = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
        inner = REQUIRED.get(of.__name__, {}) | field_of(tuple(rest), value, of)
        if tuple in {getattr(kind, "__origin__", None) for kind in kinds}:
            inner = [inner]
    return {name: inner}


FIELDS = [path for path in numbers(ChainConfig) if path != ("options",)]
OPTIONS = [
    (name, option)
    for name in estimator_names()
    for option, annotation in get_estimator(name).types.items()
    if parts(annotation) & {float, int}
]
NOT_FINITE = [math.nan, math.inf, -math.inf]


def test_introspection_finds_the_numbers() -> None:
    assert {("kl", "coefficient"), ("correction", "rejections", "upper"), ("reward", "components")} <= {
        *FIELDS
    }
    assert {("gae", "lam"), ("gdpo", "weights"), ("grpo", "epsilon")} <= {*OPTIONS}


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_every_number_of_a_chain_is_finite(path: tuple[str, ...], value: float) -> None:
    with pytest.raises(SettingError, match=rf"^chain: .*{path[-1]}.* is {value}, needs [^\n]*$"):
        parse_config(field_of(path, value))


@pytest.mark.parametrize(("name", "option"), OPTIONS)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_every_number_of_an_estimator_is_finite(name: str, option: str, value: float) -> None:
    given: Any = {"acc": value} if option == "weights" else value
    for chain in ({"estimator": name, option: given}, {"estimator": name, "options": {option: given}}):
        with pytest.raises(
            SettingError, match=rf"^chain: options.{option}.*: is {value}, needs a finite number$"
        ):
            parse_config(chain)


@pytest.mark.parametrize(
    ("chain", "problem"),
    [
        ({"epsilon": -1.0}, "options.epsilon: is -1.0, needs at least 0"),
        ({"estimator": "gae", "gamma": 1.5}, "options.gamma: is 1.5, needs at most 1"),
        ({"estimator": "gpg", "f_norm": 0.0}, "options.f_norm: is 0.0, needs more than 0"),
        ({"kl": {"coefficient": -0.1}}, "kl.coefficient: is -0.1, needs at least 0"),
        ({"masks": {"difficulty_low": 0.9, "difficulty_high": 0.1}}, "0.9 is not below difficulty_high 0.1"),
        ({"masks": {"max_length": 5, "wrong_max_length": 5}}, "wrong_max_length 5 does nothing"),
        ({"correction": {"lower": 0.5}}, "correction.lower 0.5 does nothing in mode truncate"),
        ({"correction": {"mode": "clip", "lower": 3.0}}, "correction.lower 3.0 is above upper 2.0"),
        ({"correction": {"mode": "mask", "upper": 0.5}}, "correction.lower 2.0 is above upper 0.5"),
        (
            {"correction": {"level": None, "veto": 0.1, "upper": 3.0}},
            "upper does nothing without correction.level",
        ),
        ({"reward": {"clip": -1.0}}, "reward.clip: is -1.0, needs more than 0"),
        (
            {"reward": {"clip": [1.0, -1.0]}},
            "reward.clip has the bounds 1.0 and -1.0, needs the lower one first",
        ),
        ({"reward": {"statistics": "row"}}, "reward.statistics does nothing without"),
        ({"reward": {"mean": "group", "epsilon": 0.1}}, "reward.epsilon does nothing without reward.std"),
        ({"reward": {"overlong": {"max_length": 4, "buffer": 5}}}, "buffer 5 is above max_length 4"),
        ({"kl": {"horizon": 5.0}}, "kl.horizon does nothing without kl.target"),
        ({"kl": {"coefficient": 0.0, "target": 0.1}}, "kl.coefficient is 0 and never adapts"),
    ],
)
def test_what_contradicts_itself_or_has_no_effect_is_refused(chain: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingError, match=rf"^chain: .*{problem}"):
        parse_config(chain)
