"""Names of columns that mean something else, arguments that are None, log-probabilities above 0."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest

from streamadv.errors import TrajectoryError
from streamadv.trajectory.fields import TAKEN_NAMES
from streamadv.trajectory.schema import Trajectory, parse_trajectory

COLUMNS: dict[str, Any] = {"input_ids": [1, 2], "response_mask": [0, 1]}
RECORD: dict[str, Any] = {"group_id": "g", "group_size": 2, "rollout_index": 0, "reward": 1.0, **COLUMNS}


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("rollout_logprobs", "rollout_log_probs"),
        ("logprobs", "rollout_log_probs"),
        ("old_logprobs", "old_log_probs"),
        ("ref_log_prob", "ref_log_probs"),
        ("attention_mask", "response_mask"),
        ("loss_mask", "response_mask"),
        ("tokens", "input_ids"),
        ("prompt_ids", "input_ids"),
        ("token_level_scores", "token_level_rewards"),
        ("weight_versions", "versions"),
        ("rolloutLogProbs", "rollout_log_probs"),
        ("rollout_log_prob", "rollout_log_probs"),
        ("value", "values"),
        ("step", "steps"),
        ("finish_reason", "status"),
        ("score", "reward"),
        ("uid", "group_id"),
        ("domain", "data_source"),
    ],
)
@pytest.mark.parametrize("in_rows", [False, True])
def test_a_name_of_another_framework_is_an_error_that_has_the_right_one(
    name: str, right: str, in_rows: bool
) -> None:
    head = {field: RECORD[field] for field in ("group_id", "group_size", "rollout_index", "reward")}
    row = {**COLUMNS, name: [1, 1]}
    with pytest.raises(TrajectoryError) as error:
        parse_trajectory({**head, "rows": [row]} if in_rows else {**head, **row})
    assert f"{name!r} is " in str(error.value)
    assert right in str(error.value).partition(name)[2]


@pytest.mark.parametrize("in_rows", [False, True])
def test_extra_columns_are_counted_before_their_names_are_judged(
    in_rows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Judging one takes some 80 us, and an environment may give any number."""
    names = ["loss_mask", "logprobs_", *(f"input_idz{number}" for number in range(100))]
    head = {field: RECORD[field] for field in ("group_id", "group_size", "rollout_index", "reward")}
    row = {**COLUMNS, **{name: [1, 1] for name in names}}
    with pytest.raises(TrajectoryError, match="has 102 extra columns, at most 64 are allowed"):
        parse_trajectory({**head, "rows": [row]} if in_rows else {**head, **row})
    assert caplog.messages == []


@pytest.mark.parametrize("name", sorted(TAKEN_NAMES))
def test_a_name_that_a_micro_batch_has_itself_is_an_error(name: str) -> None:
    with pytest.raises(
        TrajectoryError, match=f"'{name}' is what every micro-batch has by itself, needs another"
    ):
        parse_trajectory({**RECORD, name: [1, 1]})


def test_an_alias_in_place_of_a_required_column_is_named() -> None:
    record = {name: value for name, value in RECORD.items() if name != "input_ids"}
    with pytest.raises(TrajectoryError, match="'tokens' is another framework's name: use input_ids"):
        parse_trajectory({**record, "tokens": [1, 2]})
    with pytest.raises(TrajectoryError, match="'metadata' is a field of the trajectory"):
        parse_trajectory({**HEAD_ONLY, "rows": [{**COLUMNS, "metadata": [1, 2]}]})


HEAD_ONLY = {name: value for name, value in RECORD.items() if name not in COLUMNS}


def test_a_name_close_to_a_known_one_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            item = parse_trajectory({**RECORD, "rollot_log_probs": [0.5, 0.5], "routed_experts": [1, 2]})
    assert sorted(item.rows[0].extras) == ["rollot_log_probs", "routed_experts"]
    assert len(caplog.messages) == 1
    assert "'rollot_log_probs' becomes an extra column" in caplog.messages[0]
    assert "did you mean rollout_log_probs?" in caplog.messages[0]


def test_a_misspelt_field_names_the_right_one() -> None:
    for name, said in (
        ("rewrad", "is the single value 1.0, needs a list: did you mean reward?"),
        ("x", "a list, or to stand in metadata={'x': ...}"),
    ):
        with pytest.raises(TrajectoryError, match=re.escape(said) + "$"):
            parse_trajectory({**RECORD, name: 1.0})


@pytest.mark.parametrize(
    "value", ["hello", ["a", "b"], b"hello", {"role": "tool"}, [{"role": "tool"}], [None]], ids=repr
)
def test_text_as_a_column_is_told_where_to_go(value: object) -> None:
    """`metadata` takes text and what else is no array of numbers."""
    remedy = re.escape("needs numbers, or to stand in metadata={'tool_output': ...}")
    with pytest.raises(TrajectoryError, match=rf"extra column tool_output holds .*{remedy}$"):
        parse_trajectory({**RECORD, "tool_output": value})
    with pytest.raises(TrajectoryError, match=r"extra column statuss holds .*: did you mean status\?$"):
        parse_trajectory({**RECORD, "statuss": value})


def test_optional_fields_take_none() -> None:
    optional = dict.fromkeys(
        (
            *("rewards", "metadata", "steps", "rows", "status", "role", "reward_later", "data_source"),
            *("rollout_log_probs", "versions", "values", "batch", "my_extra"),
        )
    )
    assert parse_trajectory({**RECORD, **optional}).to_json() == parse_trajectory(RECORD).to_json()
    assert Trajectory(**RECORD, steps=None, metadata=None).to_json() == parse_trajectory(RECORD).to_json()
    assert parse_trajectory({**RECORD, "reward": None}).scored
    with pytest.raises(TrajectoryError, match="input_ids"):
        parse_trajectory({**RECORD, "input_ids": None})


@pytest.mark.parametrize("name", ["rollout_log_probs", "old_log_probs", "ref_log_probs", "teacher_log_probs"])
def test_a_log_probability_above_0_is_an_error_that_says_where(name: str) -> None:
    with pytest.raises(TrajectoryError, match=rf"{name}: is 1\.5 at token 1, needs at most 0"):
        parse_trajectory({**RECORD, name: [-0.5, 1.5]})
    noise = np.array([0.0, 5e-4], np.float32)  # float32 logits minus their logsumexp
    assert parse_trajectory({**RECORD, name: noise}).rows[0].columns[name].tolist() == noise.tolist()
