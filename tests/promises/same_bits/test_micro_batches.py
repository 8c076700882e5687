"""However a batch is cut into micro-batches, and in whatever layout they are run: one loss, one gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

import streamadv as sa
from streamadv.losses import AGGREGATIONS, Aggregation, aggregate, cispo, gspo, ppo_clip, reinforce
from streamadv.trainer.microbatch import Columns
from tests.support import OneClient, delivered_batch, join, producing, trajectory

#: Tokens of the rows of two groups of three: 45 in all, so 20 to a micro-batch make three.
LENGTHS: Final = ((4, 9, 6), (12, 3, 11))
BUDGET: Final = 20
VOCABULARY: Final = 20
CHAIN: Final = {"estimator": "grpo", "correction": {"level": "token", "mode": "truncate", "upper": 1.2}}
LOSSES: Final[dict[str, Callable[..., Any]]] = {
    "ppo_clip": ppo_clip,
    "gspo": partial(gspo, clip_low=0.2, clip_high=0.2),
    "cispo": cispo,
    "reinforce": reinforce,
}


@cache
def batch_of(budget: int | None, keep_groups: bool = False) -> sa.Batch:
    fake = OneClient()
    rng = np.random.default_rng(0)
    with producing(fake, "r") as producer:
        for number, lengths in enumerate(LENGTHS):
            for index, tokens in enumerate(lengths):
                mask = rng.random(tokens) < 0.7  # tool output in the middle
                mask[0], mask[-1] = False, True
                columns = {
                    "input_ids": rng.integers(0, VOCABULARY, tokens),
                    "response_mask": mask,
                    "rollout_log_probs": rng.uniform(-4, -2, tokens),
                }
                reward = float(rng.normal())
                producer.push([trajectory(f"g{number}", index, 3, reward=reward, **columns)])
    queue = sa.TrainerQueue(
        fake,
        "r",
        batch_groups=2,
        prefetch=0,
        tokens_per_micro_batch=budget,
        keep_groups=keep_groups,
        chain=CHAIN,
        late={"old_log_probs": lambda mb: mb.rollout_log_probs + 0.1 * torch.sin(mb.input_ids.float())},
    )
    batch = delivered_batch(queue, join(fake, "r"))
    return batch


def total(
    batch: sa.Batch, loss: Callable[..., Any], mode: Aggregation, layout: Callable[[sa.MicroBatch], Columns]
) -> tuple[float, Tensor]:
    """Loss and gradient of a batch: micro-batches one after the other, in this layout."""
    logits = torch.linspace(-1, 1, VOCABULARY).requires_grad_()
    value = 0.0
    for mb in batch:
        rows = layout(mb)
        ids = rows.response_ids if "response_ids" in rows else rows.input_ids
        packed = {"cu_seqlens": mb.cu_seqlens} if rows is mb else {}
        tokens, _ = loss(
            logits.log_softmax(0)[ids],
            rows.old_log_probs,
            rows.advantages,
            rows.response_mask,
            weights=rows.rollout_is_weights,
            **(packed if isinstance(loss, partial) else {}),
        )
        counts = {"num_tokens": batch.num_tokens, "num_rows": batch.num_rows, "loss_scale_factor": 12}
        part = aggregate(tokens, rows.response_mask, mode, **packed, **counts)  # type: ignore[arg-type]
        part.backward()
        value += float(part.detach())
    assert logits.grad is not None
    return value, logits.grad


LAYOUTS: Final[dict[str, Callable[[sa.MicroBatch], Columns]]] = {
    "packed": lambda mb: mb,
    "padded": lambda mb: mb.padded(),
    "prompt and response": lambda mb: mb.prompt_response(),
}


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_one_loss_and_one_gradient(name: str, mode: Aggregation) -> None:
    whole = batch_of(None)
    assert len(whole) == 1
    expected, gradient = total(whole, LOSSES[name], mode, LAYOUTS["packed"])
    assert gradient.abs().max() > 1e-3
    for batch in (whole, batch_of(BUDGET), batch_of(BUDGET, keep_groups=True)):
        for layout in LAYOUTS.values():
            value, own_gradient = total(batch, LOSSES[name], mode, layout)
            assert value == pytest.approx(expected, rel=1e-5, abs=2e-6)
            torch.testing.assert_close(own_gradient, gradient, rtol=1e-5, atol=2e-6)


def test_the_cuts_differ() -> None:
    assert [len(batch_of(BUDGET, keep)) for keep in (False, True)] == [3, 3]
    cuts = [
        [[each.rollout_index for each in mb.references] for mb in batch_of(BUDGET, keep)]
        for keep in (False, True)
    ]
    assert cuts[0] != cuts[1]
