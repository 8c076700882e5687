"""Which columns reach which loss: reference, importance weights, first tokens; and a Trainer with its own loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainingArguments

from streamadv.integrations.transformers import QueueTrainer, rows_of
from streamadv.integrations.trl import QueueGRPOTrainer, queue_for

from .models import Row, batch_of, config, micro_batch, policy, rows, tokenizer
from .test_exact import CUTS, ROWS, TOLERANCE

NOWHERE = "redis://localhost:1"


def without(name: str, of: list[Row]) -> list[Row]:
    return [
        row._replace(columns={key: column for key, column in row.columns.items() if key != name})
        for row in of
    ]


def trained(trainer: QueueTrainer, parts: list[list[Row]]) -> tuple[float, Tensor]:
    trainer.create_optimizer()
    trainer.model.train()
    loss = trainer.training_step(trainer.model, batch_of(parts))
    return float(loss), torch.cat([weight.grad.flatten() for weight in trainer.model.parameters()])


def grpo(folder: Path, model: Any = None, **options: Any) -> QueueGRPOTrainer:
    args = config(folder / "out", **options)
    queue = queue_for(args, NOWHERE, run="none")
    return QueueGRPOTrainer(policy() if model is None else model, args, queue, processing_class=tokenizer())


def test_the_reference_policy_is_a_column_or_the_model_that_training_began_with(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path / "model")
    path = str(tmp_path / "model")
    plain, _ = trained(grpo(tmp_path, path), [ROWS])
    with_column, _ = trained(grpo(tmp_path, path, beta=0.5), [ROWS])
    assert with_column > plain + 1e-3  # ref_log_probs of other rows than the model would say
    computed, gradient = trained(grpo(tmp_path, path, beta=0.5), [without("ref_log_probs", ROWS)])
    assert computed == pytest.approx(plain, abs=TOLERANCE)  # the model is still the reference
    cut = [without("ref_log_probs", part) for part in CUTS[0]]
    cut_loss, cut_gradient = trained(grpo(tmp_path, path, beta=0.5), cut)
    assert cut_loss == pytest.approx(computed, abs=TOLERANCE)
    torch.testing.assert_close(cut_gradient, gradient, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo"])
def test_importance_weights_scale_the_loss_of_their_token(loss_type: str, tmp_path: Path) -> None:
    half = [
        row._replace(columns={**row.columns, "rollout_is_weights": torch.full((len(row.ids),), 0.5)})
        for row in ROWS
    ]
    whole, gradient = trained(grpo(tmp_path, loss_type=loss_type), [ROWS])
    halved, half_gradient = trained(grpo(tmp_path, loss_type=loss_type), [half])
    assert halved == pytest.approx(whole / 2, abs=TOLERANCE)
    torch.testing.assert_close(half_gradient, gradient / 2, atol=TOLERANCE, rtol=1e-5)


def test_vespo_gets_importance_weights_as_the_ratio_that_it_reads(tmp_path: Path) -> None:
    weighted = [
        row._replace(columns={**row.columns, "rollout_is_weights": torch.full((len(row.ids),), 0.5)})
        for row in ROWS
    ]
    trainer = grpo(tmp_path, loss_type="vespo")
    inputs = trainer.inputs_of(micro_batch(weighted), batch_of([weighted]))
    mask = inputs["tool_mask"].bool()
    assert set(inputs["importance_sampling_ratio"][mask].tolist()) == {0.5}
    assert set(inputs["importance_sampling_ratio"][~mask].tolist()) <= {1.0}


def test_a_first_token_is_not_trained_on() -> None:
    row = rows([4])[0]
    columns = rows_of(micro_batch([row._replace(mask=torch.ones(4, dtype=torch.bool))]), pad_id=0)
    assert columns["prompt_ids"].tolist() == [[0]]
    assert columns["prompt_mask"].tolist() == [[False]]
    assert columns["response_mask"].tolist() == [[False, True, True, True]]
    assert columns["input_ids"].shape == columns["attention_mask"].shape == (1, 5)


class Mine(QueueTrainer):
    """REINFORCE: the mean over the trainable tokens of the batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        width = inputs["response_ids"].shape[1]
        log_probs = torch.log_softmax(logits[:, -width - 1 : -1].float(), -1)
        chosen = log_probs.gather(-1, inputs["response_ids"][..., None])[..., 0]
        loss: Tensor = -chosen * inputs["advantages"] * inputs["response_mask"]
        return loss.sum() / num_items_in_batch


def test_a_trainer_with_its_own_loss_has_the_same_gradient_however_a_batch_is_cut(tmp_path: Path) -> None:
    def made() -> Mine:
        args = TrainingArguments(
            str(tmp_path), max_steps=1, gradient_accumulation_steps=1, use_cpu=True, report_to=[]
        )
        return Mine(policy(), args, queue=queue_for(args, NOWHERE), processing_class=tokenizer())

    loss, gradient = trained(made(), [ROWS])
    assert gradient.norm() > 1e-3
    for cut in CUTS:
        cut_loss, cut_gradient = trained(made(), cut)
        assert cut_loss == pytest.approx(loss, abs=TOLERANCE)
        torch.testing.assert_close(cut_gradient, gradient, atol=TOLERANCE, rtol=1e-5)
