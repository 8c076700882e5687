"""The algorithms on padded [B, T] tensors, with the names and arguments of ROLL and verl.

All functions are pure. The pipeline works on packed batches (`streamadv.algorithms`); both run the same kernels. ROLL
calls them in this order:

    batch, metrics = reward_postprocess(batch, n_sample=8, adv_estimator="grpo")
    batch, metrics = compute_token_reward(batch, add_token_level_kl=True, kl_coef=0.01)
    batch, metrics = compute_advantage(batch, adv_estimator="grpo", gamma=1.0)

Modules: `rewards` and `advantage` are ROLL's three stages, `estimators` and `grouped` verl's estimators, `outcomes`
those of other peers; `masked` has statistics and losses; `sample_masks`, `off_policy` (verl's rollout correction) and
`train_infer` (ROLL's) decide what counts. Below them `layout` goes from padded to packed and back, and `entrance` is
the door at which every function checks its arguments:

- A tensor may have any dtype of numbers and any strides, or be a NumPy array. A mask holds 0 and 1 in any dtype. Labels
  are a list, a tuple, a 1-D tensor or array. No argument is changed.
- Results are float32 and contiguous, and share no memory with an argument or each other. Results that losses are made
  of carry gradients: `agg_loss`, `approx_kl`, `full_kl`, `masked_mean`, `masked_sum`, `masked_var`. All others do not.
- An argument that does not fit raises ArgumentError (a tensor, an array, labels) or OptionError (anything else), in one
  line that names it. Both are ValueErrors; the first is a TrajectoryError, the second a SettingError.
- A number that counts must be finite; a number outside the mask has no effect, but for a finite token reward: it counts
  in the sum of its row, and in time at the last trainable token before it. `approx_kl`, `full_kl` and
  `proximal_log_probs` work element by element, so NaN stays where it is; in `compute_normalize_then_sum_advantage`
  NaN is a missing reward.
- No rows, no columns, or a mask without ones give empty results and zeros.

`peer_quirks` "roll", "verl" (0.9.1) or "verl-2026-01" reproduces that library where its numbers differ from the
definition.
"""

from .. import extras

extras.require("streamadv.padded", *extras.TO_COMPUTE)

from ..algorithms import kl
from ..algorithms import off_policy as correction
from ..algorithms import rewards as shaping
from . import entrance
from .advantage import (
    apply_kl_penalty,
    compute_advantage,
    compute_agentic_reinforce_return,
    compute_token_reward,
    expand_to_token_level,
)
from .estimators import (
    compute_gae_advantage_return,
    compute_optimal_token_baseline_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_tir_optimal_token_baseline_advantage,
)
from .grouped import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_maxrl_outcome_advantage,
    compute_multi_trajectory_grpo_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from .masked import (
    agg_loss,
    clip_fraction,
    masked_mean,
    masked_normalize,
    masked_sum,
    masked_var,
    masked_whiten,
)
from .off_policy import (
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from .outcomes import (
    compute_hierarchical_grpo_advantage,
    compute_normalize_then_sum_advantage,
    compute_rae_advantage,
    compute_step_grpo_advantage,
    cost_penalty,
)
from .rewards import (
    agentic_reward_norm,
    compute_discounted_returns,
    compute_response_level_rewards,
    group_mean_std,
    reward_norm,
    reward_postprocess,
)
from .sample_masks import (
    dapo_filter_groups,
    difficulty_mask,
    off_policy_sequence_mask,
    pf_ppo_weights,
    proximal_log_probs,
    sample_level_mask,
    sample_weights,
    version_staleness,
)
from .train_infer import RatioFilter, compute_train_infer_correction

# The pipeline uses these too, so they live in `streamadv.algorithms` and pass the door here.
adapted_coefficient = entrance.checked(kl.adapted_coefficient)
approx_kl = entrance.differentiable(kl.approx_kl)
full_kl = entrance.differentiable(kl.full_kl)
m2po_mask = entrance.checked(correction.m2po_mask)
overlong_penalty = entrance.checked(shaping.overlong_penalty)
truncation_penalty = entrance.checked(shaping.truncation_penalty)

__all__ = [
    "RatioFilter",
    "adapted_coefficient",
    "agentic_reward_norm",
    "agg_loss",
    "apply_kl_penalty",
    "approx_kl",
    "clip_fraction",
    "compute_advantage",
    "compute_agentic_reinforce_return",
    "compute_discounted_returns",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_hierarchical_grpo_advantage",
    "compute_maxrl_outcome_advantage",
    "compute_multi_trajectory_grpo_advantage",
    "compute_normalize_then_sum_advantage",
    "compute_offpolicy_metrics",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_rae_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_response_level_rewards",
    "compute_rloo_outcome_advantage",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_step_grpo_advantage",
    "compute_tir_optimal_token_baseline_advantage",
    "compute_token_reward",
    "compute_train_infer_correction",
    "cost_penalty",
    "dapo_filter_groups",
    "difficulty_mask",
    "expand_to_token_level",
    "full_kl",
    "group_mean_std",
    "m2po_mask",
    "masked_mean",
    "masked_normalize",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "off_policy_sequence_mask",
    "overlong_penalty",
    "pf_ppo_weights",
    "proximal_log_probs",
    "reward_norm",
    "reward_postprocess",
    "sample_level_mask",
    "sample_weights",
    "truncation_penalty",
    "version_staleness",
]
