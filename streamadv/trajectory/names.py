"""Finds column names that the caller probably meant otherwise: names of other frameworks, and typing errors.

An extra column may have any name, so a misspelt name would travel to the trainer unnoticed and fail there.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection
from functools import lru_cache
from typing import Final

from ..messages import brief, did_you_mean, log_fields
from .columns import KNOWN_COLUMNS, MAX_COLUMNS, OUTPUT_COLUMNS

logger = logging.getLogger(__name__)

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
