"""Which of streamadv's functions stands for which recorded function, and what is left out, with reasons."""

from __future__ import annotations

from .compare import Function
from .mapping_losses import LOSSES
from .mapping_others import OTHERS
from .mapping_outcomes import OUTCOMES
from .mapping_roll import ROLL
from .mapping_verl import VERL

MAPPING: dict[str, Function] = {**LOSSES, **OTHERS, **OUTCOMES, **ROLL, **VERL}

#: Functions streamadv does not offer, and why.
NOT_IN_CATALOGUE: dict[str, str] = {
    "areal_apply_rejection_sampling": "weights of sequence level are geometric means there whatever the metric",
    "areal_compute_advantages": "a whole pipeline of AReaL's; its parts are offered, no preset",
    "areal_decoupled_ppo_loss": "a loss: losses are the trainer's",
    "areal_normalization": "leave-one-out means over tokens are not offered",
    "openrlhf_advantages": "a whole pipeline of OpenRLHF's; its parts are offered, no preset",
    "skyrl_off_policy_correction": "outlier masks of SkyRL are not offered, and its metric names",
}
