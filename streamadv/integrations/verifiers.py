"""Episodes of verifiers (`verifiers.v1`, 0.4) as trajectories. Needs nothing of the package but its episodes.

    async def play(rollout, env, task, context):
        episode = await env.run_episode(task, context)
        await verifiers.push(rollout, episode)

An episode is one trajectory, unless its agents have rewards of their own: then each trace is one (`records`,
`push_each`). Every branch of a trace, a path from the root of its messages to a leaf, is a row.
Branches share what came before they parted: each sampled token is trained on in the first row that has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..errors import TrajectoryError

if TYPE_CHECKING:
    from ..producer.async_group import AsyncRollout
    from ..producer.group import Rollout

#: Per-turn scores of a trace stand there, by convention, one for each sampled message.
TURN_REWARDS = "turn_rewards"

#: Columns of a branch that only some models have: they become extra columns.
_EXTRAS = ("routed_experts", "mm_token_type_ids")


@overload
def push(rollout: Rollout, episode: Any, **fields: Any) -> str: ...
@overload
def push(rollout: AsyncRollout, episode: Any, **fields: Any) -> Awaitable[str]: ...
def push(rollout: Rollout | AsyncRollout, episode: Any, **fields: Any) -> str | Awaitable[str]:
    """Push an episode as this rollout; one that is not ok fails it, with its last error as the detail.

    Args:
        rollout: of a blocking producer, or of an asyncio one: then await the result.
        episode: `verifiers.v1.Episode`, or `WireEpisode` as an environment server sends it.
        fields: further arguments of the push, or others in place of those of `record`.

    Returns the answer of the push. Raises what `record` raises.
    """
    if not episode.ok:
        return rollout.fail("failed", failure(episode))
    return rollout.push(**record(episode, **fields))


@overload
def push_each(rollouts: Sequence[Rollout], episode: Any, **fields: Any) -> list[str]: ...
@overload
def push_each(rollouts: Sequence[AsyncRollout], episode: Any, **fields: Any) -> Awaitable[list[str]]: ...
def push_each(
    rollouts: Sequence[Rollout] | Sequence[AsyncRollout], episode: Any, **fields: Any
) -> list[str] | Awaitable[list[str]]:
    """Push each trained trace of an episode as a rollout of its own, with its own reward.

    Rollouts that no trace is left for fail, with the episode's last error as the detail; all do if it is not ok.

    Returns the answers of the pushes. Raises TrajectoryError if there are more traces than rollouts, and what `records`
    raises.
    """
    made = records(episode, **fields) if episode.ok else []
    if len(made) > len(rollouts):
        raise TrajectoryError(f"the episode has {len(made)} trained traces, for {len(rollouts)} rollouts")
    each_rollout: Sequence[Any] = rollouts
    answers = [rollout.push(**each) for rollout, each in zip(each_rollout, made, strict=False)]
    answers += [rollout.fail("failed", failure(episode)) for rollout in each_rollout[len(made) :]]
    if any(isinstance(answer, Awaitable) for answer in answers):
        return asyncio.gather(*answers)
    return answers


def records(episode: Any, **fields: Any) -> list[dict[str, Any]]:
    """The arguments of a push for each trained trace that is ok: one trajectory a trace, as `record` makes them."""
    return [
        _record(episode, [trace], fields) for trace in episode.traces if trace.agent.trainable and trace.ok
    ]


def record(episode: Any, **fields: Any) -> dict[str, Any]:
    """The arguments of `rollout.push` for an episode that is ok.

    `rows`: of the agents that are trained, each with the agent's name. `steps`: the sampled messages, with the scores
    of `trace.info["turn_rewards"]` if it has one for each. `reward` and the named `rewards`: summed over the traces of
    those agents, which have to be equal; None, unscorable, if one was not scored. `status`: truncated, if a limit or a
    deadline ended one of them. `model_version`: the span of policies, if the training run has noted it; else the
    rollout's own counts. `metadata` has the episode's id. fields: others, or in place of these.

    Raises TrajectoryError if nothing was sampled, log-probs are missing for a part of it, or traces have different
    rewards and no `reward` is given.
    """
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    found = [_rewards([trace]) for trace in traces]
    if "reward" not in fields and any(each != found[0] for each in found):
        said = ", ".join(
            f"{trace.agent.name or 'unnamed'} {each['reward']}"
            for trace, each in zip(traces, found, strict=True)
        )
        raise TrajectoryError(
            f"the trained traces of the episode have different rewards ({said}), and a trajectory has one: push each "
            "trace as a trajectory (push_each, records), or give reward= and rewards="
        )
    return _record(episode, traces, fields)


def _record(episode: Any, traces: Sequence[Any], fields: dict[str, Any]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    for trace in traces:
        _add_rows(trace, rows, steps)
    if not rows:
        raise TrajectoryError(
            "the episode has no sampled tokens of a trained agent: run it with a TrainClientConfig, whose client "
            "keeps token ids, and a trainable agent"
        )
    with_log_probs = ["rollout_log_probs" in row for row in rows]
    if any(with_log_probs) and not all(with_log_probs):
        raise TrajectoryError("rollout_log_probs: some messages have none: ask for them in every request")
    made: dict[str, Any] = {"rows": rows, "steps": steps, "metadata": {"episode": episode.id}}
    made |= _rewards(traces)
    if episode.is_timeout or any(trace.is_truncated or trace.is_timeout for trace in traces):
        made["status"] = "truncated"
    policy = getattr(getattr(episode.run, "work", None), "policy", None)
    if policy is not None:
        made["model_version"] = (policy.start, policy.end)
    return made | fields


def failure(episode: Any) -> str:
    """Why an episode is not ok, as one line."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        return " ".join(f"{errors[-1].type}: {errors[-1].message}".split())
    if episode.is_timeout:
        return "timeout"
    return "the episode has no trace left for it" if episode.ok else "the episode is not ok"


