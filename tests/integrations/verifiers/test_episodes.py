"""Episodes of verifiers, as an environment server sends them, become trajectories."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import verifiers.v1 as vf
from verifiers.v1.episode import WireEpisode

from streamadv.errors import TrajectoryError
from streamadv.integrations import verifiers
from streamadv.producer import Producer

TASK = {"type": "T", "data": {"idx": 0, "prompt": "hi"}}


def said(parent: int | None, *token_ids: int) -> dict[str, Any]:
    """A message of the user or a tool."""
    message = {"role": "user", "content": "".join(map(str, token_ids))}
    return {"parent": parent, "message": message, "token_ids": token_ids, "mask": [False] * len(token_ids)}


def sampled(parent: int, scaffold: Sequence[int], *token_ids: int, **fields: Any) -> dict[str, Any]:
    """A message of the policy, behind tokens of the template. Log-probs are -id / 100."""
    node = {
        "parent": parent,
        "message": {"role": "assistant", "content": "".join(map(str, token_ids))},
        "sampled": True,
        "token_ids": [*scaffold, *token_ids],
        "mask": [False] * len(scaffold) + [True] * len(token_ids),
        "logprobs": [-token / 100 for token in token_ids],
    }
    return node | fields


def trace(nodes: Sequence[Mapping[str, Any]], name: str = "solver", **fields: Any) -> dict[str, Any]:
    trainable = fields.pop("trainable", True)
    agent = {"config": {}, "name": name, "trainable": trainable}
    rewards = {"right": {"score": 1.0, "weight": 0.5}}
    return {"task": TASK, "agent": agent, "nodes": nodes, "ok": True, "rewards": rewards, **fields}


def episode(*traces: Mapping[str, Any], **fields: Any) -> Any:
    return WireEpisode.model_validate({"task": TASK, "ok": True, "traces": traces, **fields})


CHAIN = [said(None, 1, 2), sampled(0, [3], 4, 5), said(1, 6), sampled(2, [], 7)]


def test_a_conversation_is_one_row() -> None:
    record = verifiers.record(episode(trace(CHAIN), id="e1"))
    (row,) = record["rows"]
    assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row["response_mask"].tolist() == [0, 0, 0, 1, 1, 0, 1]
    np.testing.assert_allclose(row["rollout_log_probs"], [0, 0, 0, -0.04, -0.05, 0, -0.07], rtol=1e-6)
    assert row["agent"] == "solver"
    assert [(step["row"], step["start"], step["end"]) for step in record["steps"]] == [(0, 3, 5), (0, 6, 7)]
    assert (record["reward"], record["rewards"]) == (0.5, {"right": 0.5})
    assert record["metadata"] == {"episode": "e1"}
    assert "model_version" not in record


def test_a_token_that_branches_share_is_trained_on_once() -> None:
    """The second leaf goes on from the first answer; a third begins anew."""
    nodes = [*CHAIN, said(1, 8), sampled(4, [], 9), said(None, 1), sampled(6, [], 4, 5)]
    record = verifiers.record(episode(trace(nodes, info={"turn_rewards": [0.1, 0.2, 0.3, 0.4]})))
    rows = record["rows"]
    assert [row["input_ids"].tolist() for row in rows] == [
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 3, 4, 5, 8, 9],
        [1, 4, 5],
    ]
    assert [row["response_mask"].tolist() for row in rows] == [
        [0, 0, 0, 1, 1, 0, 1],
        [0, 0, 0, 0, 0, 0, 1],
        [0, 1, 1],
    ]
    steps = [(step["row"], step["start"], step["end"], step["reward"]) for step in record["steps"]]
    assert steps == [(0, 3, 5, 0.1), (0, 6, 7, 0.2), (1, 6, 7, 0.3), (2, 1, 3, 0.4)]


def test_agents_that_are_not_trained_are_left_out() -> None:
    judge = trace(CHAIN, "judge", trainable=False, rewards={"strict": {"score": 9.0}})
    record = verifiers.record(episode(judge, trace(CHAIN), trace(CHAIN, "critic")))
    assert [row["agent"] for row in record["rows"]] == ["solver", "critic"]
    assert (record["reward"], record["rewards"]) == (1.0, {"right": 1.0})


WON = {"win": {"score": 1.0}}
LOST = {"win": {"score": -1.0}}


def test_different_rewards_of_several_agents_are_not_summed_unless_given() -> None:
    played = episode(trace(CHAIN, "first", rewards=WON), trace(CHAIN, "second", rewards=LOST))
    with pytest.raises(TrajectoryError, match=r"different rewards \(first 1.0, second -1.0\).*push_each"):
        verifiers.record(played)
    assert verifiers.record(played, reward=0.5)["reward"] == 0.5


def test_each_trace_is_a_trajectory_with_its_own_reward() -> None:
    played = episode(
        trace(CHAIN, "first", rewards=WON),
        trace(CHAIN, "judge", trainable=False),
        trace(CHAIN, "second", rewards=LOST, stop_condition="max_turns"),
        trace([], "third", ok=False),
    )
    records = verifiers.records(played)
    assert [(each["rows"][0]["agent"], each["reward"]) for each in records] == [
        ("first", 1.0),
        ("second", -1.0),
    ]
    assert [each.get("status", "completed") for each in records] == ["completed", "truncated"]
    assert [len(each["steps"]) for each in records] == [2, 2]


def test_rollouts_without_a_trace_fail(redis_url: str) -> None:
    played = episode(trace(CHAIN, rewards=WON), trace(CHAIN, rewards=LOST))
    with Producer(redis_url, run="r") as producer, producer.group(size=3) as group:
        assert verifiers.push_each(list(group), played) == ["pushed"] * 3
        assert "no trace left" in group.failures[2]
        with pytest.raises(TrajectoryError, match="2 trained traces, for 1 rollouts"):
            verifiers.push_each(list(group)[:1], played)


async def test_traces_of_asyncio_rollouts_are_awaited(redis_url: str) -> None:
    played = episode(trace(CHAIN, rewards=WON), trace(CHAIN, rewards=LOST))
    async with Producer(redis_url, run="r") as producer, producer.group(size=2) as group:
        assert await verifiers.push_each(list(group), played) == ["pushed", "pushed"]


@pytest.mark.parametrize(
    "ended",
    [
        {"stop_condition": "max_turns"},
        {"stop_condition": "agent_timeout", "is_timeout": True},
        {"calls": [{"finish_reason": "length"}]},
    ],
)
def test_what_a_limit_or_a_deadline_has_ended_is_truncated(ended: dict[str, Any]) -> None:
    assert verifiers.record(episode(trace(CHAIN, **ended)))["status"] == "truncated"


def test_an_episode_that_ran_out_of_time_is_truncated() -> None:
    assert verifiers.record(episode(trace(CHAIN), is_timeout=True))["status"] == "truncated"
    assert "status" not in verifiers.record(episode(trace(CHAIN)))


def test_the_span_of_policies_is_the_version() -> None:
    work = {"type": "train", "step": 9, "policy": {"start": 7, "end": 8}}
    record = verifiers.record(episode(trace(CHAIN), run={"type": "train", "id": "r", "work": work}))
    assert record["model_version"] == (7, 8)


def test_what_was_not_scored_is_unscorable() -> None:
    assert verifiers.record(episode(trace(CHAIN, rewards={"right": None})))["reward"] is None


def test_without_token_ids_the_error_says_which_client_keeps_them() -> None:
    relayed = [{**said(None), "mask": []}, sampled(0, [])]
    with pytest.raises(TrajectoryError, match="TrainClientConfig"):
        verifiers.record(episode(trace(relayed)))


def test_log_probs_are_there_for_all_tokens_or_for_none() -> None:
    nothing = [said(None, 1), sampled(0, [], 2, logprobs=[])]
    assert "rollout_log_probs" not in verifiers.record(episode(trace(nothing)))["rows"][0]
    half = [*nothing, said(1, 3), sampled(2, [], 4)]
    with pytest.raises(TrajectoryError, match="rollout_log_probs"):
        verifiers.record(episode(trace(half)))
    with pytest.raises(TrajectoryError, match="rollout_log_probs"):
        verifiers.record(episode(trace(nothing), trace(CHAIN)))


def test_episodes_are_pushed_and_failed_ones_fail(redis_url: str) -> None:
    failed = episode(trace(CHAIN), ok=False, errors=[{"type": "ToolError", "message": "no\nanswer"}])
    with Producer(redis_url, run="r") as producer, producer.group(size=2) as group:
        first, second = group
        assert verifiers.push(first, episode(trace(CHAIN))) == "pushed"
        assert verifiers.push(second, failed) == "pushed"
        assert verifiers.failure(failed) == "ToolError: no answer"
        assert "ToolError: no answer" in group.failures[1]


async def test_an_asyncio_rollout_is_awaited(redis_url: str) -> None:
    async with Producer(redis_url, run="r") as producer, producer.group(size=1) as group:
        (rollout,) = group
        assert await verifiers.push(rollout, episode(trace(CHAIN)), metadata={"mine": 1}) == "pushed"


def test_environments_run_as_the_page_says() -> None:
    run = inspect.signature(vf.Env.run_episode)
    assert list(run.parameters)[:3] == ["self", "task", "ctx"]
    assert run.return_annotation in (vf.Episode, "Episode")
    context = vf.ModelContext("a model", vf.TrainClientConfig(base_url="http://localhost:8000/v1"))
    assert (context.model, context.client.type) == ("a model", "train")
    assert callable(vf.load_environment)
    assert hasattr(vf.Env, "serving")
    assert hasattr(vf.Taskset, "__iter__")
