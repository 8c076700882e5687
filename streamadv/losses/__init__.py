"""Losses for a training loop of your own, in plain torch: losses of tokens, and ways to add them up.

Tokens lie packed, [N] with `cu_seqlens`, or padded, [B, T]; all tensors of a call have the shape of `log_probs`. The
functions compute in float32 at least, carry gradients through `log_probs` (or `logits`, `values`) alone, and but for
`clip_cov` and `high_entropy_mask` never wait for a device. Each returns (loss, metrics). loss: of every token, times
`weights` (truncated importance weights such as the column `rollout_is_weights`; None = 1), 0 where `response_mask` is
0, whatever stands there. metrics: verl's names to detached means [] over the call's trainable tokens, 0 without any;
weigh them by tokens to join micro-batches. A mask may hold other numbers than 0 and 1: means weigh by them, as verl's.

Below A = advantages, r = exp(d), d = log_probs - old_log_probs held in -20 .. 20 (as verl; ROLL and TRL do not).
Where a peer divides by a number of its own, docs/reference/losses.md says with which mode of `aggregate`.

In reading order: `sums.py` (what losses share, and their sum), `policy.py` (ratios of tokens and of rows), `terms.py`
(critic, entropy, demonstrations, distillation).
"""

from __future__ import annotations

from .. import extras

extras.require("streamadv.losses", *extras.TO_COMPUTE)

from .policy import (
    cispo,
    clip_cov,
    dppo,
    dro,
    gmpo,
    gspo,
    icepop,
    kl_cov,
    ppo_clip,
    reinforce,
    row_clip,
    sapo,
    topr,
    vespo,
)
from .sums import AGGREGATIONS, Aggregation, Loss, aggregate
from .terms import distill, distill_top_k, entropy, high_entropy_mask, sft, sum_pi_squared, value_clip

__all__ = [
    "AGGREGATIONS",
    "Aggregation",
    "Loss",
    "aggregate",
    "cispo",
    "clip_cov",
    "distill",
    "distill_top_k",
    "dppo",
    "dro",
    "entropy",
    "gmpo",
    "gspo",
    "high_entropy_mask",
    "icepop",
    "kl_cov",
    "ppo_clip",
    "reinforce",
    "row_clip",
    "sapo",
    "sft",
    "sum_pi_squared",
    "topr",
    "value_clip",
    "vespo",
]
