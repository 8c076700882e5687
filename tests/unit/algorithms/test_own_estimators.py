"""Estimators that users write: what registration, a result and a declared scope are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from streamadv.algorithms import (
    Estimate,
    PackedBatch,
    build_chain,
    check_estimator,
    estimator,
    estimator_names,
    pack_trajectories,
    run_chain,
)
from streamadv.algorithms.registry import get_estimator
from streamadv.errors import EstimatorError, SettingError, StreamadvError, TrajectoryError
from streamadv.trajectory.schema import Status, Step, Trajectory

from .reference import batch_of, member, random_pairs

BATCH = batch_of(
    [
        member(
            group,
            index,
            float(index),
            masks=[[0, 1, 1], [0, 0, 1, 1]],
            steps=[Step(start=1, end=3, reward=1.0)],
            values=[1.0] * 7,
        )
        for group in "ab"
        for index in (0, 1, 2)
    ]
)
SIZES = {"row": 12, "step": 6, "token": 42}

Function = Callable[[PackedBatch], Any]


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Registers a function as an estimator under a name of its own."""
    count = iter(range(100))

    def register(function: Function, **declared: Any) -> str:
        name = f"own_{request.node.name}_{next(count)}"[:60]

        @estimator(name, **{"scope": "group", **declared})
        def called(batch: PackedBatch) -> Any:
            return function(batch)

        return name

    return register


def fails(name: str, batch: PackedBatch = BATCH, **config: Any) -> str:
    """The message of the error with which a chain of estimator `name` ends."""
    with pytest.raises(StreamadvError) as caught:
        run_chain(build_chain({"estimator": name, **config}), batch)
    message = str(caught.value)
    assert isinstance(caught.value, EstimatorError | SettingError)
    assert name in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("level", ["row", "step", "token"])
@pytest.mark.parametrize("field", ["advantages", "returns"])
@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("apart", [-1, 1])
def test_one_value_for_each(
    own: Callable[..., str], level: Any, field: str, whitened: bool, apart: int
) -> None:
    size = SIZES[level]

    def wrong(batch: PackedBatch) -> Estimate:
        values = {"advantages": torch.zeros(size), "returns": torch.zeros(size)}
        return Estimate(level, **{**values, field: torch.zeros(size + apart)})

    message = fails(own(wrong, level=level), whiten_advantages=whitened)
    assert field in message
    assert f"({size + apart},)" in message
    assert f"({size},)" in message


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (torch.zeros(SIZES["token"], dtype=torch.int64), "int64"),
        (torch.zeros(SIZES["token"], dtype=torch.bool), "bool"),
        (torch.zeros(SIZES["token"], dtype=torch.complex64), "complex64"),
        (torch.zeros(SIZES["token"], 1), "(42, 1)"),
        (torch.zeros(6, 7), "(6, 7)"),
        (torch.zeros(()), "()"),
        (torch.zeros(12), "(12,)"),
        (np.zeros(SIZES["token"], np.float32), "ndarray"),
        ([0.0] * SIZES["token"], "list"),
        (None, "None"),
    ],
)
def test_a_floating_tensor_of_one_dimension(own: Callable[..., str], values: Any, told: str) -> None:
    name = own(lambda batch: Estimate("token", values), level="token")
    for config in ({}, {"whiten_advantages": True}, {"advantage_clip": 1.0}):
        assert told in fails(name, **config)


@pytest.mark.parametrize("result", [None, torch.zeros(12), (torch.zeros(12), None), "row"])
def test_an_estimate_and_nothing_else(own: Callable[..., str], result: Any) -> None:
    message = fails(own(lambda batch: result))
    assert f"returned {'None' if result is None else f'a {type(result).__name__}'}" in message
    assert "Estimate" in message


def test_another_level_than_declared(own: Callable[..., str]) -> None:
    message = fails(own(lambda batch: Estimate("row", torch.zeros(12)), level="token"))
    assert "level='row'" in message


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e39])
@pytest.mark.parametrize("level", ["row", "step", "token"])
@pytest.mark.parametrize("config", [{}, {"advantage_clip": 1.0}, {"whiten_advantages": True}])
@pytest.mark.parametrize("field", ["advantages", "returns"])
def test_finite_over_trainable_tokens(
    own: Callable[..., str], bad: float, level: Any, config: dict[str, Any], field: str
) -> None:
    def broken(batch: PackedBatch) -> Estimate:
        values = {name: torch.zeros(SIZES[level], dtype=torch.float64) for name in ("advantages", "returns")}
        values[field][2] = bad  # row 2 and step 2 have trainable tokens, and so has token 2
        return Estimate(level, **values)

    message = fails(own(broken, level=level, needs=["values"]), **config)
    assert field in message
    assert "not finite" in message
    assert "values" in message


