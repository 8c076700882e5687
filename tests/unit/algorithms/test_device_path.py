"""What torch computes on other devices: the numbers of the compiled loops, and no waiting for the device."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv.advantage.compute import lay_out
from streamadv.algorithms import PackedBatch, build_chain, chain, estimator_names, kernels, run_chain
from streamadv.algorithms.estimators.tokens import vtrace_scan
from streamadv.algorithms.packing import pack_members
from streamadv.algorithms.registry import get_estimator
from streamadv.algorithms.rewards import credited_rewards, row_rewards
from streamadv.algorithms.scan import turn_mean, turn_returns
from streamadv.algorithms.segments import tokens_where, whiten
from streamadv.errors import ArgumentError
from streamadv.grouping.layout import Layout
from streamadv.padded.layout import padded_tokens
from tests.shares import examples
from tests.support import some_of
from tests.unit.grouping.layouts import StoredGroups

from .reference import batch_of, member, pack, random_pairs

CORRECTION = {
    "level": "token",
    "upper": 2.0,
    "batch_normalize": True,
    "rejections": [{"kind": "token_k1", "upper": 3.0}, {"kind": "seq_max_k3", "upper": 9.0}],
    "veto": 1e-4,
}
#: Other tests register estimators too.
OURS = [
    name for name in estimator_names() if get_estimator(name).function.__module__.startswith("streamadv.")
]
KL = {"penalty": "k3", "coefficient": 0.1}
CHAINS: dict[str, dict[str, Any]] = {
    "gae": {"estimator": "gae", "kl": KL, "whiten_advantages": True, "correction": CORRECTION},
    "grpo": {"estimator": "grpo", "kl": KL, "whiten_advantages": True, "advantage_clip": 1.0},
    "corrected first": {"estimator": "gae", "correction": {**CORRECTION, "before_estimator": True}},
    "sequence weights": {"estimator": "grpo", "correction": {**CORRECTION, "level": "sequence"}},
    "turn weights": {"estimator": "rloo", "correction": {**CORRECTION, "level": "segment"}},
    "supplied rewards": {"estimator": "vtrace", "token_rewards": "column", "whiten_rewards": True},
    "steps": {"estimator": "gigpo", "kl": KL, "whiten_advantages": True},
    "step rewards": {"estimator": "reinforce", "token_rewards": "steps", "options": {"gamma": 0.9}},
    "distilled": {"estimator": "grpo", "distill": {"coefficient": 0.5}, "raw_advantages": True},
    "masks": {"estimator": "gae", "masks": {"difficulty_low": 0.0, "max_length": 60}},
    "normalised": {"estimator": "grpo", "reward": {"mean": "batch", "std": "group", "clip": 2.0}},
    **{f"only {name}": {"estimator": name} for name in OURS if name != "gdpo"},
}


def on_meta(value: Any) -> Any:
    """The same structure with tensors that have a shape and no data: whatever needs data raises."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: on_meta(getattr(value, field.name)) for field in fields(value)})
    return {name: on_meta(item) for name, item in value.items()} if isinstance(value, dict) else value


class _Elsewhere(torch.Tensor):
    """A tensor of this host that says it is on a device."""

    device = torch.device("cuda")


def elsewhere(value: Any) -> Any:
    """The same structure with such tensors, to be checked anew."""
    if isinstance(value, torch.Tensor):
        return value.as_subclass(_Elsewhere)
    if is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in fields(value) if field.name != "layout")
        return type(value)(**{name: elsewhere(getattr(value, name)) for name in names})
    return {name: elsewhere(item) for name, item in value.items()} if isinstance(value, dict) else value


def test_a_mask_is_checked_once_on_a_device_too() -> None:
    batch: PackedBatch = elsewhere(batch_of(random_pairs(3, 3)))
    twos = batch.columns["response_mask"] * 2
    batch.with_columns(response_mask=twos)  # a narrowed one: to read it would make the host wait
    with pytest.raises(ArgumentError, match="holds values other than 0 and 1"):
        replace(batch, layout=None, columns={**batch.columns, "response_mask": twos})


@pytest.mark.parametrize("name", some_of(CHAINS, 2))
@pytest.mark.slow
def test_the_host_waits_for_nothing_but_the_metrics(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch: PackedBatch = on_meta(batch_of(random_pairs(3, 3)))
    monkeypatch.setattr(chain, "fetch", lambda metrics: ({}, {}))  # the one transfer, at the end
    result = run_chain(build_chain(CHAINS[name]), batch)
    assert result.advantages is not None
    assert result.advantages.device.type == "meta"


@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=examples(6), deadline=None)
@given(seed=st.integers(0, 10**6))
@pytest.mark.slow
def test_chains_give_the_same_numbers_in_torch(name: str, seed: int) -> None:
    batch, chosen = batch_of(random_pairs(seed, 3)), build_chain(CHAINS[name])
    want = run_chain(chosen, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "on_cpu", lambda tensor: False)
        got = run_chain(chosen, batch)
    for one, other in ((want.advantages, got.advantages), (want.returns, got.returns)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(want.columns), dict(got.columns), rtol=1e-5, atol=1e-5)
    assert want.metrics == pytest.approx(dict(got.metrics), rel=1e-5, abs=1e-5)
    assert want.weights == pytest.approx(dict(got.weights))


