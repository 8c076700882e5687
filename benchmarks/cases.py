"""What is measured: one case per estimator or step, each with the peers' ways of doing the same.

`run` goes from packed columns to float32 results for every token (or step); `padded` is the classic surface
on the peers' own tensors. A peer agrees on every batch, unless it is named in `one_turn`: its time advances
over observations, or starts anew after them, so it gives the same numbers on rows of one turn only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from streamadv import padded
from streamadv.algorithms import expand, run_chain
from streamadv.algorithms.arguments import PeerQuirks
from streamadv.algorithms.chain import cut_chain
from streamadv.algorithms.estimators.steps import discounted_returns
from streamadv.algorithms.kl import column_kl
from streamadv.algorithms.registry import get_estimator
from streamadv.algorithms.segments import whiten
from streamadv.padded.rewards import AdvEstimator
from streamadv.trajectory.columns import Array

from .peers import roll, verl
from .workload import Workload

Results = Sequence[Tensor]
Way = Callable[[Workload], Results]
Peer = Literal["padded", "verl", "roll"]

GAMMA: Final = 0.99
LAM: Final = 0.95
STEP_GAMMA: Final = 0.95
KL_COEF: Final = 0.01


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table. Results are [N] or [S] packed, [B, T] or [S] at the peers; the first ones compared."""

    name: str
    reads: tuple[str, ...]  # columns of the batch
    run: Way
    padded: Way | None = None
    verl: Way | None = None
    roll: Way | None = None
    one_turn: frozenset[Peer] = frozenset()
    level: Literal["token", "step"] = "token"

    def alone(self) -> Case:
        """The case without the peers."""
        return replace(self, padded=None, verl=None, roll=None)

    def peers(self) -> list[tuple[Peer, Way]]:
        """The other ways to the same result."""
        ways: Mapping[Peer, Way | None] = {"padded": self.padded, "verl": self.verl, "roll": self.roll}
        return [(name, way) for name, way in ways.items() if way is not None]


def cases() -> list[Case]:
    """All cases, token-level ones first."""
    return [*token_cases(), *_outcome_cases(), *_step_cases()]


def token_cases() -> list[Case]:
    """Those that go through columns of tokens."""
    return [*_gae_cases(), *_reinforce_cases(), *_column_cases()]


def _gae_cases() -> list[Case]:
    mask, rewards, value = "response_mask", "token_level_rewards", "values"
    return [
        Case(
            "gae",
            (mask, rewards, value),
            _estimator("gae", gamma=GAMMA, lam=LAM),
            padded=_classic("gae"),
            verl=lambda w: verl.gae(*_padded(w, rewards, value, mask), gamma=GAMMA, lam=LAM),
            roll=_roll_gae,
            one_turn=frozenset({"roll"}),
        ),
        Case(
            "gae, all tokens",
            (rewards, value),
            _estimator("gae", gamma=GAMMA, lam=LAM, mask_aware=False),
            padded=_classic("gae", "roll"),
            roll=_roll_gae,
        ),
        Case(
            "gae, whitened",
            (mask, rewards, value),
            _gae_whitened,
            padded=lambda w: padded.compute_gae_advantage_return(
                w.padded[rewards], w.padded[value], w.padded[mask], GAMMA, LAM
            ),
            verl=_verl_gae_whitened,
        ),
    ]


