"""Episodes: every sampled token is trained on once, with the engine's own id and log-prob."""

from __future__ import annotations

import logging
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.errors import SettingError, TrajectoryError
from streamadv.integrations.engines import Completion, Episode, from_openai, from_sglang, from_vllm
from streamadv.integrations.engines import episode as episode_module
from streamadv.store.connection import Connection
from streamadv.trajectory.schema import parse_trajectory
from tests.shares import examples
from tests.support import producing

HEAD = {"group_id": "g", "group_size": 1, "rollout_index": 0, "reward": 1.0}


def sampled(prompt: list[int], ids: list[int], **options: Any) -> Completion:
    return Completion(prompt, ids, [-token / 10 for token in ids], "stop", **options)


def test_turns_are_joined_to_one_row() -> None:
    episode = Episode()
    episode.add(sampled([1, 2], [3, 4]), reward=0.5, state_key="s0")
    episode.add(sampled([1, 2, 3, 4, 9, 9], [5]))
    record = episode.record()
    assert record["input_ids"].tolist() == [1, 2, 3, 4, 9, 9, 5]
    assert record["response_mask"].tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert record["rollout_log_probs"].tolist() == pytest.approx([0, 0, -0.3, -0.4, 0, 0, -0.5])
    assert record["steps"] == [
        {"start": 2, "end": 4, "reward": 0.5, "state_key": "s0"},
        {"start": 6, "end": 7, "reward": 0.0, "state_key": None},
    ]
    assert "status" not in record
    assert "versions" not in record
    assert episode.breaks == []
    assert episode.turns == 2


def test_token_by_token_the_caller_makes_the_prompts() -> None:
    episode = Episode([1, 2])
    assert episode.tokens == [1, 2]
    episode.add(sampled(episode.tokens, [3]))
    episode.observe(np.array([7, 8]))
    episode.add(sampled(episode.tokens, [4]))
    assert episode.tokens == [1, 2, 3, 7, 8, 4]
    assert episode.record()["response_mask"].tolist() == [0, 0, 1, 0, 0, 1]


def test_versions_stand_at_the_tokens_that_they_sampled() -> None:
    episode = Episode()
    episode.add(sampled([1], [2], version=6))
    episode.add(sampled([1, 2, 3], [4, 5], version=7))
    record = episode.record(data_source="math")
    assert record["versions"].tolist() == [-1, 6, -1, 7, 7]
    assert record["model_version"] == (6, 7)
    del record["data_source"]
    assert parse_trajectory({**HEAD, **record}).version_span == (6, 7)
    episode.add(sampled([1, 2, 3, 4, 5], [6]))  # of a version that nobody knows
    assert not {"versions", "model_version"} & episode.record().keys()


@pytest.mark.parametrize(("reason", "status"), [("length", "truncated"), ("abort", "aborted")])
def test_the_last_completion_gives_the_status(reason: str, status: str) -> None:
    episode = Episode()
    episode.add(Completion([1], [2], [-0.5], reason))
    assert episode.record()["status"] == status
    assert episode.record(status="completed")["status"] == "completed"


def test_a_prompt_that_does_not_continue_the_tokens_begins_a_row(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_module, "_breaks_seen", count())
    episode = Episode()
    with caplog.at_level(logging.WARNING):
        episode.add(sampled([1, 2], [3, 4]))
        episode.add(sampled([1, 2, 4, 9], [5]))  # the template has removed token 3
        episode.add(sampled([1, 2, 3, 4, 8], [6]))  # goes on from the first row
        episode.add(sampled([7], [7]))
    record = episode.record()
    rows = record["rows"]
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2, 3, 4, 8, 6], [1, 2, 4, 9, 5], [7, 7]]
    assert [row["response_mask"].tolist() for row in rows] == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 1], [0, 1]]
    assert [(step.get("row", 0), step["start"]) for step in record["steps"]] == [
        (0, 2),
        (1, 4),
        (0, 5),
        (2, 1),
    ]
    assert parse_trajectory({**HEAD, **record}).row_trainable == [3, 1, 1]
    assert episode.breaks[0].startswith(
        "turn 1: its prompt of 4 tokens leaves the 4 tokens of row 0 at token 2, so row 1 begins"
    )
    assert len(episode.breaks) == 2
    assert len(caplog.messages) == 1