def _add_rows(trace: Any, rows: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """A row for each branch that has sampled tokens of its own, with a step for each message sampled there first."""
    turns = {id(node): number for number, node in enumerate(node for node in trace.nodes if any(node.mask))}
    scores = trace.info.get(TURN_REWARDS) or []
    seen: set[int] = set()
    found: list[tuple[int, dict[str, Any]]] = []
    for branch in trace.branches:
        new = {id(node) for node in branch.nodes if id(node) in turns} - seen
        if not branch.trainable or not new:
            continue
        seen |= new
        mask: list[bool] = []
        for node in branch.nodes:
            start = len(mask)
            mask += node.mask if id(node) in new else [False] * len(node.token_ids)
            if id(node) in new:
                score = scores[turns[id(node)]] if len(scores) == len(turns) else 0.0
                first = start + node.mask.index(True)
                step = {"row": len(rows), "start": first, "end": len(mask), "reward": float(score)}
                found.append((turns[id(node)], step))
        rows.append(_row(trace, branch, mask))
    steps += [step for _, step in sorted(found, key=lambda turn: turn[0])]  # in the order they were sampled


def _row(trace: Any, branch: Any, mask: list[bool]) -> dict[str, Any]:
    sampled = [(sum(node.mask), len(node.logprobs)) for node in branch.nodes if any(node.mask)]
    row: dict[str, Any] = {
        "input_ids": np.array(branch.token_ids, np.int32),
        "response_mask": np.array(mask, np.uint8),
        "agent": trace.agent.name or None,
    }
    if all(tokens == log_probs for tokens, log_probs in sampled):
        row["rollout_log_probs"] = np.array(branch.logprobs, np.float32)
    elif any(log_probs for _, log_probs in sampled):
        raise TrajectoryError("rollout_log_probs: some messages have none: ask for them in every request")
    for name in _EXTRAS:
        values = getattr(branch, name)
        if values is not None:
            row[name] = np.asarray(values)
    return row


def _rewards(traces: Sequence[Any]) -> dict[str, Any]:
    """`reward` and `rewards`, summed over the traces."""
    named: dict[str, float] = {}
    for trace in traces:
        for name, reward in trace.rewards.items():
            if reward is None:
                return {"reward": None}
            named[name] = named.get(name, 0.0) + float(reward.value)
    return {"reward": sum(named.values()), "rewards": named}
