"""Types of the model's fields: what pydantic accepts as a number, a text, metadata or a column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from math import isfinite
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, FiniteFloat, JsonValue, StringConstraints, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from ..messages import brief
from .columns import KNOWN_COLUMNS, OUTPUT_COLUMNS, REQUIRED_COLUMNS, Array, known_array

MAX_METADATA_DEPTH: Final = 32
MAX_INTEGER_BITS: Final = 128  # in metadata
MAX_SHORT_TEXT: Final = 200  # characters
MAX_LONG_TEXT: Final = 4000
MAX_VERSION: Final = 2**53  # exclusive


def _no_text(value: Any) -> Any:
    if isinstance(value, str | bytes):
        raise ValueError(f"is the text {brief(value)}, needs a number")
    return value


def _no_text_or_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"is {value}, needs a whole number")
    return _no_text(value)


def _plain_metadata(value: Any) -> Any:
    """Refuse values that JSON does not preserve: NaN, infinity, endless digits or nesting, lone surrogates."""
    if is_plain(value):
        return value
    level = [value]
    for _ in range(MAX_METADATA_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                below += item
            elif isinstance(item, float) and not isfinite(item):
                raise ValueError(f"holds {item}, needs finite numbers")
            elif isinstance(item, int) and item.bit_length() > MAX_INTEGER_BITS:
                raise ValueError(f"holds {brief(item)}, needs at most {MAX_INTEGER_BITS}")
            elif isinstance(item, str):
                try:
                    item.encode()
                except UnicodeEncodeError:
                    raise ValueError(f"holds {brief(item)}, which is no Unicode text") from None
        if not below:
            return value
        level = below
    raise ValueError(f"is nested more than {MAX_METADATA_DEPTH} levels deep")


def is_plain(value: Any, depth: int = MAX_METADATA_DEPTH - 1) -> bool:
    """Whether this is what JSON preserves, in Python's own types and up to so many levels: it needs no closer look."""
    kind = type(value)
    if kind is str:
        return _is_text(value)
    if kind is float:
        return isfinite(value)
    if kind is dict or kind is list:
        items = value.values() if kind is dict else value
        has_texts = kind is list or all(map(_is_text, value))
        return depth > 0 and has_texts and all(map(is_plain, items, repeat(depth - 1)))
    return value is None or kind is bool or (kind is int and value.bit_length() <= MAX_INTEGER_BITS)


def _is_text(value: Any) -> bool:
    try:
        return type(value) is str and (value.isascii() or bool(value.encode()))
    except UnicodeEncodeError:  # a lone surrogate
        return False


Whole: Final = BeforeValidator(_no_text_or_bool)
#: True and False are 1 and 0.
Reward = Annotated[FiniteFloat, BeforeValidator(_no_text), WithJsonSchema({"type": ["number", "boolean"]})]
#: Without `}`, which ends the hash tag of a key: in a key made of an id, what follows would look like another kind's.
GroupId = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f}]+$")]
ShortText = Annotated[str, StringConstraints(max_length=MAX_SHORT_TEXT)]
LongText = Annotated[str, StringConstraints(max_length=MAX_LONG_TEXT)]
RoundName = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_SHORT_TEXT, pattern=r"^[^\s\x00-\x1f]+$")
]
Metadata = Annotated[dict[str, JsonValue], BeforeValidator(_plain_metadata)]
Version = Annotated[int, Field(ge=0, lt=MAX_VERSION), Whole]


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """The pydantic type of a column the library interprets: validated to its dtype, written as a list."""

    name: str

    def validate(self, value: Any) -> Array | None:
        if value is None and self.name not in REQUIRED_COLUMNS:
            return None
        return known_array(self.name, value)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        write = core_schema.plain_serializer_function_ser_schema(
            lambda array: None if array is None else array.tolist()
        )
        return core_schema.no_info_plain_validator_function(self.validate, serialization=write)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        dtype = KNOWN_COLUMNS.get(self.name) or OUTPUT_COLUMNS[self.name]
        item: dict[str, Any] = {"type": "number"} if dtype.kind == "f" else {"type": "integer"}
        if self.name == "input_ids":
            item["minimum"] = 0
        if self.name == "response_mask":
            item = {"enum": [0, 1, False, True]}
        kind = "array" if self.name in REQUIRED_COLUMNS else ["array", "null"]
        return {"type": kind, "minItems": 1, "items": item}
