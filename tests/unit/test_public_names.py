"""Public names and signatures stand in public_names.txt: a change of any of them shows as a diff there.

make names          # writes the file anew
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Final, get_args

import pytest
from prometheus_client.core import Metric
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import streamadv
from streamadv import algorithms, errors, gateway, losses, metrics, padded
from streamadv.algorithms import ChainConfig, estimator_names, preset_names
from streamadv.algorithms.registry import get_estimator
from streamadv.cli import make_parser
from streamadv.integrations import engines
from streamadv.settings import SECRETS, Settings
from streamadv.status import exported

from .metrics.exposed import of_processes

#: A space at which no line is broken.
UNBROKEN: Final = "\N{NO-BREAK SPACE}"
FILE: Final = Path(__file__).with_name("public_names.txt")
#: The functions of streamadv.metrics that the documentation offers; stages call the others.
METRICS_API: Final = ("serve", "training_metrics", "wait")
#: Objects that the library hands to its users: how they are made is not promised.
HANDED_OUT: Final = ("AsyncGroup", "AsyncProducer", "AsyncRollout", "Batch", "Group", "MicroBatch", "Rollout")


@pytest.mark.processes
def test_public_names_are_those_written_down() -> None:
    # in a process of its own: what other tests register, or label metrics with, is not public
    names = subprocess.run(
        [sys.executable, "-m", __name__], capture_output=True, text=True, check=True
    ).stdout
    assert FILE.read_text() == names, f"renew {FILE.name} by `make names` and read the diff"


def public_names() -> str:
    sections: dict[str, Iterator[str]] = {
        "streamadv": names_of(streamadv),
        "streamadv.errors": (error_line(kind) for kind in classes_of(errors)),
        "streamadv.metrics": (line_of(name, getattr(metrics, name)) for name in METRICS_API),
        "streamadv.algorithms": names_of(algorithms),
        "streamadv.padded": names_of(padded),
        "streamadv.losses": names_of(losses),
        "streamadv.integrations.engines": names_of(engines),
        "streamadv.gateway": names_of(gateway),
        "estimators and their options": estimators(),
        "presets": (name for name in preset_names() if name not in estimator_names() or is_built_in(name)),
        "parts of a ChainConfig": parts_of(ChainConfig),
        "environment variables": environment_variables(),
        "metrics: name, type, labels": exposed_metrics(),
        "commands": options_of(make_parser([])),
    }
    return "\n".join(f"[{title}]\n" + "".join(map(wrapped, lines)) for title, lines in sections.items())


def names_of(module: ModuleType) -> Iterator[str]:
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value):
            yield from class_lines(name, value)
        elif not inspect.ismodule(value) and name != "__version__":
            yield line_of(name, value)


def class_lines(name: str, kind: type) -> Iterator[str]:
    fields = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", {})
    yield name + (call_of(kind) if "__init__" in vars(kind) and not fields and name not in HANDED_OUT else "")
    for field, declared in fields.items():
        if field.startswith("_"):
            continue
        yield f"{name}.{field}{typed(annotation_of(kind, field))}{default_of(declared)}"
    for member in sorted(dir(kind)):
        home = next((base for base in kind.__mro__ if member in vars(base)), object)
        if (
            home.__module__.startswith("streamadv")
            and not member.startswith("_")
            and member not in {*fields, "model_config"}
        ):
            yield line_of(f"{name}.{member}", vars(home)[member])


def line_of(name: str, value: Any) -> str:
    """A function with its parameters, a property with its type, a constant with its value."""
    value = getattr(value, "__func__", value)  # of a class method
    getter = getattr(value, "fget", None) or (isinstance(value, cached_property) and value.func)
    if getter:
        return name + typed(inspect.signature(getter).return_annotation)
    if inspect.isfunction(value):
        return ("async " if inspect.iscoroutinefunction(value) else "") + name + call_of(value)
    return name if hasattr(value, "__get__") else f"{name} = {value!r}"


def call_of(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    result = signature.return_annotation
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in parameters):
            parameters.append("*")
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.name not in ("self", "cls"):
            parameters.append(f"{stars}{parameter.name}{typed(parameter.annotation)}{default_of(parameter)}")
    text = ", ".join(parameter.replace(" ", UNBROKEN) for parameter in parameters)
    return f"({text})" + ("" if inspect.isclass(function) else typed(result).replace(":", f"{UNBROKEN}->", 1))


def typed(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    return f": {annotation if isinstance(annotation, str) else annotation.__name__}"


def annotation_of(kind: type, field: str) -> Any:
    """As it is written in the code."""
    return next(
        vars(base)["__annotations__"][field] for base in kind.__mro__ if field in annotations_of(base)
    )


def annotations_of(kind: type) -> Any:
    return vars(kind).get("__annotations__", {})


def default_of(declared: Any) -> str:
    """Of a parameter, of a dataclass's or a model's field."""
    if callable(getattr(declared, "default_factory", None)):
        return f" = {declared.default_factory.__name__}()"
    none = (inspect.Parameter.empty, dataclasses.MISSING, PydanticUndefined)
    shown = "..." if declared.default is ... else repr(declared.default)
    return "" if declared.default in none else f" = {shown}"


def classes_of(module: ModuleType) -> list[type]:
    return [
        kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == module.__name__
    ]


def error_line(kind: type) -> str:
    return f"{kind.__name__}({', '.join(base.__name__ for base in kind.__bases__)})"


def is_built_in(estimator: str) -> bool:
    """Other tests register estimators of their own."""
    return get_estimator(estimator).function.__module__.startswith("streamadv.")


def estimators() -> Iterator[str]:
    for name in estimator_names():
        known = get_estimator(name)
        if is_built_in(name):
            yield f"{name}({', '.join(f'{option} = {default!r}' for option, default in known.options.items())})"


def parts_of(model: type[BaseModel]) -> Iterator[str]:
    """Fields of the models that the model's fields are made of."""
    for field in model.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if inspect.isclass(kind) and issubclass(kind, BaseModel):
                yield from class_lines(kind.__name__, kind)
                yield from parts_of(kind)


