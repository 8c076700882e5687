"""Fields of the model: what pydantic accepts as a number, a text, metadata or a column, and which names mean others.

An extra column may have any name, so a misspelt name would travel to the trainer unnoticed and fail there: names that
the caller probably meant otherwise, those of other frameworks and typing errors, are found here.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from math import isfinite
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, FiniteFloat, JsonValue, StringConstraints, WithJsonSchema
from pydantic_core import CoreSchema, core_schema

from ..messages import brief, did_you_mean, log_fields
from .columns import KNOWN_COLUMNS, MAX_COLUMNS, OUTPUT_COLUMNS, REQUIRED_COLUMNS, Array, known_array

logger = logging.getLogger(__name__)

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


# Names

#: What other frameworks call a field -> what to do here.
_ADVICE: Final = {
    "tokens token_ids sequences output_ids": "use input_ids (prompt and response)",
    "prompt_ids response_ids completion_ids prompt_token_ids response_token_ids prompts responses": (
        "prompt and response stand end to end in input_ids, response_mask tells them apart"
    ),
    "loss_mask action_mask completion_mask assistant_masks mask labels": (
        "use response_mask (1 = written by the policy, as long as input_ids)"
    ),
    "attention_mask": (
        "leave it out, rows are not padded: response_mask (1 = written by the policy) says what is trained on"
    ),
    "logprobs log_probs logprob rollout_logprobs inference_logprobs sampling_logprobs logp": (
        "use rollout_log_probs for those of the engine, old_log_probs for those made anew by the trainer's weights"
    ),
    "old_logprobs prox_logp old_log_prob": "use old_log_probs",
    "ref_logprobs ref_log_prob base_action_log_probs": "use ref_log_probs",
    "teacher_logprobs teacher_log_prob": "use teacher_log_probs",
    "token_level_scores token_rewards": "use token_level_rewards",
    "weight_versions token_versions": "use versions (one per token) or model_version",
    "policy_version weight_version version": "use model_version",
    "uid group_index prompt_id instance_id task_id": "use group_id, or metadata",
    "repetition_id trial": "use rollout_index",
    "num_generations n_samples_per_prompt": "use group_size",
    "domain env_name": "use data_source",
    "score scores raw_reward": "use reward, or rewards for named components",
    "finish_reason stop_reason truncated is_truncated": "say it by status: completed, truncated, aborted or failed",
}
_OF_OTHERS: Final = {name: advice for names, advice in _ADVICE.items() for name in names.split()}
_FIELDS: Final = (
    *("reward", "rewards", "reward_later", "status", "role", "model_version", "metadata", "steps", "rows"),
    *("group_id", "group_size", "rollout_index", "data_source", "round"),
)
#: What a micro-batch or one of its layouts has under these names would hide a column.
TAKEN_NAMES: Final = frozenset(
    (
        *("position_ids", "cu_seqlens", "row_lengths", "row_numbers", "references", "version_spans"),
        *("has", "optional", "num_rows", "num_tokens", "columns", "extras", "padded"),
        *("prompt_response", "prompt_mask", "response_attention_mask"),
    )
)
#: How alike two names are (0 to 1) of which one is taken for a typing error of the other.
_ALIKE: Final = 0.87


def check_names(names: Collection[str]) -> None:
    """Raise ValueError for too many extra columns, or the name of one that means something else; warn once if it may.

    An error: another framework's name, one of TAKEN_NAMES, or a known one but for case, underscores and a plural. A
    warning: a name close to a known one by spelling.
    """
    if len(names) > MAX_COLUMNS:  # before they are judged one by one
        raise ValueError(f"has {len(names)} extra columns, at most {MAX_COLUMNS} are allowed")
    for name in names:
        problem, close = _judge(name)
        if problem is not None:
            raise ValueError(problem)
        if close is not None:
            _warn(name, close)


@lru_cache(1024)
def _judge(name: str) -> tuple[str | None, str | None]:
    """What is wrong with the name of an extra column, and the known name that it is close to."""
    known = (*KNOWN_COLUMNS, *OUTPUT_COLUMNS, *_FIELDS)
    if advice := _OF_OTHERS.get(name):
        return f"{brief(name)} is another framework's name: {advice}", None
    if name in _FIELDS:
        return f"{brief(name)} is a field of the trajectory, needs to stand outside its rows", None
    if name in TAKEN_NAMES:
        return (
            f"{brief(name)} is what every micro-batch has by itself, needs another name, such as own_{name}",
            None,
        )
    same = {_plain(each): each for each in known}.get(_plain(name))
    if same is not None:
        return f"{brief(name)} is no column that is interpreted, needs to be {same}", None
    close = difflib.get_close_matches(name, known, 1, _ALIKE)
    return None, close[0] if close else None


def meant(name: str) -> str:
    """`: did you mean NAME?` for an extra column that may be a misspelt field; `` if no known name is near."""
    return did_you_mean(name, (*KNOWN_COLUMNS, *_FIELDS))


@lru_cache(1024)
def _warn(name: str, close: str) -> None:
    """Once for each name."""
    text = "%s becomes an extra column, which only your own code reads: did you mean %s?"
    logger.warning(text, brief(name), close, extra=log_fields("column_unknown"))


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").removesuffix("s")
