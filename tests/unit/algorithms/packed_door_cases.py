"""Packed batches made by hand, right and wrong, built and run in the process of `door_cases`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from streamadv.algorithms import (
    PackedBatch,
    RunningMoments,
    build_chain,
    expand,
    preset_names,
    run_chain,
)
from streamadv.errors import StreamadvError
from streamadv.trajectory.schema import Step

from .reference import batch_of, member, pack

CHAINS: tuple[Any, ...] = (
    "grpo",
    {"estimator": "gae", "whiten_advantages": True, "correction": {"level": "segment"}},
    {"estimator": "gigpo"},
    "optimal_token_baseline",
    {"estimator": "reinforce", "token_rewards": "steps"},
)
COLUMNS = ("rollout_log_probs", "old_log_probs", "values", "sum_pi_squared")


def plain() -> PackedBatch:
    """Two groups of two trajectories; 5 rows of 4 tokens, 20 tokens, one step in each trajectory."""
    pairs = []
    for group, index in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        masks = [[0, 1, 1, 1]] * (2 if (group, index) == ("b", 1) else 1)
        columns = {name: [-0.5] * (4 * len(masks)) for name in COLUMNS}
        pairs.append(
            member(
                group,
                index,
                float(index),
                masks,
                steps=[Step(start=1, end=3, reward=1.0, state_key="s")],
                **columns,
            )
        )
    return batch_of(pairs)


def rebuilt(batch: PackedBatch, **changes: Any) -> PackedBatch:
    """As somebody makes it by hand: nothing known of it."""
    values = {item.name: getattr(batch, item.name) for item in fields(PackedBatch) if item.name != "layout"}
    return PackedBatch(**(values | changes))


def with_steps(batch: PackedBatch, **changes: Any) -> PackedBatch:
    return rebuilt(batch, steps=replace(batch.steps, **changes))


def at(tensor: Tensor, place: int, value: Any) -> Tensor:
    changed = tensor.clone()
    changed[place] = value
    return changed


WRONG: dict[str, Callable[[PackedBatch], Any]] = {
    "cu_seqlens goes back": lambda b: rebuilt(b, cu_seqlens=at(b.cu_seqlens, 1, 9)),
    "cu_seqlens ends too far": lambda b: rebuilt(b, cu_seqlens=at(b.cu_seqlens, -1, 4000)),
    "cu_seqlens ends too early": lambda b: rebuilt(b, cu_seqlens=at(b.cu_seqlens, -1, 17)),
    "cu_seqlens begins below 0": lambda b: rebuilt(b, cu_seqlens=at(b.cu_seqlens, 0, -4)),
    "cu_seqlens is short": lambda b: rebuilt(b, cu_seqlens=b.cu_seqlens[:-1]),
    "cu_seqlens is empty": lambda b: rebuilt(b, cu_seqlens=b.cu_seqlens[:0]),
    "cu_seqlens is int32": lambda b: rebuilt(b, cu_seqlens=b.cu_seqlens.int()),
    "cu_seqlens is a list": lambda b: rebuilt(b, cu_seqlens=b.cu_seqlens.tolist()),
    "cu_seqlens in a copy": lambda b: replace(b, cu_seqlens=b.cu_seqlens + 100),
    "num_tokens": lambda b: rebuilt(b, num_tokens=10**6),
    "num_tokens in a copy": lambda b: replace(b, num_tokens=10**6),
    "row_trajectory too large": lambda b: rebuilt(b, row_trajectory=at(b.row_trajectory, -1, 10**6)),
    "row_trajectory negative": lambda b: rebuilt(b, row_trajectory=at(b.row_trajectory, 0, -1)),
    "row_trajectory mixed": lambda b: rebuilt(b, row_trajectory=b.row_trajectory.flip(0)),
    "row_trainable too large": lambda b: rebuilt(b, row_trainable=b.row_trainable + 5),
    "row_trainable short": lambda b: rebuilt(b, row_trainable=b.row_trainable[:-1]),
    "group too large": lambda b: rebuilt(b, trajectory_group=at(b.trajectory_group, -1, 10**6)),
    "group negative": lambda b: rebuilt(b, trajectory_group=at(b.trajectory_group, 0, -3)),
    "group mixed": lambda b: rebuilt(b, trajectory_group=b.trajectory_group.flip(0)),
    "group left out": lambda b: rebuilt(b, trajectory_group=b.trajectory_group * 2, num_groups=3),
    "groups short": lambda b: rebuilt(b, trajectory_group=b.trajectory_group[:-1]),
    "num_groups": lambda b: rebuilt(b, num_groups=10**6),
    "rewards long": lambda b: rebuilt(b, rewards=torch.zeros(9, dtype=torch.float64)),
    "rewards in two dimensions": lambda b: rebuilt(b, rewards=b.rewards[:, None]),
    "rewards whole": lambda b: rebuilt(b, rewards=b.rewards.long()),
    "baseline as numbers": lambda b: rebuilt(b, baseline=b.rewards),
    "scores short": lambda b: rebuilt(b, scores=b.rewards[:1]),
    "truncated short": lambda b: rebuilt(b, truncated=b.baseline[:1]),
    "components long": lambda b: rebuilt(b, components={"x": torch.zeros(9, dtype=torch.float64)}),
    "a column short": lambda b: rebuilt(b, columns={**b.columns, "values": torch.zeros(3)}),
    "a column in a copy": lambda b: b.with_columns(values=torch.zeros(3)),
    "a column of text": lambda b: b.with_columns(values=["a"] * 20),
    "a mask of 2s": lambda b: b.with_columns(response_mask=b.columns["response_mask"] * 2),
    "step of a negative row": lambda b: with_steps(b, row=at(b.steps.row, 0, -1)),
    "step of a row too far": lambda b: with_steps(b, row=at(b.steps.row, 0, 10**6)),
    "step of another trajectory": lambda b: with_steps(b, trajectory=at(b.steps.trajectory, 0, 3)),
    "step ends too far": lambda b: with_steps(b, end=at(b.steps.end, -1, 10**6)),
    "step begins below 0": lambda b: with_steps(b, start=at(b.steps.start, 0, -10)),
    "step ends before it begins": lambda b: with_steps(b, end=b.steps.start - 1),
    "step in another row": lambda b: with_steps(b, end=b.steps.end + 4, num_tokens=24),
    "state below -1": lambda b: with_steps(b, state=b.steps.state - 5),
    "step tokens": lambda b: with_steps(b, num_tokens=10**6),
    "step rewards short": lambda b: b.with_step_rewards(torch.zeros(1, dtype=torch.float64)),
    "starts short": lambda b: with_steps(b, start=b.steps.start[:-1]),
    "expand short": lambda b: expand(b, "row", torch.zeros(2)),
    "expand long": lambda b: expand(b, "token", torch.zeros(10**6)),
    "expand a list": lambda b: expand(b, "row", [0.0] * 5),  # type: ignore[arg-type]
    "expand another level": lambda b: expand(b, "rows", torch.zeros(5)),  # type: ignore[arg-type]
    "moments below 0": lambda b: RunningMoments(-1.0),
    "moments of NaN": lambda b: RunningMoments.of(torch.tensor([float("nan")])),
}


def wrong(make: Callable[[PackedBatch], Any]) -> list[str]:
    """What is wrong with the outcome: only an error of one line is right."""
    try:
        batch = make(plain())
        for chain in CHAINS:  # if nobody refuses it, this is where it reads what is not its own
            run_chain(build_chain(chain), batch)
    except StreamadvError as error:
        text = str(error)
        one_line = "\n" not in text and 10 < len(text) < 500
        return [] if one_line and isinstance(error, StreamadvError) else [f"not one line: {text!r}"]
    except Exception as error:
        return [f"{type(error).__name__}: {str(error)[:200]}"]
    return ["not refused"]


def right() -> Iterator[tuple[str, list[str]]]:
    batch = plain()
    for chain in CHAINS:
        first, again = (run_chain(build_chain(chain), one) for one in (batch, rebuilt(batch)))
        same = (
            first.advantages is not None
            and again.advantages is not None
            and torch.equal(first.advantages, again.advantages)
        )
        yield f"{chain}", [] if same else ["differs when rebuilt"]
    names = ("response_mask", "token_level_rewards", *COLUMNS, "ref_log_probs")
    empty = pack([]).with_columns(**{name: torch.zeros(0) for name in names})
    for name in preset_names():
        try:
            for one in (
                empty,
                replace(
                    batch, columns={**batch.columns, "response_mask": torch.zeros(20, dtype=torch.uint8)}
                ),
            ):
                result = run_chain(
                    build_chain(name), one.with_columns(token_level_rewards=torch.zeros(one.num_tokens))
                )
                assert result.advantages is not None
                spread = expand(one, result.level, result.advantages)
                assert spread.shape == (one.num_tokens,)
                assert not spread.any()
            yield name, []
        except Exception as error:
            yield name, [f"{type(error).__name__}: {str(error)[:200]}"]
    given = torch.ones(20, requires_grad=True)
    full = batch.with_columns(response_mask=torch.ones(20, dtype=torch.uint8))
    got = expand(full, "token", given)
    own = got.data_ptr() != given.data_ptr() and not got.requires_grad and got.dtype == torch.float32
    yield "expand", [] if own else ["its result is not its own"]


def wrong_cases() -> Iterator[tuple[str, list[str]]]:
    """The cases that went wrong, and how; each is told on stdout before it is tried."""
    for name, make in WRONG.items():
        print(json.dumps({"tried": name}), flush=True)
        if problems := wrong(make):
            yield name, problems
    for name, problems in right():
        print(json.dumps({"tried": name}), flush=True)
        if problems:
            yield name, problems