def test_what_stands_elsewhere_does_not_matter(own: Callable[..., str]) -> None:
    def masked(batch: PackedBatch) -> Estimate:
        return Estimate("token", torch.where(batch.column("response_mask") != 0, 1.0, torch.nan))

    name = own(masked, level="token", needs=["response_mask"])
    result = run_chain(build_chain(name), BATCH)
    assert result.advantages is not None
    assert result.advantages.tolist() == BATCH.column("response_mask").tolist()

    def by_length(batch: PackedBatch) -> Estimate:
        return Estimate("row", batch.rewards[batch.row_trajectory] / batch.row_trainable)

    empty = batch_of([member("a", 0, 2.0, masks=[[0, 0], [0, 1]]), member("a", 1, 0.0, masks=[[0, 0]])])
    result = run_chain(build_chain(own(by_length)), empty)
    assert result.advantages is not None
    assert result.advantages.tolist() == [0.0, 2.0, 0.0]


def test_half_precision_and_gradients_are_taken_off(own: Callable[..., str]) -> None:
    def half(batch: PackedBatch) -> Estimate:
        return Estimate("token", torch.ones(42, dtype=torch.bfloat16, requires_grad=True))

    result = run_chain(build_chain(own(half, level="token")), BATCH)
    assert result.advantages is not None
    assert result.advantages.dtype == torch.float32
    assert not result.advantages.requires_grad


def test_an_exception_of_the_users_names_the_estimator(own: Callable[..., str]) -> None:
    def raises(batch: PackedBatch) -> Estimate:
        raise ZeroDivisionError("the first line\nthe second")

    name = own(raises)
    assert "ZeroDivisionError: the first line" in fails(name)
    with pytest.raises(EstimatorError) as caught:
        run_chain(build_chain(name), BATCH)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def missing(batch: PackedBatch) -> Estimate:
        return Estimate("token", batch.column("ref_log_probs"))

    with pytest.raises(TrajectoryError, match="ref_log_probs"):  # says what to do by itself
        run_chain(build_chain(own(missing, level="token")), BATCH)


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"name": "own_a", "scope": "rows"}, "scope is 'rows'"),
        ({"name": "own_b", "scope": None}, "scope is None"),
        ({"name": "own_c", "level": "tokens"}, "level is 'tokens'"),
        ({"name": "own_d", "needs": "values"}, "needs is 'values'"),
        ({"name": "own_e", "needs": ["old log probs"]}, "old log probs"),
        ({"name": "own_f", "needs": [3]}, "needs"),
        ({"name": ""}, "name"),
        ({"name": 3}, "name"),
    ],
)
def test_registration_refuses_what_no_chain_could_use(declared: dict[str, Any], told: str) -> None:
    options = {"scope": "group", **declared}
    with pytest.raises(SettingError, match="estimator") as caught:

        @estimator(options.pop("name"), **options)
        def unused(batch: PackedBatch) -> Estimate:
            return Estimate("row", batch.rewards)

    assert told in str(caught.value)
    assert not {"own_a", "own_b", "own_c", "own_d", "own_e", "own_f", ""} & set(estimator_names())


def test_options_are_keywords_with_defaults_and_known_types() -> None:
    with pytest.raises(SettingError, match="option power"):

        @estimator("own_positional", scope="row")
        def positional(batch: PackedBatch, power: float = 1.0) -> Estimate:
            return Estimate("row", batch.rewards)

    with pytest.raises(SettingError, match="option power"):

        @estimator("own_required", scope="row")
        def required(batch: PackedBatch, *, power: float) -> Estimate:
            return Estimate("row", batch.rewards)

    with pytest.raises(SettingError, match="Nowhere"):

        @estimator("own_unknown_type", scope="row")
        def unknown(batch: PackedBatch, *, power: Nowhere = 1.0) -> Estimate:  # type: ignore[name-defined] # noqa: F821
            return Estimate("row", batch.rewards)

    with pytest.raises(SettingError, match="batch"):

        @estimator("own_without_batch", scope="row")
        def without() -> Estimate:
            return Estimate("row", torch.zeros(1))

    with pytest.raises(SettingError, match="registered already"):

        @estimator("grpo", scope="row")
        def taken(batch: PackedBatch) -> Estimate:
            return Estimate("row", batch.rewards)


