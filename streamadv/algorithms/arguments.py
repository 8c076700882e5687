"""What an argument of a public function must be: a kind in its annotation, whose `take` checks one value.

`padded.entrance` puts functions behind these checks and explains the door; here are the kinds alone, because some
functions of this package stand behind it too. Letters in shapes are sizes that must agree within one call: B rows, T
columns of tokens.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError, OptionError
from ..messages import brief
from ..trajectory.columns import Array
from .packing import numbered

Dims = tuple[str | int, ...]
#: Whose numbers to reproduce where this library differs from its peers on purpose: ROLL at 8eb27cc, verl 0.9.1, or
#: verl at b178a3c of January 2026.
PeerQuirks = Literal["roll", "verl", "verl-2026-01"]
GREATEST: Final = float(torch.finfo(torch.float32).max)  # results are float32: above it they are infinite


@dataclass(slots=True)
class Call:
    """What the checks of one call have learnt so far."""

    #: letter -> size, and the argument that set it
    sizes: dict[str, tuple[Any, str]] = field(default_factory=dict)
    #: of all tensors, and the argument that set it
    device: tuple[torch.device, str] | None = None
    numbers: list[tuple[str, Tensor, Values]] = field(default_factory=list)
    masks: list[tuple[str, Tensor]] = field(default_factory=list)
    #: 0-d number per mask: other than 0 if it has a value other than 0 and 1
    bad_masks: list[tuple[str, Tensor]] = field(default_factory=list)
    #: addresses of tensors that belong to the caller
    memory: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Values:
    """Numbers in a tensor or NumPy array; float32 or float64 behind the door. The letter "*" is any shape."""

    dims: Dims
    or_dims: Dims | None = None
    finite: bool = True  # where the call's mask of this shape is set; without such a mask, everywhere
    spills: bool = False  # must not be infinite outside the mask either

    def take(self, name: str, value: Any, call: Call) -> Tensor:
        tensor = _tensor(name, value, call, self.dims, self.or_dims)
        if tensor.dtype not in (torch.float32, torch.float64):
            tensor = tensor.to(torch.float32 if tensor.is_floating_point() else torch.float64)
        call.numbers.append((name, tensor, self))
        return tensor


@dataclass(frozen=True, slots=True)
class Flags:
    """A mask of 0 and 1 in any dtype; bool behind the door."""

    dims: Dims
    counts: bool = True  # decides which numbers of its shape count

    def take(self, name: str, value: Any, call: Call) -> Tensor:
        tensor = _tensor(name, value, call, self.dims)
        if tensor.dtype != torch.bool:
            values = tensor if tensor.is_floating_point() else tensor.to(torch.int64)
            tensor = values.to(torch.bool)
            # x - x * x is 0 for 0 and 1 alone, and needs no copy of the flags as numbers.
            call.bad_masks.append((name, torch.addcmul(values, values, values, value=-1).abs_().sum()))
        if self.counts:
            call.masks.append((name, tensor))
        return tensor


@dataclass(frozen=True, slots=True)
class Whole:
    """Whole numbers in any integer dtype; int64 behind the door."""

    dims: Dims
    or_dims: Dims | None = None

    def take(self, name: str, value: Any, call: Call) -> Tensor:
        tensor = _tensor(name, value, call, self.dims, self.or_dims)
        if tensor.is_floating_point():
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ArgumentError(f"{name} has dtype {dtype}, needs whole numbers")
        return tensor.to(torch.int64)


@dataclass(frozen=True, slots=True)
class Each:
    """A list or tuple of `kind`, of length `size`."""

    kind: Any
    size: str

    def take(self, name: str, value: Any, call: Call) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise ArgumentError(f"{name} is {_what(value)}, needs a list")
        _fit(name, (len(value),), (self.size,), None, call)
        return [self.kind.take(f"{name}[{index}]", item, call) for index, item in enumerate(value)]


@dataclass(frozen=True, slots=True)
class LabelsOf:
    """One hashable label per row: a list, a tuple, a 1-D tensor or NumPy array; behind the door their numbers.

    Numbers are int64 on the host (`packing.numbered`); with `kept` it is a list of the labels themselves.
    """

    size: str = "B"
    kept: bool = False

    def take(self, name: str, value: Any, call: Call) -> Tensor | list[Any]:
        if isinstance(value, str | bytes | Mapping | set | frozenset) or not isinstance(value, Sized):
            raise ArgumentError(f"{name} is {_what(value)}, needs one label per row")
        if isinstance(value, Tensor | np.ndarray) and value.ndim != 1:
            raise ArgumentError(f"{name} has shape {_listed(value.shape)}, needs one label per row")
        _fit(name, (len(value),), (self.size,), None, call)
        items = value.tolist() if isinstance(value, Tensor | np.ndarray) else list(value)  # type: ignore[call-overload]
        try:
            numbers, labels = numbered(items)
        except TypeError:
            index = next(k for k, label in enumerate(items) if not _is_hashable(label))
            raise ArgumentError(
                f"{name}[{index}] is {_what(items[index])}, which cannot be compared: use text or a number"
            ) from None
        for label in labels if set(map(type, labels)) != {str} else ():  # the usual ones are checked at once
            if isinstance(label, Tensor):
                raise ArgumentError(f"{name} holds tensors, each equal to itself only: use one tensor")
            if label != label:
                index = next(k for k, item in enumerate(items) if item is label)
                raise ArgumentError(f"{name}[{index}] is NaN, which equals nothing: use text or a number")
        return items if self.kept else torch.from_numpy(numbers)


@dataclass(frozen=True, slots=True)
class Number:
    """A number in low .. high and greater than `above`. A bool is no number; a tensor of one element is one."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    whole: bool = False
    infinite: bool = False  # inf is allowed
    nan: bool = False  # NaN is allowed

    def take(self, name: str, value: Any, call: Call | None = None) -> Any:
        if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
            value = value.item()
        kind = numbers.Integral if self.whole else numbers.Real
        if isinstance(value, bool | np.bool_) or not isinstance(value, kind):
            raise OptionError(f"{name} is {_what(value)}, needs {self}")
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        if self.nan and number != number:
            return number
        fits = self.low <= number <= self.high and (number > self.above or self.above == -math.inf)
        if not fits or (math.isinf(number) and not self.infinite):
            raise OptionError(f"{name} is {number}, needs {self}")
        return number

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.above > -math.inf:
            return f"{kind} above {self.above:g}"
        if self.high < math.inf:
            return f"{kind} in {self.low:g} .. {self.high:g}"
        return f"{kind} of {self.low:g} or more" if self.low > -math.inf else f"a finite {kind[2:]}"


