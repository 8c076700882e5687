"""Chain configurations by name.

Every registered estimator is a preset under its name, with its defaults. `verl/<name>`, `roll/<name>` and `trl/<name>`
reproduce those libraries, order of KL and correction included (docs/reference/estimators.md has settings and
deviations); `verl-2026-01/<name>` is verl of January 2026 where its numbers were others.
"""

from __future__ import annotations

from typing import Any, Final

from ...errors import SettingError
from ...messages import brief, did_you_mean
from ...plugins import REMEDY
from ..registry import estimator_names, is_estimator
from .config import ChainConfig, parse_config

_ROLL_RETURN: Final[dict[str, Any]] = {"estimator": "reinforce", "gamma": 1.0, "mask_aware": False}
_BY_GROUP: Final[dict[str, Any]] = {"mean": "group", "std": "group", "statistics": "row"}

_PRESETS: Final[dict[str, dict[str, Any]]] = {
    "dr_grpo": {"norm_by_std": False},
    "ppo": {"estimator": "gae", "whiten_advantages": True},
    "roll/agentic_reinforce": {"estimator": "agentic_reinforce"},
    "roll/gae": {"estimator": "gae", "gamma": 1.0, "lam": 0.95, "mask_aware": False},
    "roll/gigpo": {"estimator": "gigpo", "gamma": 0.95, "statistics": "step", "order": "roll"},
    "roll/grpo": {**_ROLL_RETURN, "reward": _BY_GROUP},
    "roll/reinforce": _ROLL_RETURN,
    "roll/step_reinforce": {"estimator": "step_reinforce", "gamma": 0.95, "order": "roll"},
    "trl/gdpo": {"estimator": "gdpo", "epsilon": 1e-4},
    "trl/grpo": {"epsilon": 1e-4},
    "trl/grpo_batch": {"norm_by_std": False, "reward": {"std": "batch", "epsilon": 1e-4}},
    "trl/grpo_none": {"norm_by_std": False},
    "trl/rloo": {"estimator": "rloo"},
    "trl/rloo_normalized": {"estimator": "rloo_normalized"},
    "verl/dr_grpo": {"norm_by_std": False, "singleton": "raw"},
    "verl/gae": {"estimator": "gae", "gamma": 1.0, "lam": 1.0, "whiten_advantages": True},
    "verl/gdpo": {"estimator": "gdpo", "epsilon": 1e-6, "singleton": "raw", "whiten_over": "tokens"},
    "verl/gpg": {"estimator": "gpg", "counted": "rewards", "singleton": "raw"},
    "verl/grpo": {"singleton": "raw"},
    "verl/grpo_passk": {"estimator": "grpo_passk"},
    "verl/grpo_vectorized": {"singleton": "raw"},
    "verl/opo": {"estimator": "opo", "singleton": "raw"},
    "verl/optimal_token_baseline": {"estimator": "optimal_token_baseline", "compare": "columns"},
    "verl/reinforce_plus_plus": {"estimator": "reinforce_plus_plus"},
    "verl/reinforce_plus_plus_baseline": {"estimator": "reinforce_plus_plus_baseline", "singleton": "raw"},
    "verl/remax": {"estimator": "remax_to_go"},
    "verl/rloo": {"estimator": "rloo", "singleton": "raw"},
    "verl/rloo_vectorized": {"estimator": "rloo"},
    "verl/tir_optimal_token_baseline": {"estimator": "optimal_token_baseline"},
    "verl-2026-01/grpo_vectorized": {"least_std": 1e-3, "singleton": "raw"},
    "verl-2026-01/optimal_token_baseline": {
        "estimator": "optimal_token_baseline",
        "compare": "columns",
        "handle_zero_tail": False,
    },
    "verl-2026-01/reinforce_plus_plus": {"estimator": "reinforce_plus_plus", "reset_at_observations": True},
}
#: The steps of `verl/<name>` stand in verl's order.
PRESETS: Final[dict[str, dict[str, Any]]] = {
    name: {**config, "order": "verl"} if name.startswith("verl") else config
    for name, config in _PRESETS.items()
}


def preset(name: str, **changes: Any) -> ChainConfig:
    """The configuration of a preset, with fields of the chain, or options of its estimator, set anew.

    Raises SettingError, which names the nearest or lists all, for an unknown one.
    """
    if name in PRESETS:
        return parse_config({**PRESETS[name], **changes})
    if is_estimator(name):
        return parse_config({"estimator": name, **changes})
    names = preset_names()
    nearest = did_you_mean(str(name), names) or f": choose one of {', '.join(names)}."
    raise SettingError(f"preset {brief(name)} is unknown{nearest} If it is an estimator of yours, {REMEDY}")


def preset_names() -> list[str]:
    """All preset names, sorted."""
    return sorted({*PRESETS, *estimator_names()})
