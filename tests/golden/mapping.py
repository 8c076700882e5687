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
    "roll2026_policy_loss_agentic_pg": "ROLL's clip metrics are means over all positions; losses have verl's metrics",
    "roll2026_policy_loss_rlvr_pg": "ROLL's clip metrics are means over all positions; losses have verl's metrics",
    "roll2026_value_loss": "names of a whole worker; its clip fraction is the squared error without a clip",
    "trl116_gmpo_loss": "TRL's clip metrics are gathered over processes; losses have verl's metrics",
    "trl116_rloo_loss": "TRL's clip metrics are gathered over processes; losses have verl's metrics",
    "verl091_distillation_loss": "metrics of a whole loss under names of their own",
    "verl091_ppo_loss": "metrics of a whole loss under names of their own",
    "roll2026_policy_loss_base": "ROLL's clip metrics are means over all positions; losses have verl's metrics",
    "trl116_grpo_loss": "TRL's clip metrics are gathered over processes; losses have verl's metrics",
}

#: Outputs of mapped functions that are not compared, and why.
OUTPUTS_NOT_OFFERED: dict[str, dict[str, str]] = {
    "verl091_forward_kl_topk": dict.fromkeys(
        ("student_mass", "teacher_mass", "overlap_count", "overlap_token_advantage"),
        "values of tokens; the loss gives the means of the masses",
    ),
    "verl091_policy_loss_clip_cov": {"perm": "the permutation that was drawn"},
}

#: Functions streamadv does not offer, and why.
NOT_IN_CATALOGUE: dict[str, str] = {
    "areal_apply_rejection_sampling": "weights of sequence level are geometric means there whatever the metric",
    "areal_compute_advantages": "a whole pipeline of AReaL's; its parts are offered, no preset",
    "areal_decoupled_ppo_loss": "also gives masks and weights of tokens, which no loss here returns",
    "areal_normalization": "leave-one-out means over tokens are not offered",
    "openrlhf_advantages": "a whole pipeline of OpenRLHF's; its parts are offered, no preset",
    "roll2026_policy_loss_agentic": "a loss of a whole worker; segment ratios are the trainer's",
    "roll2026_policy_loss_rlvr": "a loss of a whole worker; sequence ratios without GSPO's gradient are the trainer's",
    "roll2026_teacher_routing": "which teacher reads which rows is the scorer's; padded takes teacher_rows_NAME",
    "skyrl_off_policy_correction": "outlier masks of SkyRL are not offered, and its metric names",
}
