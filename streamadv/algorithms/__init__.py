"""The maths: pure functions over packed batches. No Redis, and nothing of the padded surface.

In reading order:

- `packed` is the batch and what must hold of it, with `packing` (from trajectories to a batch), `segments` (sums and
  moments, normalising and whitening, which tokens count) and `scan` (reverse recurrences, turns). `kernels` are the
  compiled loops on a CPU; the function that calls a kernel has the same in torch, for other devices, beside it.
- The maths by subject: `rewards`, `kl`, `off_policy`, `chain_metrics`.
- `registry` and `estimators` turn rewards into advantages.
- `chain` composes all of it from a configuration.
- `device` chooses where a process computes.
- `arguments` serves `streamadv.padded`: what an argument must be, and whose numbers to reproduce.

Where new things go:

- An estimator: a function in `estimators` with `@estimator(...)`. Users register theirs from outside in the same way
  and test them with `check_estimator`.
- A form of the KL: a name in `kl.KLPenalty` and a branch in `kl.approx_kl`.
- A mask over trajectories: a field of `chain.config.MaskConfig`, read in `chain.samples`. A mask over tokens: a
  function in `off_policy` and a field of `CorrectionConfig`, read in `chain.correction`.
- A reward rule: a field of `RewardConfig`, read in `chain.rewards`.
- Its form on [B, T] tensors, if users know one: a function in `streamadv.padded`.
"""

from .chain import Chain, ChainResult, build_chain, run_chain
from .chain.config import ChainConfig
from .chain.presets import preset_names
from .chain.scope_check import check_estimator
from .chain_metrics import merge_metrics
from .packed import PackedBatch, Steps, expand
from .packing import pack_trajectories
from .registry import Estimate, estimator, estimator_names
from .segments import RunningMoments

__all__ = [
    "Chain",
    "ChainConfig",
    "ChainResult",
    "Estimate",
    "PackedBatch",
    "RunningMoments",
    "Steps",
    "build_chain",
    "check_estimator",
    "estimator",
    "estimator_names",
    "expand",
    "merge_metrics",
    "pack_trajectories",
    "preset_names",
    "run_chain",
]
