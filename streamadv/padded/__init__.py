"""The algorithms on padded [B, T] tensors, under the names and arguments known from ROLL and verl.

Pure functions: nothing passed in is changed. The pipeline itself works on packed batches
(`streamadv.algorithms`); both run the same kernels. ROLL's order of use:

    batch, metrics = reward_postprocess(batch, n_sample=8, adv_estimator="grpo")
    batch, metrics = compute_token_reward(batch, add_token_level_kl=True, kl_coef=0.01)
    batch, metrics = compute_advantage(batch, adv_estimator="grpo", gamma=1.0)

Every function is checked at its entrance, here and nowhere behind it (`algorithms.entrance`):

- Tensors may have any dtype of numbers and any strides, NumPy arrays do too; masks hold 0 and 1 in any dtype; labels
  are a list, a tuple, a 1-D tensor or array. What is given is never changed.
- Results are float32 and contiguous, and share no memory with an argument or each other. They have no gradient, but
  for what a loss is made of: `agg_loss`, `approx_kl`, `full_kl`, `masked_mean`, `masked_sum`, `masked_var`.
- What does not fit raises ArgumentError (a tensor, an array, labels) or OptionError (anything else), in one line
  that names it. Both are ValueErrors; the one is a TrajectoryError, the other a SettingError.
- A number that counts must be finite; one outside the mask has no effect. `approx_kl`, `full_kl` and
  `proximal_log_probs` take every element for itself, so NaN stays where it is; in `compute_gdpo_outcome_advantage` it
  is a reward that is not known.
- No rows, no columns and nothing set in a mask give empty results and zeros.
"""

from ..algorithms import kl, length_penalties, stale_masks
from . import advantage, estimators, masked, off_policy, outcomes, rewards, sample_masks, train_infer
from .entrance import checked
from .train_infer import RatioFilter

adapted_coefficient = checked(kl.adapted_coefficient)
agentic_reward_norm = checked(rewards.agentic_reward_norm)
agg_loss = checked(masked.agg_loss, differentiable=True)
apply_kl_penalty = checked(rewards.apply_kl_penalty)
approx_kl = checked(kl.approx_kl, differentiable=True)
clip_fraction = checked(masked.clip_fraction)
compute_advantage = checked(advantage.compute_advantage)
compute_agentic_reinforce_return = checked(advantage.compute_agentic_reinforce_return)
compute_discounted_returns = checked(rewards.compute_discounted_returns)
compute_gae_advantage_return = checked(estimators.compute_gae_advantage_return)
compute_gdpo_outcome_advantage = checked(outcomes.compute_gdpo_outcome_advantage)
compute_gpg_outcome_advantage = checked(estimators.compute_gpg_outcome_advantage)
compute_grpo_outcome_advantage = checked(estimators.compute_grpo_outcome_advantage)
compute_grpo_passk_outcome_advantage = checked(estimators.compute_grpo_passk_outcome_advantage)
compute_grpo_vectorized_outcome_advantage = checked(estimators.compute_grpo_vectorized_outcome_advantage)
compute_hierarchical_grpo_advantage = checked(outcomes.compute_hierarchical_grpo_advantage)
compute_maxrl_outcome_advantage = checked(estimators.compute_maxrl_outcome_advantage)
compute_offpolicy_metrics = checked(off_policy.compute_offpolicy_metrics)
compute_opo_outcome_advantage = checked(estimators.compute_opo_outcome_advantage)
compute_optimal_token_baseline_advantage = checked(estimators.compute_optimal_token_baseline_advantage)
compute_rae_advantage = checked(outcomes.compute_rae_advantage)
compute_reinforce_plus_plus_baseline_outcome_advantage = checked(
    estimators.compute_reinforce_plus_plus_baseline_outcome_advantage
)
compute_reinforce_plus_plus_outcome_advantage = checked(
    estimators.compute_reinforce_plus_plus_outcome_advantage
)
compute_remax_outcome_advantage = checked(estimators.compute_remax_outcome_advantage)
compute_response_level_rewards = checked(rewards.compute_response_level_rewards)
compute_rloo_outcome_advantage = checked(estimators.compute_rloo_outcome_advantage)
compute_rollout_correction_and_rejection_mask = checked(
    off_policy.compute_rollout_correction_and_rejection_mask
)
compute_rollout_correction_weights = checked(off_policy.compute_rollout_correction_weights)
compute_rollout_rejection_mask = checked(off_policy.compute_rollout_rejection_mask)
compute_step_grpo_advantage = checked(outcomes.compute_step_grpo_advantage)
compute_tir_optimal_token_baseline_advantage = checked(
    estimators.compute_tir_optimal_token_baseline_advantage
)
compute_token_reward = checked(rewards.compute_token_reward)
compute_train_infer_correction = checked(train_infer.compute_train_infer_correction)
cost_penalty = checked(outcomes.cost_penalty)
difficulty_mask = checked(sample_masks.difficulty_mask)
expand_to_token_level = checked(rewards.expand_to_token_level)
full_kl = checked(kl.full_kl, differentiable=True)
group_mean_std = checked(rewards.group_mean_std)
m2po_mask = checked(stale_masks.m2po_mask)
masked_mean = checked(masked.masked_mean, differentiable=True)
masked_normalize = checked(masked.masked_normalize)
masked_sum = checked(masked.masked_sum, differentiable=True)
masked_var = checked(masked.masked_var, differentiable=True)
masked_whiten = checked(masked.masked_whiten)
off_policy_sequence_mask = checked(stale_masks.off_policy_sequence_mask)
overlong_penalty = checked(length_penalties.overlong_penalty)
proximal_log_probs = checked(stale_masks.proximal_log_probs)
reward_norm = checked(rewards.reward_norm)
reward_postprocess = checked(rewards.reward_postprocess)
sample_level_mask = checked(sample_masks.sample_level_mask)
sample_weights = checked(sample_masks.sample_weights)
truncation_penalty = checked(length_penalties.truncation_penalty)
version_staleness = checked(stale_masks.version_staleness)

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
