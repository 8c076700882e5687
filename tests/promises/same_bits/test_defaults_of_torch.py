"""A training script may have set torch's default dtype or device: batches are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from streamadv.errors import NoBatchError
from streamadv.store.connection import Connection
from streamadv.trainer.microbatch import MicroBatch
from tests.support import compute_all, delivered_batch, group_all, pushed_run

from ..nothing_lost.test_trainer_calls import queue_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_late_columns_are_float32_whatever_torchs_default_is(fake: Connection, dtype: torch.dtype) -> None:
    run = pushed_run(fake, "r", 1)
    wanted = torch.linspace(0.123456, 0.98765, 10, dtype=torch.float32)
    queue = queue_of(fake, late={"entropy": lambda mb: wanted})
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        batch = delivered_batch(queue, run)
    finally:
        torch.set_default_dtype(before)
    (mb,) = batch
    assert mb.entropy.dtype == torch.float32
    assert torch.equal(mb.entropy, wanted)


@pytest.mark.parametrize("device", ["meta"])  # as "cuda": a default device that is not the host
def test_a_default_device_of_torch_changes_nothing(fake: Connection, device: str) -> None:
    gae: Any = {"estimator": "gae"}
    run = pushed_run(fake, "r", 1, values=np.zeros(5), ref_log_probs=np.zeros(5))
    queue = queue_of(fake, chain=gae, pushed=["values"])
    group_all(run)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    compute_all(run)
    torch.set_default_device(device)
    try:
        batch = queue.next_batch(timeout=0)
        assert batch is not None
        (mb,) = batch
        assert mb.advantages.device.type == "cpu"
        assert mb.has["advantages"].device.type == "cpu"
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_plain_batch_under_another_default_dtype(fake: Connection, dtype: torch.dtype) -> None:
    """GRPO without any late column; `torch.set_default_dtype` is what many training scripts begin with."""
    run = pushed_run(fake, "r", 1)
    queue = queue_of(fake)
    group_all(run)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    compute_all(run)  # the worker is another process, with torch's default
    try:
        torch.set_default_dtype(dtype)
        batch = queue.next_batch(timeout=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert batch is not None
    (mb,) = batch
    assert mb.advantages.dtype == torch.float32


def test_a_plain_batch_under_another_default_device(fake: Connection) -> None:
    run = pushed_run(fake, "r", 1)
    queue = queue_of(fake)
    group_all(run)
    with pytest.raises(NoBatchError):
        queue.next_batch(timeout=0)
    compute_all(run)
    try:
        torch.set_default_device("meta")  # as "cuda", where there is none
        batch = queue.next_batch(timeout=0)
    finally:
        torch.set_default_device(None)
    assert batch is not None
    (mb,) = batch
    assert mb.advantages.device.type == "cpu"


def test_a_late_column_may_be_a_distributed_tensor(fake: Connection) -> None:
    # a second of processor time, which no other test of this process needs
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        run = pushed_run(fake, "r", 1)

        def late(mb: MicroBatch) -> Any:
            return DTensor.from_local(torch.ones(mb.num_tokens), mesh, [Replicate()])

        queue = queue_of(fake, late={"entropy": late})
        batch = delivered_batch(queue, run)
        assert torch.equal(next(iter(batch)).entropy, torch.ones(10))
    finally:
        dist.destroy_process_group()
