"""Checkpoints of the demo's trainer."""

from __future__ import annotations

from pathlib import Path

import torch

from streamadv.demo.checkpoints import load_checkpoint, save_checkpoint
from streamadv.demo.learning import new_optimizer
from streamadv.demo.policy import Policy, seeded_policy


def same(one: Policy, other: Policy) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def step(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    policy(torch.tensor([[0, 1, 2]])).square().sum().backward()
    policy.head.bias.grad = torch.ones_like(policy.head.bias)
    optimizer.step()
    optimizer.zero_grad()


def test_checkpoint_restores_weights_optimiser_and_queue_state(tmp_path: Path) -> None:
    policy = seeded_policy(0)
    optimizer = new_optimizer(policy)
    for version in (1, 2):
        step(policy, optimizer)
        save_checkpoint(tmp_path, version, policy, optimizer, {"version": version})
    step(policy, optimizer)

    restored = seeded_policy(9)
    restored_optimizer = new_optimizer(restored)
    assert load_checkpoint(tmp_path, restored, restored_optimizer) == (2, {"version": 2})
    step(restored, restored_optimizer)
    assert same(restored, policy)  # the moments came back too
    assert len(list(tmp_path.iterdir())) == 2


def test_no_checkpoint(tmp_path: Path) -> None:
    policy = seeded_policy(0)
    assert load_checkpoint(tmp_path, policy, new_optimizer(policy)) is None