def over_the_batch(batch: PackedBatch) -> Estimate:
    return Estimate("row", (batch.rewards - batch.rewards.mean())[batch.row_trajectory])


def over_the_group(batch: PackedBatch) -> Estimate:
    least = [batch.rewards[batch.trajectory_group == group].amin() for group in batch.trajectory_group]
    return Estimate("row", (batch.rewards - torch.stack(least))[batch.row_trajectory])


def by_place(batch: PackedBatch) -> Estimate:
    return Estimate("row", torch.arange(batch.num_rows, dtype=torch.float64))


def test_a_scope_that_is_too_narrow_is_found(own: Callable[..., str]) -> None:
    uneven = batch_of(random_pairs(3, 4, longest=8))
    with pytest.raises(EstimatorError, match="scope"):
        check_estimator(own(over_the_batch, scope="group"), uneven)
    with pytest.raises(EstimatorError, match="scope"):
        check_estimator(own(over_the_group, scope="row"), uneven)
    with pytest.raises(EstimatorError, match="scope"):
        check_estimator(own(by_place, scope="group"), uneven)
    for function, scope in ((over_the_batch, "batch"), (over_the_group, "group"), (over_the_group, "batch")):
        name = own(function, scope=scope)
        result = check_estimator(name, uneven)
        assert torch.equal(result.advantages, run_chain(build_chain(name), uneven).advantages)
    with pytest.raises(EstimatorError, match="shape"):
        check_estimator(own(lambda batch: Estimate("row", torch.zeros(3))), uneven)


def test_another_order_and_another_call_are_found(own: Callable[..., str]) -> None:
    uneven = batch_of(random_pairs(3, 4, longest=8))

    def first_counts(batch: PackedBatch) -> Estimate:
        rewards = batch.rewards[batch.row_trajectory]
        return Estimate("row", rewards + rewards[0])

    with pytest.raises(EstimatorError, match="another order"):
        check_estimator(own(first_counts, scope="batch"), uneven)
    with pytest.raises(EstimatorError, match="another call"):
        check_estimator(own(lambda batch: Estimate("row", torch.rand(batch.num_rows)), scope="batch"), uneven)


def test_the_check_takes_the_function(own: Callable[..., str]) -> None:
    uneven = batch_of(random_pairs(3, 4, longest=8))
    with pytest.raises(SettingError, match="not registered"):
        check_estimator(over_the_group, uneven)
    name = own(over_the_group, scope="group")
    assert torch.equal(
        check_estimator(get_estimator(name).function, uneven).rewards, check_estimator(name, uneven).rewards
    )


CATALOGUE = [  # without what other tests have registered
    name for name in estimator_names() if get_estimator(name).function.__module__.startswith("streamadv.")
]


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_keeps_its_scopes(name: str) -> None:
    for seed in range(3):
        check_estimator(name, batch_of(random_pairs(seed, 4, longest=12)))


def test_the_check_takes_options(own: Callable[..., str]) -> None:
    batch = batch_of(random_pairs(1, 3, longest=8))
    check_estimator("grpo", batch, norm_by_std=False)
    with pytest.raises(SettingError, match="by_std"):
        check_estimator("grpo", batch, by_std=False)


def test_whole_trajectories_are_packed_in_order() -> None:
    def rollout(group_id: str, index: int, **fields: Any) -> Trajectory:
        row = {"input_ids": [1, 2, 3], "response_mask": [0, 1, 1], **fields}
        return Trajectory(group_id=group_id, group_size=2, rollout_index=index, reward=float(index), **row)

    packed = pack_trajectories([rollout("b", 0), rollout("a", 1), rollout("a", 0)])
    assert packed.trajectory_group.tolist() == [0, 0, 1]
    assert packed.rewards.tolist() == [0, 1, 0]
    assert packed.column("response_mask").tolist() == 3 * [0, 1, 1]
    with pytest.raises(TrajectoryError, match=r"\('a', 0\) has no column values"):
        pack_trajectories([rollout("b", 0, values=[0.0] * 3), rollout("a", 0)], ["values"])
    with pytest.raises(TrajectoryError, match="follows"):
        pack_trajectories([rollout("a", 0), rollout("a", 0)])
    with pytest.raises(TrajectoryError, match=r"\('a', 0\) has status failed: leave unusable members out"):
        pack_trajectories([rollout("a", 0).model_copy(update={"status": Status.FAILED})])
