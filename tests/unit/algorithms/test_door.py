"""Whatever a function of `streamadv.padded` is given: a right result, or an error of one line that names it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from streamadv import algorithms, padded
from streamadv.errors import ArgumentError, OptionError, SettingError, TrajectoryError
from tests.support import some_of

from .door_cases import ENTRIES, PACKED_DOOR, RECORDS


class Child:
    """A process that makes the calls: what it reads out of bounds may end it, and that is a failure too."""

    def __init__(self) -> None:
        command = [sys.executable, "-X", "faulthandler", "-m", f"{__package__}.door_cases"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ask(self, **question: Any) -> dict[str, list[str]]:
        """The cases that went wrong, and how."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        tried = "nothing"
        for line in self.process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "wrong" in answer:
                return dict(answer["wrong"])
            tried = answer["tried"]
        _, errors = self.process.communicate()
        return {tried: [f"the process ended with {self.process.returncode}: {errors[-400:]}"]}

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Children:
    """One child at a time, a new one after one has ended."""

    def __init__(self) -> None:
        self.child = Child()

    def ask(self, **question: Any) -> dict[str, list[str]]:
        if self.child.ended:
            self.child = Child()
        return self.child.ask(**question)


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.child.end()


def test_every_public_function_has_an_entry() -> None:
    public = {name for name, value in vars(padded).items() if callable(value) and not name.startswith("_")}
    public -= {"checked"}
    assert public == set(padded.__all__)
    assert public - RECORDS == {name.split(":")[0] for name in ENTRIES}


@pytest.mark.parametrize("function", some_of(ENTRIES, 8))
@pytest.mark.processes
@pytest.mark.slow
def test_what_fits_gives_a_result_and_what_does_not_an_error(function: str, children: Children) -> None:
    assert children.ask(function=function, rows=4, tokens=6, seed=0) == {}


# the answer names the case: nothing to shrink
@pytest.mark.processes
@pytest.mark.slow
@settings(max_examples=20, deadline=None, phases=[Phase.generate])
@given(st.sampled_from(sorted(ENTRIES)), st.integers(2, 9), st.integers(2, 300), st.integers(0, 2**31))
def test_at_any_size(children: Children, function: str, rows: int, tokens: int, seed: int) -> None:
    assert children.ask(function=function, rows=rows, tokens=tokens, seed=seed) == {}


@pytest.mark.processes
@pytest.mark.slow
def test_packed_batches_are_checked_where_they_are_made(children: Children) -> None:
    assert children.ask(function=PACKED_DOOR) == {}


#: Every public name of `streamadv.algorithms`, and where wrong arguments of it are tested.
PACKED = {
    "packed_door_cases": {"PackedBatch", "RunningMoments", "Steps", "expand", "run_chain"},
    "test_own_estimators": {"Estimate", "check_estimator", "estimator", "pack_trajectories"},
    "test_chain": {"Chain", "ChainConfig", "ChainResult", "build_chain"},
    "here": {"merge_metrics"},
    "takes no arguments": {"estimator_names", "preset_names"},
}


def test_every_name_of_the_algorithms_has_its_place() -> None:
    assert set(algorithms.__all__) == set().union(*PACKED.values())


def test_metrics_merge_by_their_weights() -> None:
    for weights in ({}, {"m": 0.0}, {"m": float("nan")}, {"m": -1.0}):
        with pytest.raises(ArgumentError, match="metric m has weight"):
            algorithms.merge_metrics([({"m": 1.0}, weights), ({"m": 1.0}, {"m": 1.0})])


def test_errors_name_the_argument_what_came_and_what_is_needed() -> None:
    rewards, mask = torch.zeros(3, 5), torch.ones(4, 6)
    with pytest.raises(ArgumentError) as wrong_shape:
        padded.compute_grpo_outcome_advantage(rewards, mask, ["a"] * 4)
    assert (
        str(wrong_shape.value)
        == "response_mask has shape [4, 6], needs [B = 3, T = 5] beside token_level_rewards"
    )
    with pytest.raises(OptionError) as wrong_word:
        padded.reward_postprocess({"response_level_rewards": torch.zeros(4)}, peer_quirks="vrel")  # type: ignore[arg-type]
    assert (
        str(wrong_word.value)
        == "peer_quirks is 'vrel', which is unknown: choose one of roll, verl, verl-2026-01"
    )
    assert issubclass(ArgumentError, TrajectoryError)
    assert issubclass(OptionError, SettingError)
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(OptionError, ValueError)


@pytest.mark.parametrize("batch", [None, 3, [torch.zeros(2)], "ab"])
def test_a_batch_is_a_mapping(batch: Any) -> None:
    with pytest.raises(OptionError, match="batch is"):
        padded.compute_token_reward(batch)


def test_groups_must_be_told_where_statistics_are_over_groups() -> None:
    rewards = {"response_level_rewards": torch.arange(4.0)}
    with pytest.raises(OptionError, match="n_sample and index are missing"):
        padded.reward_postprocess(rewards, adv_estimator="grpo")
    with pytest.raises(OptionError, match="n_sample and index are missing"):
        padded.difficulty_mask(torch.zeros(4))
    with pytest.raises(OptionError, match="both given"):
        padded.reward_norm(
            torch.zeros(4), norm_mean_type="group", norm_std_type=None, n_sample=2, index=[0] * 4
        )
    with pytest.raises(OptionError, match="norm_std_type is 'batch'"):
        padded.reward_postprocess(rewards, adv_estimator="grpo", n_sample=2, norm_std_type="batch")


def test_what_a_loss_is_made_of_keeps_its_gradient() -> None:
    log_probs = torch.tensor([[0.1, -0.2], [0.3, -0.4]], requires_grad=True)
    loss = padded.agg_loss(padded.approx_kl(log_probs, torch.zeros(2, 2), "k3"), torch.ones(2, 2))
    loss.backward()  # type: ignore[no-untyped-call]
    assert log_probs.grad is not None
    assert bool((log_probs.grad != 0).all())


@pytest.mark.parametrize("function", [padded.masked_mean, padded.masked_sum, padded.masked_var])
def test_nan_outside_the_mask_is_in_no_gradient(function: Any) -> None:
    values = torch.tensor([[1.0, 4.0, torch.nan]], requires_grad=True)
    function(values, torch.tensor([[1, 1, 0]])).backward()
    assert values.grad is not None
    assert values.grad[0, :2].isfinite().all()
    assert values.grad[0, 2] == 0