def test_of_two_rows_the_longer_one_is_continued() -> None:
    episode = Episode()
    episode.add(sampled([1], [2]))
    episode.add(sampled([1], [2, 3]))  # the same prompt again: another attempt
    episode.add(sampled([1, 2, 3, 4], [5]))
    rows = episode.record()["rows"]
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2], [1, 2, 3, 4, 5]]


def test_rows_of_different_agents_do_not_continue_each_other() -> None:
    episode = Episode()
    episode.add(sampled([1], [2]), agent="planner")
    episode.add(sampled([1, 2], [3]), agent="coder")
    episode.add(sampled([1, 2], [4]), agent="planner")
    rows = episode.record()["rows"]
    assert [(row["agent"], row["input_ids"].tolist()) for row in rows] == [
        ("planner", [1, 2, 4]),
        ("coder", [1, 2, 3]),
    ]
    assert episode.breaks == []


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=4), st.booleans()
        ),
        max_size=6,
    )
)
def test_every_sampled_token_is_trained_on_once(turns: list[tuple[list[int], list[int], bool]]) -> None:
    episode, tokens, expected = Episode(), [9], []
    for observed, ids, is_compacted in turns:
        tokens = [9, *observed] if is_compacted else [*tokens, *observed]
        episode.add(sampled(tokens, ids))
        tokens = [*tokens, *ids]
        expected += ids
    if not expected:
        with pytest.raises(TrajectoryError, match="no sampled tokens"):
            episode.record()
        return
    trajectory = parse_trajectory({**HEAD, **episode.record()})
    trained = [
        (step.row, token)
        for step in trajectory.steps
        for token in trajectory.rows[step.row].input_ids[step.start : step.end]
    ]
    assert [int(token) for _, token in trained] == expected
    assert sum(trajectory.row_trainable) == len(expected)


def test_log_probs_come_from_all_completions_or_none() -> None:
    episode = Episode()
    episode.add(Completion([1], [2], None))
    assert "rollout_log_probs" not in episode.record()
    episode.add(sampled([1, 2], [3]))
    with pytest.raises(TrajectoryError, match="rollout_log_probs: some completions have none"):
        episode.record()
    with pytest.raises(SettingError, match="2 token ids and 1 log-probs"):
        Completion([1], [2, 3], [-0.5])


def test_a_record_is_what_push_takes(fake: Connection) -> None:
    episode = Episode()
    episode.add(sampled([1, 2], [3, 4], version=0))
    with producing(fake, "r") as producer:
        [rollout] = producer.begin_group(1)
        assert rollout.push(**episode.record(), reward=1.0) == "pushed"


def test_offline_outputs_of_vllm() -> None:
    logprobs = [
        {5: SimpleNamespace(logprob=-0.5), 6: SimpleNamespace(logprob=-0.1)},
        {7: SimpleNamespace(logprob=-0.25)},
    ]
    choice = SimpleNamespace(token_ids=(5, 7), logprobs=logprobs, finish_reason="stop", text="ab")
    output = SimpleNamespace(prompt_token_ids=[1, 2], outputs=[choice])
    assert from_vllm(output, version=3) == Completion([1, 2], [5, 7], [-0.5, -0.25], "stop", 3, "ab")
    choice.logprobs = None
    assert from_vllm(output).log_probs is None


def test_objects_of_the_openai_package_and_tokens_written_as_ids() -> None:
    listed = [{"token": "token_id:5", "logprob": -0.5}, {"token": "token_id:7", "logprob": -0.25}]
    choice = {
        "message": {"role": "assistant", "content": "ab"},
        "logprobs": {"content": listed},
        "finish_reason": "stop",
    }
    answer = {"choices": [choice], "prompt_token_ids": [1, 2]}
    found = from_openai(SimpleNamespace(model_dump=lambda: answer))
    assert found == Completion([1, 2], [5, 7], [-0.5, -0.25], "stop", None, "ab", choice["message"])


@pytest.mark.parametrize("field", ["prompt_token_ids", "token_ids"])
def test_an_answer_without_token_ids_is_an_error_with_the_remedy(field: str) -> None:
    choice = {"text": "ab", "token_ids": [5], "prompt_token_ids": [1]}
    del choice[field]
    with pytest.raises(SettingError, match=f"has no {field}, .*return_token_ids"):
        from_openai({"choices": [choice]})
    with pytest.raises(SettingError, match="return_logprob"):
        from_sglang({"text": "", "meta_info": {}}, [1])