@dataclass(frozen=True, slots=True)
class NumberOrText:
    """A number as `number` takes it, or a text that the function reads."""

    number: Number

    def take(self, name: str, value: Any, call: Call | None = None) -> Any:
        return value if isinstance(value, str) else self.number.take(name, value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some words."""

    words: tuple[Any, ...]

    def take(self, name: str, value: Any, call: Call | None = None) -> Any:
        if not isinstance(value, str) or value not in self.words:
            what = brief(value) if isinstance(value, str) else _what(value)
            raise OptionError(f"{name} is {what}, which is unknown: choose one of {', '.join(self.words)}")
        return value


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of one of some classes."""

    classes: tuple[type, ...]

    def take(self, name: str, value: Any, call: Call | None = None) -> Any:
        wrong_bool = isinstance(value, bool) and bool not in self.classes
        if wrong_bool or not isinstance(value, self.classes):
            needed = " or ".join(accepted.__name__ for accepted in self.classes)
            raise OptionError(f"{name} is {_what(value)}, needs {needed}")
        return value


@dataclass(frozen=True, slots=True)
class NumberByName:
    """A mapping with finite numbers as values."""

    def take(self, name: str, value: Any, call: Call) -> dict[Any, float]:
        if not isinstance(value, Mapping):
            raise OptionError(f"{name} is {_what(value)}, needs a mapping")
        return {key: Number().take(f"{name}[{brief(key)}]", item) for key, item in value.items()}


@dataclass(frozen=True, slots=True)
class Optional:
    """None, or `kind`."""

    kind: Any

    def take(self, name: str, value: Any, call: Call) -> Any:
        return None if value is None else self.kind.take(name, value, call)


Tokens = Annotated[Tensor, Values(("B", "T"))]
TokenRewards = Annotated[Tensor, Values(("B", "T"), spills=True)]
Mask = Annotated[Tensor, Flags(("B", "T"))]
Rows = Annotated[Tensor, Values(("B",))]
AnyShape = Annotated[Tensor, Values(("*",))]
AnyMask = Annotated[Tensor, Flags(("*",))]
Elements = Annotated[Tensor, Values(("*",), finite=False)]  # element by element: NaN stays where it is
Logits = Annotated[Tensor, Values(("*", "V"), finite=False)]
Versions = Annotated[Tensor, Whole(("*",))]
#: One per row; equal labels are one group.
Labels = Annotated[Sequence[object] | Array | Tensor, LabelsOf()]
Names = Annotated[Sequence[object] | Array | Tensor, LabelsOf(kept=True)]
Share = Annotated[float, Number(low=0, high=1)]
NotNegative = Annotated[float, Number(low=0)]
Positive = Annotated[float, Number(above=0)]
Bound = Annotated[float, Number(above=0, infinite=True)]
BoundOrText = Annotated[float | str, NumberOrText(Number(above=0, infinite=True))]
Threshold = Annotated[float, Number(infinite=True)]
Measured = Annotated[float, Number(infinite=True, nan=True)]
Count = Annotated[int, Number(low=1, whole=True)]
Length = Annotated[int, Number(low=0, whole=True)]


def _tensor(name: str, value: Any, call: Call, dims: Dims, or_dims: Dims | None = None) -> Tensor:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise ArgumentError(f"{name} has dtype {value.dtype}, needs numbers")
        dtype = value.dtype.newbyteorder("=")
        if dtype.kind == "u" and dtype.itemsize > 1:
            dtype = np.dtype(np.int64 if dtype.itemsize < 8 else np.float64)
        elif dtype.kind == "f" and dtype.itemsize > 8:
            dtype = np.dtype(np.float64)
        plain = np.asarray(value, dtype, order="C")
        value = torch.from_numpy(plain if plain.flags.writeable else plain.copy())
    elif not isinstance(value, Tensor):
        raise ArgumentError(f"{name} is {_what(value)}, needs a tensor or a NumPy array")
    if value.layout is not torch.strided or value.is_complex() or value.is_quantized or value.is_meta:
        raise ArgumentError(
            f"{name} is a {value.layout} {value.dtype} tensor, needs a dense one of real numbers"
        )
    if call.device is None:
        call.device = value.device, name
    elif value.device != call.device[0]:
        device, other = call.device
        raise ArgumentError(f"{name} is on {value.device}, {other} on {device}: give both on one device")
    if not torch.is_grad_enabled() or not value.requires_grad:
        value = value.detach()
    tensor: Tensor = value.resolve_neg().contiguous()
    call.memory.add(tensor.untyped_storage().data_ptr())
    _fit(name, tensor.shape, dims, or_dims, call)
    return tensor


def _fit(name: str, shape: Sequence[int], dims: Dims, or_dims: Dims | None, call: Call) -> None:
    """Raise ArgumentError unless `shape` has one of the forms; remember the sizes of new letters."""
    for form in (dims, or_dims):
        if form is not None and (sizes := _matched(shape, form, call.sizes)) is not None:
            for letter, size in sizes.items():
                call.sizes.setdefault(letter, (size, name))
            return
    needed = " or ".join(_needed(form, call.sizes) for form in (dims, or_dims) if form is not None)
    setters = {call.sizes[d][1] for d in (*dims, *(or_dims or ())) if d in call.sizes}
    beside = f" beside {', '.join(sorted(setters))}" if setters else ""
    raise ArgumentError(f"{name} has shape {_listed(shape)}, needs {needed}{beside}")


def _matched(shape: Sequence[int], dims: Dims, sizes: Mapping[str, tuple[Any, str]]) -> dict[str, Any] | None:
    """The size of every letter if `shape` has the form `dims` with the `sizes` of earlier arguments, else None."""
    matched: dict[str, Any] = {}
    actual: tuple[Any, ...] = tuple(shape)
    if dims[0] == "*":
        head = len(actual) - len(dims) + 1
        if head < 0:
            return None
        actual = (actual[:head], *actual[head:])
    if len(actual) != len(dims):
        return None
    for size, letter in zip(actual, dims, strict=True):
        needed = letter if isinstance(letter, int) else sizes[letter][0] if letter in sizes else size
        if size != needed:
            return None
        if not isinstance(letter, int):
            matched[letter] = size
    return matched


def _needed(dims: Dims, sizes: Mapping[str, tuple[Any, str]]) -> str:
    if dims == ("*",):
        return _listed(sizes["*"][0]) if "*" in sizes else "any shape"
    parts = [f"{d} = {sizes[d][0]}" if d in sizes else str(d) for d in dims]  # type: ignore[index]
    return f"[{', '.join(parts)}]"


def _is_hashable(label: object) -> bool:
    try:
        hash(label)
    except TypeError:
        return False
    return True


def _what(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, Tensor | np.ndarray):
        return f"an array of shape {_listed(value.shape)}"
    return f"{brief(value)} ({type(value).__name__})"


def _listed(shape: Iterable[int]) -> str:
    return str(list(shape))
