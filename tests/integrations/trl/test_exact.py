"""Loss and gradient of a batch are the same however it is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer

from streamadv.errors import SettingError
from streamadv.integrations.trl import QueueGRPOTrainer, queue_for

from .models import Row, batch_of, config, policy, rows, tokenizer

ROWS = rows((6, 9, 4, 7, 12, 5))
CUTS: tuple[list[list[Row]], ...] = ([ROWS[:2], ROWS[2:5], ROWS[5:]], [ROWS[:1], [], ROWS[1:]])
TOLERANCE = 2e-6
LOSSES = ("dapo", "cispo", "vespo", "grpo", "dr_grpo", "sapo", "luspo")


def trainer(folder: Path, **options: Any) -> QueueGRPOTrainer:
    args = config(folder, **options)
    queue = queue_for(args, "redis://localhost:1", run="none")  # is not asked
    made = QueueGRPOTrainer(policy(), args, queue, processing_class=tokenizer())
    made.create_optimizer()
    made.model.train()
    return made


def loss_and_gradient(folder: Path, parts: Sequence[Sequence[Row]], **options: Any) -> tuple[float, Tensor]:
    made = trainer(folder, **options)
    loss = made.training_step(made.model, batch_of(parts))
    return float(loss), torch.cat([weight.grad.flatten() for weight in made.model.parameters()])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_one_and_three_micro_batches_give_the_same_loss_and_gradient(
    loss_type: str, level: str, tmp_path: Path
) -> None:
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    loss, gradient = loss_and_gradient(tmp_path, [ROWS], **options)
    assert gradient.norm() > 1e-3
    for cut in CUTS:
        cut_loss, cut_gradient = loss_and_gradient(tmp_path, cut, **options)
        assert cut_loss == pytest.approx(loss, abs=TOLERANCE)
        torch.testing.assert_close(cut_gradient, gradient, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
def test_the_loss_is_divided_by_the_tokens_that_the_chain_has_left(loss_type: str, tmp_path: Path) -> None:
    """As TRL does with mask_truncated_completions: a row without a token left adds nothing to its divisor."""
    made = trainer(tmp_path, loss_type=loss_type)
    kept, masked = ROWS[:4], [row._replace(mask=torch.zeros_like(row.mask)) for row in ROWS[4:]]
    pushed = batch_of([ROWS]).num_tokens
    batch = replace(batch_of([kept[:2], [*kept[2:], *masked]]), num_tokens=pushed)
    loss = float(made.training_step(made.model, batch))
    inputs = made.inputs_of(batch_of([kept]).micro_batches[0], batch)
    left = sum(int(row.mask.sum()) for row in kept)
    inputs["num_items_in_batch"] = torch.tensor(float(left))
    made.model.zero_grad()
    made.current_gradient_accumulation_steps = 1.0
    native = GRPOTrainer._compute_loss(made, made.model, inputs)
    assert left < pushed
    assert loss == pytest.approx(float(native.detach()), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "bnpo"}, "loss_type is bnpo: it divides by the trainable tokens of each micro-batch"),
        ({"top_entropy_quantile": 0.8}, "top_entropy_quantile is 0.8"),
        ({"entropy_coef": 0.01}, "entropy_coef or use_adaptive_entropy is set"),
        ({"num_iterations": 2}, "num_iterations is 2"),
        ({"steps_per_generation": 2}, "steps_per_generation is 2"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps is 2"),
        ({"max_steps": -1}, "max_steps is -1"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions is True: the queue's chain"),
        ({"scale_rewards": "none"}, "scale_rewards is '?none'?: advantages come from the queue's chain"),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            "multi_objective_aggregation is '?normalize_then_sum'?: .* chain='trl/gdpo'",
        ),
        ({"reward_weights": [1.0, 0.5]}, "reward_weights is set: rewards come with what producers push"),
    ],
)
def test_what_would_not_be_exact_is_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=message):
        trainer(tmp_path, **options)
