"""Off-policy correction: weights, rejection, veto, diagnostics, V-trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamadv import padded
from streamadv.algorithms import build_chain, run_chain
from streamadv.algorithms.off_policy import Rejection, importance_weights, reject, veto
from streamadv.algorithms.scan import turn_mean, turn_returns
from streamadv.algorithms.segments import tokens_where
from streamadv.errors import SettingError

from .reference import batch_of, member, random_pairs, rows_of

BOUNDS = torch.tensor([0, 4, 6])
MASK = torch.tensor([0, 1, 1, 1, 1, 1], dtype=torch.uint8)
TOKENS = tokens_where(MASK, BOUNDS)
LOG_RATIO = torch.tensor([9.0, 0.0, np.log(4.0), np.log(0.25), 0.0, np.log(2.0)])


def test_levels_and_modes_of_weights() -> None:
    def weights(**options: Any) -> list[float]:
        found = importance_weights(LOG_RATIO, TOKENS, **options)[0]
        return [round(weight, 4) for weight in found.tolist()]

    assert weights(upper=3.0) == [0, 1, 3, 0.25, 1, 2]
    assert weights(upper=3.0, lower=0.5, mode="clip") == [0, 1, 3, 0.5, 1, 2]
    assert weights(upper=3.0, lower=0.5, mode="mask") == [0, 1, 0, 0, 1, 2]
    assert weights(level="sequence", upper=3.0) == [0, 1, 1, 1, 2, 2]
    assert weights(level="geometric", upper=3.0) == [0, 1, 1, 1, 1.4142, 1.4142]
    mean = (1 + 3 + 0.25 + 1 + 2) / 5
    normalised = weights(upper=3.0, batch_normalize=True)
    assert normalised == [round(w / mean, 4) for w in (0, 1, 3, 0.25, 1, 2)]


def test_extreme_and_masked_ratios_stay_finite() -> None:
    wild = torch.tensor([torch.nan, 500.0, -500.0, torch.inf, -torch.inf, 0.0])
    for level in ("token", "sequence", "geometric", "segment"):
        weights, _ = importance_weights(wild.clamp(-1e30, 1e30), TOKENS, level=level)  # type: ignore[arg-type]
        assert torch.isfinite(weights).all()


def test_rejection_and_veto_drop_what_they_should() -> None:
    kept, metrics = reject(LOG_RATIO, TOKENS, [Rejection("token_k1", 3.0)])
    assert kept.tolist() == [False, True, False, False, True, True]
    assert metrics["rollout_rs_masked_fraction"].value == 0.4
    kept, _ = reject(LOG_RATIO, TOKENS, [Rejection("seq_max_k3", 0.8)])
    assert kept.tolist() == [False, False, False, False, True, True]
    assert veto(LOG_RATIO, TOKENS, 0.3).tolist() == [False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("kind", "upper", "lower"),
    [("token_k3", 1.0, 0.5), ("token_k1", -1.0, None), ("seq_max_k1", 1.0, None), ("token_k1", 2.0, 0.0)],
)
def test_impossible_rejections_are_refused(kind: Any, upper: float, lower: float | None) -> None:
    with pytest.raises(SettingError, match=kind):
        Rejection(kind, upper, lower)
    with pytest.raises(SettingError, match="correction"):
        build_chain({"correction": {"upper": 1.0, "lower": 2.0, "level": None}})


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_runs_match_loops(seed: int, gamma: float) -> None:
    batch = batch_of(random_pairs(seed, 2, longest=12))
    mask = batch.column("response_mask").numpy()
    values = batch.column("values").double().numpy()
    mean, returns = np.zeros(len(mask)), np.zeros(len(mask))
    for start, end in rows_of(batch):
        ahead, t = 0.0, end - 1
        while t >= start:
            if not mask[t]:
                t -= 1
                continue
            last = t
            while t >= start and mask[t]:
                t -= 1
            run = slice(t + 1, last + 1)
            mean[run] = values[run].mean()
            ahead = values[last] + gamma * ahead
            returns[run] = ahead
    tokens = batch.trainable_tokens
    given = torch.from_numpy(values)
    np.testing.assert_allclose(turn_mean(given, tokens), mean, atol=1e-12)
    np.testing.assert_allclose(turn_returns(given, tokens, gamma), returns, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.95, 1.0])
)
def test_vtrace_matches_a_loop_and_gae_when_on_policy(seed: int, gamma: float, lam: float) -> None:
    batch = batch_of(random_pairs(seed, 2, longest=20))
    config = {"estimator": "vtrace", "gamma": gamma, "lam": lam, "rho_clip": 1.2, "pg_rho_clip": 1.5}
    result = run_chain(build_chain(config), batch)
    mask, values = batch.column("response_mask").numpy(), batch.column("values").double().numpy()
    rewards = result.columns["token_level_rewards"].double().numpy()
    log_ratio = (batch.column("old_log_probs") - batch.column("rollout_log_probs")).double()
    rho = log_ratio.exp().numpy()
    want, returns = np.zeros(len(mask)), np.zeros(len(mask))
    for start, end in rows_of(batch):
        value_next = target_next = error = 0.0
        for t in range(end - 1, start - 1, -1):
            if not mask[t]:
                continue
            bootstrap = lam * target_next + (1 - lam) * value_next
            want[t] = min(1.5, rho[t]) * (rewards[t] + gamma * bootstrap - values[t])
            delta = min(1.2, rho[t]) * (rewards[t] + gamma * value_next - values[t])
            error = delta + gamma * lam * min(1.0, rho[t]) * error
            returns[t] = target_next = values[t] + error
            value_next = values[t]
    assert result.advantages is not None
    assert result.returns is not None
    np.testing.assert_allclose(result.advantages, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(result.returns, returns, rtol=1e-5, atol=1e-5)
    on_policy = batch.with_columns(old_log_probs=batch.column("rollout_log_probs"))
    returns_v = run_chain(build_chain(config), on_policy).returns
    returns_g = run_chain(build_chain({"estimator": "gae", "gamma": gamma, "lam": lam}), on_policy).returns
    torch.testing.assert_close(returns_v, returns_g, rtol=1e-5, atol=1e-5)


def test_the_chain_corrects_after_or_before_the_estimator() -> None:
    columns = {"rollout_log_probs": [0.0, 0.0, 0.0], "old_log_probs": [9.0, 0.0, np.log(3.0)]}
    batch = batch_of([member("a", i, float(i), **columns) for i in (0, 1)])
    config = {"correction": {"upper": 2.0, "rejections": [{"kind": "token_k1", "upper": 2.5}]}}
    result = run_chain(build_chain(config), batch)
    assert result.columns["rollout_is_weights"].tolist() == [0, 1, 2, 0, 1, 2]
    assert result.columns["response_mask"].tolist() == [0, 1, 0, 0, 1, 0]
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5
    assert result.metrics["rollout_corr/kl"] == pytest.approx(-np.log(3.0) / 2)
    config["correction"]["before_estimator"] = True
    chain = build_chain({**config, "estimator": "reinforce"})
    assert [step.name for step in chain.steps] == ["rewards", "correction", "token_rewards", "estimator"]
    early = run_chain(chain, batch)
    assert early.columns["token_level_rewards"].tolist() == [0, 0, 0, 0, 1, 0]


def test_a_token_stays_if_it_passes_rejections_and_veto() -> None:
    outlier = {"rollout_log_probs": [0.0] * 3, "old_log_probs": [9.0, 0.0, -9.0]}
    near = {"rollout_log_probs": [0.0] * 3, "old_log_probs": [-9.0, 0.0, np.log(3.0)]}
    batch = batch_of([member("a", 0, 0.0, **outlier), member("a", 1, 1.0, **near)])
    config = {"level": None, "rejections": [{"kind": "token_k1", "upper": 2.5}], "veto": 0.1}
    mask = run_chain(build_chain({"correction": config}), batch).columns["response_mask"].tolist()
    assert mask == [0, 0, 0, 0, 1, 0]  # the first row has an outlier; observations stay masked


def test_clean_data_have_neutral_diagnostics() -> None:
    log_probs = torch.randn(3, 5)
    mask = torch.tensor([[0, 1, 1, 1, 0]] * 2 + [[0] * 5])
    weights, kept, metrics = padded.compute_rollout_correction_and_rejection_mask(
        log_probs, log_probs, mask, "sequence", rollout_rs="seq_mean_k3", rollout_rs_threshold=0.01
    )
    assert weights is not None
    assert torch.equal(weights, mask.float())
    assert torch.equal(kept, mask)
    neutral = {"kl": 0, "k3_kl": 0, "chi2_token": 0, "rollout_is_mean": 1, "rollout_is_seq_min": 1}
    for name, value in neutral.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1)
    _, _, nothing = padded.compute_rollout_correction_and_rejection_mask(
        log_probs, log_probs, mask * 0, "token"
    )
    assert nothing == {}


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), threshold=st.sampled_from([0.01, 0.2, 1.0, 50.0]))
def test_the_chain_drops_outliers_until_the_rest_is_near(seed: int, threshold: float) -> None:
    batch = batch_of(random_pairs(seed, 4))
    narrowed = run_chain(build_chain({"correction": {"level": None, "m2_threshold": threshold}}), batch)
    mask = narrowed.columns["response_mask"].bool()
    before = batch.column("response_mask").bool()
    squares = (batch.column("old_log_probs") - batch.column("rollout_log_probs")).double().square()
    ascending = sorted(squares[before].tolist())
    means = np.cumsum(ascending) / np.arange(1, len(ascending) + 1)
    fitting = max(int((means < threshold).sum()), 1) if ascending else 0
    assert sorted(squares[mask].tolist()) == ascending[:fitting]
    assert not (mask & ~before).any()


def test_a_row_is_dropped_for_one_ratio_outside() -> None:
    masks = [[1, 1, 1]]
    ratios = {0: [1.0, 0.05, 1.0], 1: [1.0, 9.0, 1.0], 2: [0.5, 1.0, 2.0]}
    pairs = [
        member("a", i, float(i), masks, old_log_probs=np.log(own), rollout_log_probs=[0, 0, 0])
        for i, own in ratios.items()
    ]
    for bounds, kept in (
        ({"veto": 0.1}, [0, 1, 1]),
        ({"veto_upper": 5.0}, [1, 0, 1]),
        ({"veto": 0.1, "veto_upper": 5.0}, [0, 0, 1]),
    ):
        result = run_chain(build_chain({"correction": {"level": None, **bounds}}), batch_of(pairs))
        assert result.columns["response_mask"].view(3, 3).any(1).tolist() == kept
    with pytest.raises(SettingError, match=r"veto 5.0 and veto_upper 0.1 drop everything"):
        build_chain({"correction": {"veto": 5.0, "veto_upper": 0.1}})


@pytest.mark.parametrize("quirks", [None, "verl", "verl-2026-01"])
def test_a_batch_without_tokens_has_no_metrics(quirks: Any) -> None:
    log_probs, mask = torch.randn(2, 3), torch.zeros(2, 3)
    weights, kept, metrics = padded.compute_rollout_correction_and_rejection_mask(
        log_probs,
        torch.randn(2, 3),
        mask,
        "sequence",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1,seq_max_k2",
        rollout_rs_threshold="2.0,0.1",
        peer_quirks=quirks,
    )
    assert weights is not None
    assert weights.tolist() == kept.tolist() == mask.tolist()
    assert metrics == {}