def environment_variables() -> Iterator[str]:
    for name, field in Settings.model_fields.items():
        yield f"STREAMADV_{name.upper()}{typed(annotation_of(Settings, name))}{default_of(field)}"
    for name in SECRETS:
        yield from (f"STREAMADV_{name}", f"STREAMADV_{name}_FILE")


def exposed_metrics() -> Iterator[str]:
    for family in of_processes():
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        if family.name.startswith("streamadv_") and not family.name.endswith("_created"):
            yield metric_line(family, labels)
    yield "streamadv_blocked gauge reason stage"
    for family, fact in zip(exported.families().values(), exported.FACTS.values(), strict=True):
        yield metric_line(family, sorted(fact.labels))


def metric_line(family: Metric, labels: Sequence[str]) -> str:
    total = "_total" if family.type == "counter" else ""
    return f"{family.name}{total} {family.type} {' '.join(labels)}".rstrip()


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every command with its arguments and options."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for group in groups:
        for name in sorted(group.choices):
            yield from options_of(group.choices[name])
    own = [
        action
        for action in parser._actions
        if action.dest not in ("help", "version") and action not in groups
    ]
    if own or not groups:
        yield " ".join([parser.prog, *map(argument, own)])


def argument(action: argparse.Action) -> str:
    """`--shards N=1`: how it is given and, after the `=`, what holds without it."""
    choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    value = "" if action.nargs == 0 else str(action.metavar or choices)
    default = "" if action.default in (None, False, argparse.SUPPRESS) else f"={action.default}"
    return UNBROKEN.join(filter(None, (",".join(action.option_strings), value))) + default


def wrapped(line: str) -> str:
    text = textwrap.fill(line, 120, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return text.replace(UNBROKEN, " ") + "\n"


if __name__ == "__main__":
    sys.stdout.write(public_names())