masks = st.lists(st.lists(st.booleans(), max_size=70), min_size=1, max_size=5)


@settings(max_examples=examples(40), deadline=None)
@given(
    masks=masks,
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 100),
)
def test_loops_and_torch_agree_on_any_mask(
    masks: list[list[bool]], gamma: float, lam: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = tokens_where(
        torch.tensor([each for row in masks for each in row], dtype=torch.bool),
        torch.tensor([0, *np.cumsum([len(row) for row in masks]).tolist()]),
    )
    rewards, values = (torch.from_numpy(rng.normal(size=len(tokens.mask))) for _ in range(2))
    rewards[rng.random(len(rewards)) < 0.5] = 0
    rewards[~tokens.mask & torch.from_numpy(rng.random(len(rewards)) < 0.2)] = torch.nan
    known = torch.where(tokens.mask, rewards, 0.0)
    calls = [
        lambda: torch.stack(vtrace_scan(rewards, values, None, tokens, gamma, lam=lam)),
        lambda: whiten(values, tokens),
        lambda: whiten(values, tokens, shift_mean=False, everywhere=True),
        lambda: turn_mean(values, tokens),
        lambda: turn_returns(known, tokens, gamma),
        lambda: credited_rewards(rewards, tokens),
    ]
    for call in calls:
        want = call()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "on_cpu", lambda tensor: False)
            torch.testing.assert_close(call(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_a_very_long_row(gamma: float, lam: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    size = 128 * 1024
    tokens = padded_tokens(torch.from_numpy(rng.random((1, size)) < 0.7))
    rewards, values = (torch.from_numpy(rng.normal(size=size).astype(np.float32)) for _ in range(2))
    want = vtrace_scan(rewards, values, None, tokens, gamma, lam=lam)
    monkeypatch.setattr(kernels, "on_cpu", lambda tensor: False)
    torch.testing.assert_close(
        vtrace_scan(rewards, values, None, tokens, gamma, lam=lam), want, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("everywhere", [False, True])
def test_row_sums_take_every_reward_and_no_nan_of_padding(
    everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    rewards = torch.from_numpy(rng.normal(size=(5, 203)).astype(np.float32))
    rewards[1:3] = 0
    rewards[2, 200], rewards[4, 7] = 3, torch.nan
    mask = torch.ones(5, 203)
    mask[4, 7] = mask[0, 5] = 0
    want = torch.nansum(rewards.double(), 1)
    if everywhere:
        monkeypatch.setattr(kernels, "on_cpu", lambda tensor: False)
    torch.testing.assert_close(row_rewards(rewards, mask), want)


def test_without_a_directory_to_write_the_loops_compile_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(function: Any, **options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return function

    monkeypatch.setattr(kernels, "load", lambda _: SimpleNamespace(njit=njit))
    assert kernels.kernel(len)([1, 2]) == 2


def test_a_chain_on_nothing_trainable_has_no_metrics_of_tokens() -> None:
    batch = batch_of([member("g", 0, 1.0, [[0, 0]], old_log_probs=[1, 2], rollout_log_probs=[3, 4])])
    result = run_chain(build_chain({"estimator": "grpo", "correction": CORRECTION}), batch)
    assert not [name for name in result.metrics if name.startswith("rollout_corr/")]


def test_columns_for_a_device_are_packed_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without one: only what is asked of the allocator, and that the same values are laid down."""
    stored, empty, pinned = StoredGroups(5, 3), torch.empty, []

    def ordinary(*size: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        column = empty(*size, **options)
        if pin_memory:
            pinned.append(column)
        return column

    monkeypatch.setattr(torch, "empty", ordinary)
    monkeypatch.setattr(torch.Tensor, "to", lambda column, *_, **__: column)
    layout, names, cuda = Layout.of(stored.groups), ("response_mask", "ref_log_probs"), torch.device("cuda")
    laid_out = lay_out(layout, stored.columns, names, cuda)
    assert {id(column) for column in pinned} == {id(column) for column in laid_out.values()}
    want = pack_members(layout, lay_out(layout, stored.columns, names, torch.device("cpu"))).columns
    torch.testing.assert_close(pack_members(layout, laid_out, cuda).columns, want, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_chains_give_the_same_numbers_on_the_device() -> None:
    pairs = random_pairs(6, 5)
    infos, columns = [info for info, _ in pairs], [columns for _, columns in pairs]
    here, there = pack(infos, columns), pack(infos, columns, "cuda")
    for name, settings_ in CHAINS.items():
        want, got = (run_chain(build_chain(settings_), batch) for batch in (here, there))
        assert want.advantages is not None, name
        torch.testing.assert_close(got.advantages, want.advantages.cuda(), rtol=1e-5, atol=1e-5)
        assert want.metrics == pytest.approx(dict(got.metrics), rel=1e-5, abs=1e-5), name