def _reinforce_cases() -> list[Case]:
    mask, rewards = "response_mask", "token_level_rewards"
    return [
        Case(
            "reinforce",
            (mask, rewards),
            _estimator("reinforce", gamma=GAMMA),
            padded=_classic("reinforce"),
            roll=lambda w: (roll.reinforce(w.padded[rewards], gamma=GAMMA),),
            one_turn=frozenset({"roll"}),
        ),
        Case(
            "reinforce, all tokens",
            (rewards,),
            _estimator("reinforce", gamma=GAMMA, mask_aware=False),
            padded=_classic("reinforce", "roll"),
            roll=lambda w: (roll.reinforce(w.padded[rewards], gamma=GAMMA),),
        ),
        Case(
            "reinforce++",
            (mask, rewards),
            _estimator("reinforce_plus_plus", gamma=GAMMA),
            padded=lambda w: padded.compute_reinforce_plus_plus_outcome_advantage(
                w.padded[rewards], w.padded[mask], GAMMA
            ),
            verl=lambda w: verl.reinforce_plus_plus(*_padded(w, rewards, mask), gamma=GAMMA),
            one_turn=frozenset({"verl"}),
        ),
    ]


def _column_cases() -> list[Case]:
    mask, rewards, value = "response_mask", "token_level_rewards", "values"
    policy = ("old_log_probs", "ref_log_probs")
    return [
        Case(
            "v-trace",
            (mask, rewards, value, "old_log_probs", "rollout_log_probs"),
            _estimator("vtrace", gamma=GAMMA, lam=LAM),
        ),
        Case(
            "whitening",
            (mask, value),
            lambda w: (whiten(w.batch.column(value), w.batch.trainable_tokens),),
            verl=lambda w: (verl.masked_whiten(*_padded(w, value, mask)),),
            roll=lambda w: (roll.masked_whiten(*_padded(w, value, mask)),),
        ),
        Case(
            "kl k3",
            (*policy, mask),
            _k3,
            verl=lambda w: (verl.k3(*_padded(w, *policy, mask)),),
            roll=lambda w: (roll.k3(*_padded(w, *policy, mask)),),
        ),
        Case(
            "chain: kl, gae, whitened",
            (mask, value, *policy),
            _token_chain,
            verl=_peer_chain(lambda: verl.chain),
            roll=_peer_chain(lambda: roll.chain),
            one_turn=frozenset({"roll"}),
        ),
    ]


def _outcome_cases() -> list[Case]:
    def case(name: str, run: Way, classic: Callable[..., Results], roll: Way | None = None) -> Case:
        return Case(
            name,
            ("response_mask",),
            run,
            padded=lambda w: classic(*_grouped(w)),
            verl=lambda w: getattr(verl, name.replace(" ", "_"))(*_grouped(w)),
            roll=roll,
        )

    grpo, rloo = padded.compute_grpo_outcome_advantage, padded.compute_rloo_outcome_advantage
    vectorized = padded.compute_grpo_vectorized_outcome_advantage
    return [
        case(
            "grpo",
            _outcome("grpo"),
            grpo,
            lambda w: roll.grpo(w.rewards, w.padded["response_mask"], w.groups),
        ),
        case("grpo vectorized", _outcome("grpo", least_std=1e-3), vectorized),
        case("rloo", _outcome("rloo"), rloo),
        case("rloo vectorized", _outcome("rloo"), rloo),
        case("opo", _outcome("opo"), padded.compute_opo_outcome_advantage),
    ]


def _step_cases() -> list[Case]:
    return [
        Case(
            "discounted returns",
            (),
            lambda w: (discounted_returns(w.batch, STEP_GAMMA).float(),),
            padded=lambda w: (
                padded.compute_discounted_returns(
                    w.steps.scores, w.steps.trajectory, torch.from_numpy(w.steps.number), STEP_GAMMA
                ),
            ),
            roll=lambda w: (
                roll.discounted_returns(w.steps.scores, w.steps.trajectory, w.steps.number, STEP_GAMMA),
            ),
            level="step",
        ),
        Case("gigpo", (), _gigpo, padded=_padded_gigpo, roll=_roll_gigpo, level="step"),
    ]


def _padded(workload: Workload, *names: str) -> list[Tensor]:
    return [workload.padded[name] for name in names]


def _grouped(workload: Workload) -> tuple[Tensor, Tensor, Array]:
    return workload.padded["token_level_rewards"], workload.padded["response_mask"], workload.groups


