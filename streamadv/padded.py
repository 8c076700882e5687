"""The algorithms on padded [B, T] tensors, under the names and arguments known from ROLL and verl.

Pure functions: nothing passed in is changed. The pipeline itself works on packed batches
(`streamadv.algorithms`); both run the same kernels. ROLL's order of use:

    batch, metrics = reward_postprocess(batch, n_sample=8, adv_estimator="grpo")
    batch, metrics = compute_token_reward(batch, add_token_level_kl=True, kl_coef=0.01)
    batch, metrics = compute_advantage(batch, adv_estimator="grpo", gamma=1.0)
"""

from .algorithms.kl import adapted_coefficient, approx_kl, full_kl
from .algorithms.masked import (
    agg_loss,
    clip_fraction,
    masked_mean,
    masked_normalize,
    masked_sum,
    masked_var,
    masked_whiten,
)
from .algorithms.padded_advantage import compute_advantage, compute_agentic_reinforce_return
from .algorithms.padded_estimators import (
    compute_gae_advantage_return,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_maxrl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_optimal_token_baseline_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_tir_optimal_token_baseline_advantage,
)
from .algorithms.padded_off_policy import (
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from .algorithms.padded_outcomes import (
    compute_gdpo_outcome_advantage,
    compute_hierarchical_grpo_advantage,
    compute_rae_advantage,
    compute_step_grpo_advantage,
    cost_penalty,
)
from .algorithms.padded_rewards import (
    agentic_reward_norm,
    apply_kl_penalty,
    compute_discounted_returns,
    compute_response_level_rewards,
    compute_token_reward,
    expand_to_token_level,
    group_mean_std,
    reward_norm,
    reward_postprocess,
)
from .algorithms.padded_train_infer import RatioFilter, compute_train_infer_correction
from .algorithms.sample_masks import (
    difficulty_mask,
    overlong_penalty,
    sample_level_mask,
    sample_weights,
    truncation_penalty,
)
from .algorithms.staleness import (
    m2po_mask,
    off_policy_sequence_mask,
    proximal_log_probs,
    version_staleness,
)

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
    "proximal_log_probs",
    "reward_norm",
    "reward_postprocess",
    "sample_level_mask",
    "sample_weights",
    "truncation_penalty",
    "version_staleness",
]
