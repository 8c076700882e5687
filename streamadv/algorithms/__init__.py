"""Pure functions over packed batches: rewards, KL, estimators, normalisation. No Redis in here."""

from .chain import Chain, ChainResult, build_chain, run_chain
from .chain.config import ChainConfig
from .chain.presets import preset_names
from .chain.scope_check import check_estimator
from .chain_metrics import merge_metrics
from .packed import PackedBatch, Steps, expand
from .packing import pack
from .registry import Estimate, estimator, estimator_names
from .running_moments import RunningMoments

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
    "pack",
    "preset_names",
    "run_chain",
]
