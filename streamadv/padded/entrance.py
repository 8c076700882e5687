"""The door: what a public function is given is checked once, and what it returns is the caller's own.

`checked(function)` reads the kinds of its arguments from their annotations (`arguments`). Behind it nothing is checked
again: tensors are contiguous, on one device, of shapes that fit, masks are bool, options are in range.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from ..algorithms.arguments import GREATEST, Call, Choice, Instance, Number, Optional, Values, not_a_mask
from ..errors import ArgumentError
from ..messages import brief

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R], *, differentiable: bool = False) -> Callable[P, R]:
    """`function` behind the door.

    Tensors may be of any dtype of numbers, any strides, and NumPy arrays too; they are not changed. What comes
    back is float32, contiguous, shares no memory with an argument or another result, and has no gradient unless
    `differentiable`. Raises ArgumentError for an array and OptionError for anything else that does not fit, in
    one line naming it; both are ValueErrors.
    """
    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    kinds = {name: kind_of(hints[name]) for name in signature.parameters}
    ordered = tuple(kinds)
    positional = sum(p.kind is not p.KEYWORD_ONLY for p in signature.parameters.values())

    @functools.wraps(function)
    def entrance(*args: P.args, **kwargs: P.kwargs) -> R:
        given: dict[str, Any] = dict(zip(ordered, args, strict=False))
        if len(args) > positional or not given.keys().isdisjoint(kwargs) or not kwargs.keys() <= kinds.keys():
            signature.bind(*args, **kwargs)  # raises TypeError as a plain call does
        given |= kwargs
        call = Call()
        taken = {name: kinds[name].take(name, value, call) for name, value in given.items()}
        settle(call)
        if differentiable:
            return own(function(**taken), call.memory)  # type: ignore[call-arg]
        with torch.no_grad():
            return own(function(**taken), call.memory)  # type: ignore[call-arg]

    return entrance


def kind_of(hint: Any) -> Any:
    """The kind that an annotation names."""
    if get_origin(hint) is Annotated:
        return get_args(hint)[1]
    if get_origin(hint) is Literal:
        return Choice(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not type(None)]
        kind = kind_of(options[0]) if len(options) == 1 else Instance(_classes(options))
        return Optional(kind) if len(options) < len(get_args(hint)) else kind
    if get_origin(hint) is Mapping:  # of columns: the function takes those it needs itself
        return Instance((Mapping,))
    if hint in (int, float):
        return Number(whole=hint is int)
    return Instance(_classes([hint]))


def _classes(hints: Iterable[Any]) -> tuple[type, ...]:
    wider: dict[Any, tuple[type, ...]] = {
        bool: (bool, np.bool_),
        float: (float, int, np.floating, np.integer),
    }
    return tuple(known for hint in hints for known in wider.get(hint, (hint,)))


def columns(batch: Mapping[str, Tensor], kinds: Mapping[str, Any], call: Call) -> dict[str, Tensor]:
    """The columns `kinds` names, taken from `batch`; ArgumentError for one that is missing."""
    for name in kinds:
        if batch.get(name) is None:
            present = ", ".join(map(str, batch)) or "nothing"
            raise ArgumentError(f"batch has no column {name}, it has {brief(present)}: add it")
    return {name: kind.take(name, batch[name], call) for name, kind in kinds.items()}


def added(batch: Mapping[str, Tensor], results: Mapping[str, Tensor], call: Call) -> dict[str, Tensor]:
    """`batch` as it is, with `results` of their own memory in it."""
    return {**batch, **{name: own(tensor, call.memory) for name, tensor in results.items()}}


def settle(call: Call) -> None:
    """The end of a call's checks: raises ArgumentError for a number that counts and is not finite, or a wrong mask."""
    asked = [(name, tensor, kind) for name, tensor, kind in call.numbers if kind.finite and tensor.numel()]
    sums = [tensor.detach().sum() for _, tensor, _ in asked]
    if call.device is not None and call.device[0].type != "cpu":  # one wait for the device
        parts = [*(bad.double() for _, bad in call.bad_masks), *(total.double() for total in sums)]
        found = torch.stack(parts).tolist() if parts else []
        for (name, _), bad in zip(call.bad_masks, found, strict=False):
            if bad:
                raise not_a_mask(name)
        found = found[len(call.bad_masks) :]
    else:
        found = [total.item() for total in sums]
    for (name, tensor, kind), total in zip(asked, found, strict=True):
        if not abs(total) <= GREATEST:  # a sum is quick, and not finite if an element is not
            _check_finite(name, tensor, kind, call)


def own(result: R, memory: set[int]) -> R:
    """`result` with tensors in float32, contiguous, that share no memory with `memory` or each other."""
    if isinstance(result, Tensor):
        tensor = (result if torch.is_grad_enabled() else result.detach()).to(torch.float32).contiguous()
        address = tensor.untyped_storage().data_ptr()
        if address and address in memory:
            tensor = tensor.clone()
            address = tensor.untyped_storage().data_ptr()
        memory.add(address)
        return tensor  # type: ignore[return-value]
    if isinstance(result, tuple):
        return tuple(own(item, memory) for item in result)  # type: ignore[return-value]
    return result


def _check_finite(name: str, tensor: Tensor, kind: Values, call: Call) -> None:
    bad = ~(tensor.abs() <= GREATEST)
    mask = next((mask for _, mask in call.masks if mask.shape == tensor.shape), None)
    if mask is not None:
        bad &= (mask | ~tensor.isnan()) if kind.spills else mask
    places = bad.nonzero()
    if len(places):
        place = places[0].tolist()
        where = "" if mask is None else " where the mask is set"
        raise ArgumentError(
            f"{name}{place} is {tensor[tuple(place)].item()}, needs a finite float32 number{where}"
        )
