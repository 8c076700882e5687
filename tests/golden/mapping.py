"""Which of streamadv's functions stands for which recorded function, and what is left out, with reasons."""

from __future__ import annotations

from .compare import Function
from .mapping_others import OTHERS
from .mapping_outcomes import OUTCOMES
from .mapping_roll import ROLL
from .mapping_verl import VERL

MAPPING: dict[str, Function] = {**OTHERS, **OUTCOMES, **ROLL, **VERL}

#: Functions streamadv does not offer, and why.
NOT_IN_CATALOGUE: dict[str, str] = {
    "areal_apply_rejection_sampling": "weights of sequence level are geometric means there whatever the metric",
    "areal_compute_advantages": "a whole pipeline of AReaL's; its parts are offered, no preset",
    "areal_decoupled_ppo_loss": "a loss: losses are the trainer's",
    "areal_normalization": "leave-one-out means over tokens are not offered",
    "openrlhf_advantages": "a whole pipeline of OpenRLHF's; its parts are offered, no preset",
    "skyrl_off_policy_correction": "outlier masks of SkyRL are not offered, and its metric names",
}

#: Calls that raise in the peer and have a defined result here ("function.variant"; "function": where the
#: inputs are the reason, so that any variant may).
DEFINED_HERE: dict[str, str] = {
    "roll_compute_approx_kl.name_k1": "every name of an estimator is known everywhere",
    "roll_compute_approx_kl.name_k2": "every name of an estimator is known everywhere",
    "roll_compute_approx_kl.name_low_var_kl": "every name of an estimator is known everywhere",
    "roll_group_reward_norm": "a group of one gives 0",
    "verl_adv_grpo_passk": "a group of one gives 0",
    "verl_compute_rollout_correction_weights.bad_level": "geometric ratios are offered",
}

#: Functions that raise in the peer with fewer than two trainable tokens, and what streamadv does.
DEFINED_FOR_FEW_TOKENS: dict[str, str] = {
    "roll_masked_ops": "statistics of fewer than two values are defined",
    "verl_adv_gae": "not whitened",
    "verl_adv_reinforce_plus_plus": "not whitened",
    "verl_adv_reinforce_plus_plus_baseline": "not whitened",
    "verl_compute_offpolicy_metrics": "no tokens, no metrics",
    "verl_compute_rollout_correction_weights": "no tokens, no metrics",
    "verl_compute_rollout_rejection_mask": "no tokens, no metrics",
    "verl_masked_ops": "statistics of fewer than two values are defined",
    "verl_rollout_correction_and_rejection": "no tokens, no metrics",
}
