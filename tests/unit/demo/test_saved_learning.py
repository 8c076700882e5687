"""What the demo's trainer goes on with."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch

from streamadv.demo.policy import Policy, seeded_policy
from streamadv.demo.trainer import LEARNING, load_learning, new_optimizer, save


def same(one: Policy, other: Policy) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def step(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    policy(torch.tensor([[0, 1, 2]])).square().sum().backward()
    policy.head.bias.grad = torch.ones_like(policy.head.bias)
    optimizer.step()
    optimizer.zero_grad()


def test_weights_and_optimiser_come_back(tmp_path: Path) -> None:
    policy = seeded_policy(0)
    optimizer = new_optimizer(policy)
    for version in (1, 2):
        step(policy, optimizer)
        folder = tmp_path / str(version)
        folder.mkdir()
        queue = SimpleNamespace(checkpoint=lambda path, keep: nullcontext(path))
        save(queue, folder, policy, optimizer)
    step(policy, optimizer)

    restored = seeded_policy(9)
    restored_optimizer = new_optimizer(restored)
    load_learning(tmp_path / "2" / LEARNING, restored, restored_optimizer)
    step(restored, restored_optimizer)
    assert same(restored, policy)  # the moments came back too