def _gae_whitened(workload: Workload) -> Results:
    advantages, returns = _estimator("gae", gamma=GAMMA, lam=LAM)(workload)
    return whiten(advantages, workload.batch.trainable_tokens), returns


def _estimator(name: str, **options: float) -> Way:
    def run(workload: Workload) -> Results:
        estimate = get_estimator(name).function(workload.batch, **options)
        return (estimate.advantages,) if estimate.returns is None else (estimate.advantages, estimate.returns)

    return run


def _verl_gae_whitened(workload: Workload) -> Results:
    rewards, values, mask = _padded(workload, "token_level_rewards", "values", "response_mask")
    advantages, returns = verl.gae(rewards, values, mask, gamma=GAMMA, lam=LAM)
    return verl.masked_whiten(advantages, mask), returns


def _classic(estimator: AdvEstimator, peer_quirks: PeerQuirks | None = None) -> Way:
    def run(workload: Workload) -> Results:
        outputs, _ = padded.compute_advantage(
            workload.padded, adv_estimator=estimator, gamma=GAMMA, lambd=LAM, peer_quirks=peer_quirks
        )
        return outputs["advantages"], outputs["returns"]

    return run


def _roll_gae(workload: Workload) -> Results:
    result: Results = roll.gae(*_padded(workload, "token_level_rewards", "values"), gamma=GAMMA, lam=LAM)
    return result


TOKEN_CHAIN: Final = {
    "estimator": "gae",
    "gamma": GAMMA,
    "lam": LAM,
    "kl": {"penalty": "k3", "coefficient": KL_COEF, "log_probs": "old_log_probs"},
    "whiten_advantages": True,
}


def _k3(workload: Workload) -> Results:
    batch = workload.batch
    log_probs, ref_log_probs = batch.column("old_log_probs"), batch.column("ref_log_probs")
    return column_kl(log_probs, ref_log_probs, "k3", batch.trainable_tokens)[:1]


def _token_chain(workload: Workload) -> Results:
    """The pipeline's own chain, placement of rewards and metrics included."""
    chain, _ = cut_chain(TOKEN_CHAIN, ())  # built once, as by the workers
    result = run_chain(chain, workload.batch)
    assert result.advantages is not None
    assert result.returns is not None
    return result.advantages, result.returns


def _peer_chain(chain: Callable[[], Callable[..., Results]]) -> Way:
    names = ("token_level_rewards", "values", "response_mask", "old_log_probs", "ref_log_probs")
    return lambda workload: chain()(*_padded(workload, *names), kl_coef=KL_COEF, gamma=GAMMA, lam=LAM)


def _outcome(estimator: str, **options: float) -> Way:
    function = get_estimator(estimator).function

    def run(workload: Workload) -> Results:
        return (expand(workload.batch, "row", function(workload.batch, **options).advantages),)

    return run


def _gigpo(workload: Workload) -> Results:
    estimate = get_estimator("gigpo").function(workload.batch, gamma=STEP_GAMMA, statistics="step")
    return (estimate.advantages.float(),)


def _padded_gigpo(workload: Workload) -> Results:
    steps = workload.steps
    returns = padded.compute_discounted_returns(
        steps.scores, steps.trajectory, torch.from_numpy(steps.number), STEP_GAMMA
    )
    outputs, _ = padded.compute_response_level_rewards(
        {"episode_scores": steps.episode_scores, "step_rewards": returns},
        adv_estimator="gigpo",
        traj_group_id=steps.group,
        state_hash=steps.state,
        norm_mean_type="group",
        norm_std_type="group",
        step_norm_mean_type="group",
        step_norm_std_type="group",
    )
    return (outputs["response_level_rewards"],)


def _roll_gigpo(workload: Workload) -> Results:
    own = workload.steps
    labels = own.trajectory, own.number, own.group, own.state
    return (roll.gigpo(own.scores, own.episode_scores, *labels, STEP_GAMMA),)
