"""Weights and checkpoints travel through a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamadv.demo import weights
from streamadv.demo.learning import new_optimizer
from streamadv.demo.policy import Policy, seeded_policy
from streamadv.demo.settings import EVALUATE_EVERY


def same(one: Policy, other: Policy) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def step(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    policy(torch.tensor([[0, 1, 2]])).square().sum().backward()
    policy.head.bias.grad = torch.ones_like(policy.head.bias)
    optimizer.step()
    optimizer.zero_grad()


def test_newest_version_is_what_was_published_last(tmp_path: Path) -> None:
    assert weights.newest(tmp_path) is None
    for version in (0, 1):
        weights.publish(tmp_path, version, seeded_policy(version))
    assert weights.newest(tmp_path) == 1
    loaded = Policy()
    weights.load(tmp_path, 1, loaded)
    assert same(loaded, seeded_policy(1))


def test_unfinished_files_are_not_versions(tmp_path: Path) -> None:
    (tmp_path / ".weights-000007.npz.123").write_bytes(b"half")
    assert weights.newest(tmp_path) is None


def test_old_versions_go_except_those_to_be_evaluated(tmp_path: Path) -> None:
    policy = seeded_policy(0)
    for version in range(3 * EVALUATE_EVERY):
        weights.publish(tmp_path, version, policy)
    for version in (0, EVALUATE_EVERY, 2 * EVALUATE_EVERY, 3 * EVALUATE_EVERY - 1):
        weights.load(tmp_path, version, policy)
    with pytest.raises(FileNotFoundError):
        weights.load(tmp_path, 1, policy)


def test_checkpoint_restores_weights_optimiser_and_queue_state(tmp_path: Path) -> None:
    policy = seeded_policy(0)
    optimizer = new_optimizer(policy)
    for version in (1, 2):
        step(policy, optimizer)
        weights.publish(tmp_path, version, policy)
        weights.save_checkpoint(tmp_path, version, policy, optimizer, {"version": version})
    step(policy, optimizer)
    weights.publish(tmp_path, 3, policy)

    restored = seeded_policy(9)
    restored_optimizer = new_optimizer(restored)
    assert weights.load_checkpoint(tmp_path, restored, restored_optimizer) == (2, {"version": 2})
    step(restored, restored_optimizer)
    assert same(restored, policy)  # the moments came back too


def test_withdrawn_versions_are_gone(tmp_path: Path) -> None:
    for version in range(4):
        weights.publish(tmp_path, version, seeded_policy(version))
    weights.withdraw_after(tmp_path, 2)
    assert weights.newest(tmp_path) == 2
    weights.publish(tmp_path, 3, seeded_policy(9))
    loaded = Policy()
    weights.load(tmp_path, 3, loaded)
    assert same(loaded, seeded_policy(9))


def test_no_checkpoint(tmp_path: Path) -> None:
    policy = seeded_policy(0)
    assert weights.load_checkpoint(tmp_path, policy, new_optimizer(policy)) is None
