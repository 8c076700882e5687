"""The door of the padded surface: a call's arguments are checked once, and its results belong to the caller.

A decorator puts a function behind the door: `@checked`, or `@differentiable` if a loss is made of its results. It reads
what each argument must be from the annotations (`algorithms.arguments`). Behind the door nobody checks again: tensors
are contiguous, on one device and of shapes that fit, masks are bool, options are in range. So functions behind the door
call each other through `unchecked`.

Functions of a whole mapping `batch` know only when they run which columns they read. They begin with `Call()`,
`take_columns` and `check_numbers`, and end with `with_results`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import torch
from torch import Tensor

from ..algorithms import arguments as arguments_module
from ..algorithms.arguments import GREATEST, Call, Choice, Instance, Number, Optional
from ..errors import ArgumentError
from ..messages import brief

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R], with_gradient: bool = False) -> Callable[P, R]:
    """Put `function` behind the door that `streamadv.padded` describes. with_gradient: its results have gradients."""
    signature = inspect.signature(function)
    # Functions of `algorithms` name Tensor and the kinds without importing them: they are imported without torch.
    known = {**vars(arguments_module), "Tensor": Tensor, **vars(sys.modules[function.__module__])}
    hints = get_type_hints(function, known, include_extras=True)
    kinds = {name: kind_of(hints[name]) for name in signature.parameters}

    @functools.wraps(function)
    def entrance(*args: P.args, **kwargs: P.kwargs) -> R:
        passed = signature.bind_partial(*args, **kwargs).arguments
        call = Call()
        arguments = {name: kinds[name].take(name, value, call) for name, value in passed.items()}
        check_numbers(call)
        with torch.set_grad_enabled(with_gradient and torch.is_grad_enabled()):
            return as_result(function(**arguments), call.memory)  # type: ignore[call-arg]

    return entrance


def differentiable(function: Callable[P, R]) -> Callable[P, R]:
    """Put `function` behind the door as `checked` does, except that its results carry gradients."""
    return checked(function, with_gradient=True)


def unchecked(function: Callable[P, R]) -> Callable[P, R]:
    """The function that a decorator above has wrapped, for callers behind the door."""
    return cast("Callable[P, R]", function.__wrapped__)  # type: ignore[attr-defined]


def kind_of(hint: Any) -> Any:
    """What an argument with this annotation must be: one of the kinds in `algorithms.arguments`."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[1]
    if get_origin(hint) is Literal:
        return Choice(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        kind = kind_of(options[0]) if len(options) == 1 else Instance(_classes(options))
        return Optional(kind) if len(options) < len(get_args(hint)) else kind
    if get_origin(hint) is Mapping:  # of columns: the function calls `take_columns` itself
        return Instance((Mapping,))
    if hint in (int, float):
        return Number(whole=hint is int)
    return Instance(_classes([hint]))


def _classes(hints: Iterable[Any]) -> tuple[type, ...]:
    wider: dict[Any, tuple[type, ...]] = {
        bool: (bool, np.bool_),
        float: (float, int, np.floating, np.integer),
    }
    return tuple(accepted for hint in hints for accepted in wider.get(hint, (hint,)))


def take_columns(batch: Mapping[str, Tensor], kinds: Mapping[str, Any], call: Call) -> dict[str, Tensor]:
    """The columns of `batch` that `kinds` names, checked. Raises ArgumentError, also for a missing one."""
    for name in kinds:
        if batch.get(name) is None:
            present = ", ".join(map(str, batch)) or "nothing"
            raise ArgumentError(f"batch has no column {name}, it has {brief(present)}: add it")
    return {name: kind.take(name, batch[name], call) for name, kind in kinds.items()}


def with_results(batch: Mapping[str, Tensor], results: Mapping[str, Tensor], call: Call) -> dict[str, Tensor]:
    """A new mapping: the columns of `batch` as they are, and `results` as `as_result` makes them."""
    return {**batch, **{name: as_result(result, call.memory) for name, result in results.items()}}


def check_numbers(call: Call) -> None:
    """The last check of a call, after all arguments were taken, because masks decide which numbers count.

    Raises ArgumentError for a number that counts and is not finite, or for a mask with another value than 0 and 1.
    """
    numbers = [(name, tensor, kind) for name, tensor, kind in call.numbers if kind.finite and tensor.numel()]
    sums = [tensor.detach().sum() for _, tensor, _ in numbers]  # quick, and not finite if an element is not
    found = [flag.double() for flag in (*(bad for _, bad in call.bad_masks), *sums)]
    values = torch.stack(found).tolist() if found else []  # a device is waited for once
    for (name, _), bad in zip(call.bad_masks, values, strict=False):
        if bad:
            raise ArgumentError(
                f"{name} holds values other than 0 and 1: give a mask, and weights apart from it"
            )
    totals = values[len(call.bad_masks) :]
    for (name, tensor, kind), total in zip(numbers, totals, strict=True):
        if abs(total) <= GREATEST:
            continue
        infinite = ~(tensor.abs() <= GREATEST)
        mask = next((mask for _, mask in call.masks if mask.shape == tensor.shape), None)
        if mask is not None:
            infinite &= (mask | ~tensor.isnan()) if kind.spills else mask
        for index in infinite.nonzero()[:1].tolist():
            where = "" if mask is None else " where the mask is set"
            raise ArgumentError(
                f"{name}{index} is {tensor[tuple(index)].item()}, needs a finite float32 number{where}"
            )


def as_result(result: R, memory: set[int]) -> R:
    """`result` with tensors in float32, contiguous, that share no memory with `memory` or each other."""
    if isinstance(result, tuple):
        return tuple(as_result(each, memory) for each in result)  # type: ignore[return-value]
    if not isinstance(result, Tensor):
        return result
    tensor = (result if torch.is_grad_enabled() else result.detach()).to(torch.float32).contiguous()
    address = tensor.untyped_storage().data_ptr()
    if address and address in memory:
        tensor = tensor.clone()
        address = tensor.untyped_storage().data_ptr()
    memory.add(address)
    return tensor  # type: ignore[return-value]
