"""The door of the padded surface: a call's arguments are checked once, and its results belong to the caller.

A decorator puts a function behind the door: `@checked`, `@checked_while_read`, or `@differentiable` if a loss is made
of its results. It reads what each argument must be from the annotations (`algorithms.arguments`). Behind the door
nobody checks again: tensors are contiguous, on one device and of shapes that fit, masks are bool, options are in range.
So functions behind the door call each other through `unchecked`.

Functions of a whole mapping `batch` know only when they run which columns they read. They begin with `Call()`,
`take_columns` and `check_numbers`, and end with `with_results`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from ..algorithms.arguments import (
    GREATEST,
    Call,
    CheckedLater,
    Choice,
    Flags,
    Instance,
    Number,
    Optional,
    Values,
    not_a_mask,
)
from ..errors import ArgumentError
from ..messages import brief

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Put `function` behind the door.

    A tensor argument may have any dtype of numbers and any strides, or be a NumPy array; it is never changed. Results
    are float32 and contiguous, share no memory with an argument or another result, and have no gradient. Raises
    ArgumentError for an array and OptionError for any other argument that does not fit, in one line that names it;
    both are ValueErrors.
    """
    return _behind_door(function, with_gradient=False)


def differentiable(function: Callable[P, R]) -> Callable[P, R]:
    """Put `function` behind the door as `checked` does, except that its results carry gradients."""
    return _behind_door(function, with_gradient=True)


def checked_while_read(function: Callable[P, R]) -> Callable[P, R]:
    """Put `function` behind the door as `checked` does, except that on a CPU it checks the elements of tensors itself.

    For functions that read each element once: a check of its own would read them a second time.
    """
    return _behind_door(function, with_gradient=False, later=True)


def unchecked(function: Callable[P, R]) -> Callable[P, R]:
    """The function that a decorator above has wrapped, for callers behind the door."""
    return cast("Callable[P, R]", function.__wrapped__)  # type: ignore[attr-defined]


def _behind_door(function: Callable[P, R], with_gradient: bool, later: bool = False) -> Callable[P, R]:
    signature = inspect.signature(function)
    # Functions of `algorithms` name Tensor and the kinds without importing them: they are imported without torch.
    known = {**vars(arguments_module), "Tensor": Tensor, **vars(sys.modules[function.__module__])}
    hints = get_type_hints(function, known, include_extras=True)
    kinds = {name: kind_of(hints[name]) for name in signature.parameters}
    if later:
        kinds = {n: CheckedLater(k) if isinstance(k, Values | Flags) else k for n, k in kinds.items()}
    names = tuple(kinds)
    positional = sum(p.kind is not p.KEYWORD_ONLY for p in signature.parameters.values())

    @functools.wraps(function)
    def entrance(*args: P.args, **kwargs: P.kwargs) -> R:
        passed: dict[str, Any] = dict(zip(names, args, strict=False))
        if (
            len(args) > positional
            or not passed.keys().isdisjoint(kwargs)
            or not kwargs.keys() <= kinds.keys()
        ):
            signature.bind(*args, **kwargs)  # raises TypeError as a plain call does
        passed |= kwargs
        call = Call()
        arguments = {name: kinds[name].take(name, value, call) for name, value in passed.items()}
        check_numbers(call)
        if with_gradient:
            return as_result(function(**arguments), call.memory)  # type: ignore[call-arg]
        with torch.no_grad():
            return as_result(function(**arguments), call.memory)  # type: ignore[call-arg]

    return entrance


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
    return {**batch, **dict(zip(results, _as_results(results.values(), call.memory), strict=True))}


def check_numbers(call: Call) -> None:
    """The last check of a call, after all arguments were taken, because masks decide which numbers count.

    Raises ArgumentError for a number that counts and is not finite, or for a mask on a device with another value than
    0 and 1.
    """
    numbers = [(name, tensor, kind) for name, tensor, kind in call.numbers if kind.finite and tensor.numel()]
    sums = [tensor.detach().sum() for _, tensor, _ in numbers]
    if call.device is not None and call.device[0].type != "cpu":  # one wait for the device
        parts = [*(bad.double() for _, bad in call.bad_masks), *(total.double() for total in sums)]
        values = torch.stack(parts).tolist() if parts else []
        for (name, _), bad in zip(call.bad_masks, values, strict=False):
            if bad:
                raise not_a_mask(name)
        totals = values[len(call.bad_masks) :]
    else:
        totals = [total.item() for total in sums]
    for (name, tensor, kind), total in zip(numbers, totals, strict=True):
        if not abs(total) <= GREATEST:  # a sum is quick, and not finite if an element is not
            _check_finite(name, tensor, kind, call)


def as_result(result: R, memory: set[int]) -> R:
    """`result` with tensors in float32, contiguous, that share no memory with `memory` or each other."""
    if isinstance(result, tuple):
        return tuple(_as_results(result, memory))  # type: ignore[return-value]
    if not isinstance(result, Tensor):
        return result
    tensor = (result if torch.is_grad_enabled() else result.detach()).to(torch.float32).contiguous()
    address = tensor.untyped_storage().data_ptr()
    if address and address in memory:
        tensor = tensor.clone()
        address = tensor.untyped_storage().data_ptr()
    memory.add(address)
    return tensor  # type: ignore[return-value]


def _as_results(results: Iterable[Any], memory: set[int]) -> Iterator[Any]:
    """Each as a result. Of equal advantages and returns few callers read both: one is copied when it is written to."""
    made: dict[int, Any] = {}
    for result in results:
        if isinstance(made.get(id(result)), Tensor):
            yield _copy_when_written(made[id(result)])
        else:
            made[id(result)] = as_result(result, memory)
            yield made[id(result)]


def _copy_when_written(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":  # there a copy costs little
        return tensor.clone()
    try:
        return torch._lazy_clone(tensor)
    except (AttributeError, RuntimeError):  # another torch, or memory that torch has not allocated
        return tensor.clone()


def _check_finite(name: str, tensor: Tensor, kind: Values, call: Call) -> None:
    bad = ~(tensor.abs() <= GREATEST)
    mask = next((mask for _, mask in call.masks if mask.shape == tensor.shape), None)
    if mask is not None:
        bad &= (mask | ~tensor.isnan()) if kind.spills else mask
    indices = bad.nonzero()
    if len(indices):
        index = indices[0].tolist()
        where = "" if mask is None else " where the mask is set"
        raise ArgumentError(
            f"{name}{index} is {tensor[tuple(index)].item()}, needs a finite float32 number{where}"
        )
