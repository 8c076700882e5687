"""Which of streamadv's functions stands for which recorded function, and what is left out, with reasons."""

from __future__ import annotations

from .compare import Function
from .mapping_flow import FLOWS
from .mapping_losses import LOSSES
from .mapping_others import OTHERS
from .mapping_outcomes import OUTCOMES
from .mapping_roll import ROLL
from .mapping_verl import VERL
from .mapping_verl091 import VERL091

MAPPING: dict[str, Function] = {**FLOWS, **LOSSES, **OTHERS, **OUTCOMES, **ROLL, **VERL, **VERL091}

#: Mapped functions whose metrics are not compared, and why.
METRICS_NOT_OFFERED: dict[str, str] = {
    "roll2026_policy_loss_base": "ROLL's clip metrics are means over all positions; losses have verl's metrics",
    "trl116_grpo_loss": "TRL's clip metrics are gathered over processes; losses have verl's metrics",
}

#: Functions streamadv does not offer, and why.
NOT_IN_CATALOGUE: dict[str, str] = {
    "areal_apply_rejection_sampling": "weights of sequence level are geometric means there whatever the metric",
    "areal_compute_advantages": "a whole pipeline of AReaL's; its parts are offered, no preset",
    "areal_decoupled_ppo_loss": "also gives masks and weights of tokens, which no loss here returns",
    "areal_normalization": "leave-one-out means over tokens are not offered",
    "openrlhf_advantages": "a whole pipeline of OpenRLHF's; its parts are offered, no preset",
    "roll2026_distill_divergence": "divergences between whole distributions for distillation: the trainer's",
    "roll2026_policy_loss_agentic": "a loss of a whole worker; segment ratios are the trainer's",
    "roll2026_policy_loss_agentic_pg": "losses of a whole worker; the trainer's",
    "roll2026_policy_loss_rlvr": "a loss of a whole worker; sequence ratios without GSPO's gradient are the trainer's",
    "roll2026_policy_loss_rlvr_pg": "losses of a whole worker; the trainer's",
    "roll2026_teacher_routing": "which teacher reads which rows is the scorer's; padded takes teacher_rows_NAME",
    "roll2026_value_loss": "a loss of critics: the trainer's",
    "skyrl_off_policy_correction": "outlier masks of SkyRL are not offered, and its metric names",
    "trl116_gamma_weights": "weights of the VESPO loss: the trainer's",
    "trl116_gmpo_loss": "a loss of geometric means: the trainer's",
    "trl116_high_entropy_mask": "a mask by the trainer's own entropies: the trainer's",
    "trl116_rloo_loss": "PPO clip of one ratio for a whole row (a sum, not a mean): the trainer's",
    "verl091_distillation_loss": "a loss of distillation: the trainer's; the chain subtracts the KL from advantages",
    "verl091_entropy_loss": "the entropy of whole distributions: the trainer's",
    "verl091_forward_kl_topk": "a loss of distillation on a teacher's likeliest tokens: the trainer's",
    "verl091_policy_loss_clip_cov": "a loss that draws random tokens: the trainer's",
    "verl091_policy_loss_dppo_kl": "a loss masked by divergence: the trainer's",
    "verl091_policy_loss_dppo_tv": "a loss masked by divergence: the trainer's",
    "verl091_policy_loss_dro": "a loss with a squared log-ratio: the trainer's",
    "verl091_policy_loss_geo_mean": "a loss of geometric means: the trainer's",
    "verl091_policy_loss_kl_cov": "a loss with a KL on the tokens of greatest covariance: the trainer's",
    "verl091_policy_loss_sapo": "a loss with soft gates: the trainer's",
    "verl091_ppo_loss": "a sum of policy loss, entropy and KL, which the trainer adds up",
    "verl091_value_loss": "a loss of critics: the trainer's",
}
