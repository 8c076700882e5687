"""The policy, its optimiser and one update, in plain torch. Only the losses and the columns are streamadv's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from policy import log_probs_and_entropy, new_policy
from torch import Tensor

from streamadv import losses

CORRECTIONS = ("none", "tis", "clip")


class Learner:
    """correction: of what older policies have sampled. lr: reached after warm_up updates. entropy: its coefficient."""

    def __init__(self, correction: str, *, lr: float, warm_up: int, entropy: float) -> None:
        self.policy = new_policy()
        self.correction, self.entropy = correction, entropy
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr, betas=(0.9, 0.99), weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / warm_up)
        )

    def loss(self, log_probs: Tensor, rows: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Of each token, [B, T]."""
        columns = (rows.rollout_log_probs, rows.advantages, rows.response_mask)
        if self.correction == "clip":
            return losses.ppo_clip(log_probs, *columns)
        if self.correction == "tis":  # truncated importance sampling
            weights = (log_probs.detach() - rows.rollout_log_probs).exp().clamp(max=2.0)
            return losses.reinforce(log_probs, *columns, weights=weights)
        return losses.reinforce(log_probs, *columns)

    def update(self, micro_batches: Iterable[Any], num_tokens: int) -> dict[str, float]:
        """One step of the optimiser; means over the batch's tokens. kl: from the policies that sampled to this one."""
        means = {"kl": 0.0, "clipped": 0.0, "entropy": 0.0}
        for micro_batch in micro_batches:
            rows = micro_batch.padded()
            mask = rows.response_mask
            log_probs, entropy = log_probs_and_entropy(self.policy, rows.input_ids)
            loss, metrics = self.loss(log_probs, rows)
            ((loss - self.entropy * entropy * mask).sum() / num_tokens).backward()
            log_ratio = (log_probs - rows.rollout_log_probs).detach()[mask]
            means["kl"] += (log_ratio.exp() - 1 - log_ratio).sum().item() / num_tokens
            means["entropy"] += entropy.detach()[mask].sum().item() / num_tokens
            means["clipped"] += float(metrics.get("actor/pg_clipfrac", 0.0)) * len(log_ratio) / num_tokens
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return means

    def save(self, file: Path, **more: Any) -> None:
        """Write what `load` goes on from. more: plain values to be saved with it."""
        state = {name: getattr(self, name).state_dict() for name in ("policy", "optimizer", "schedule")}
        torch.save(state | more, file)

    def load(self, file: Path) -> dict[str, Any]:
        """Go on from there; returns what was saved with it."""
        saved: dict[str, Any] = torch.load(file, weights_only=True)
        for name in ("policy", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(saved.pop(name))
        return saved
