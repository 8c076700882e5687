"""Pure functions over packed batches: rewards, KL, estimators, normalisation. No Redis in here."""

from .chain import Chain, ChainResult, build_chain, run_chain
from .config import ChainConfig
from .metrics import merge_metrics
from .packed import PackedBatch, Steps, expand, pack
from .presets import preset_names
from .registry import Estimate, estimator, estimator_names
from .running import RunningMoments
from .scope_check import check_estimator

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
