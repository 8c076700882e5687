"""GRPOTrainer on batches of a trainer queue: its losses, exact however a batch is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from ...errors import SettingError
from ...trainer import TrainerQueue
from ...trainer.microbatch import Batch, MicroBatch
from .. import refuse
from ..transformers import Publish, QueueTrainer, rows_of
from .config import BY_ROWS, check_config


class QueueGRPOTrainer(QueueTrainer, GRPOTrainer):
    """A GRPOTrainer that trains on the batches of a trainer queue instead of generating them.

    Producers generate, rewards come with what they push, advantages come from the queue's chain. Left to TRL are the
    loss (`loss_type`, `epsilon`, `delta`, `importance_sampling_level`, `beta` ...), optimizer, schedule, precision,
    PEFT, callbacks, logs and checkpoints.

    | TRL's loss reads | it gets |
    |---|---|
    | `advantages` | `advantages` [B, C], times `rollout_is_weights` and `sample_weights` where the chain makes them |
    | `old_per_token_logps` | `old_log_probs`, else `rollout_log_probs`, else what the model says now (ratio 1) |
    | `sampling_per_token_logps` | `rollout_log_probs` |
    | `ref_per_token_logps` (beta above 0) | `ref_log_probs`, else computed with TRL's reference model |
    | `importance_sampling_ratio` (vespo) | `rollout_is_weights`, instead of in the advantages |

    The loss of a batch is the same for any number of micro-batches and ranks: sums over tokens divided by those that
    the chain has left in the whole batch (dapo, cispo, vespo), or over the rows divided by those of the whole batch
    (grpo, dr_grpo, sapo, luspo).

    Args:
        model: as GRPOTrainer has it.
        args: `gradient_accumulation_steps` is 1 and `max_steps` counts batches. What is about generating, rewards and
            advantages has no effect in training.
        queue: by `queue_for`, on every rank.
        weights, keep_every: as QueueTrainer has them.
        reward_funcs: for `evaluate` alone, which generates as TRL does.
        keywords: of GRPOTrainer, but for `train_dataset`, `rollout_func` and `environment_factory`.

    Raises SettingError for a loss without an exact value, and other arguments that cannot hold for a queue.
    """

    def __init__(
        self,
        model: Any,
        args: GRPOConfig,
        queue: TrainerQueue,
        *,
        weights: str | Path | Publish | None = None,
        keep_every: int | None = None,
        reward_funcs: Any = None,
        **keywords: Any,
    ) -> None:
        for name in ("train_dataset", "rollout_func", "environment_factory"):
            refuse(
                keywords.get(name) is not None,
                f"{name} is given: rollouts come from the producers of the run, leave it out",
            )
        check_config(args, evaluates=keywords.get("eval_dataset") is not None)
        refuse(
            args.reward_weights and reward_funcs is None,
            "reward_weights is set: rewards come with what producers push; weight them there, and leave it out",
        )
        super().__init__(
            model=model,
            args=args,
            queue=queue,
            weights=weights,
            keep_every=keep_every,
            reward_funcs=[_no_reward] if reward_funcs is None else reward_funcs,
            train_dataset=Dataset.from_dict({"prompt": [""]}),  # GRPOTrainer wants one
            **keywords,
        )
        refuse(
            self.aux_loss_enabled,
            "router_aux_loss_coef is above 0: the balancing loss of experts depends on how a batch is cut; set it to 0",
        )

    def inputs_of(self, micro_batch: MicroBatch, batch: Batch) -> dict[str, Any]:
        """What TRL's loss reads of a micro-batch, see the class."""
        rows = rows_of(micro_batch, self.pad_id)
        advantages, weights = rows["advantages"], rows.get("rollout_is_weights")
        if "sample_weights" in rows:
            advantages = advantages * rows["sample_weights"]
        inputs: dict[str, Any] = {
            "prompt_ids": rows["prompt_ids"],
            "prompt_mask": rows["prompt_mask"].long(),
            "completion_ids": rows["response_ids"],
            "completion_mask": rows["response_attention_mask"].long(),
            "tool_mask": rows["response_mask"].long(),
            "num_rows_in_batch": batch.num_rows,
        }
        if weights is not None and self.loss_type == "vespo":
            inputs["importance_sampling_ratio"] = torch.where(rows["response_mask"], weights, 1.0)
        elif weights is not None:
            advantages = advantages * weights
        inputs["advantages"] = advantages
        for name, columns in (
            ("old_per_token_logps", ("old_log_probs", "rollout_log_probs")),
            ("sampling_per_token_logps", ("rollout_log_probs",)),
            ("ref_per_token_logps", ("ref_log_probs",)),
        ):
            column = next((rows[column] for column in columns if column in rows), None)
            if column is not None:
                inputs[name] = column
        return inputs

    def _prepare_inputs(self, inputs: Any) -> Any:
        """TRL generates here. What comes from the queue only goes to the device."""
        if isinstance(inputs, dict):
            return Trainer._prepare_inputs(self, inputs)
        return super()._prepare_inputs(inputs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As QueueTrainer's."""
        self._step = 0  # TRL counts micro-batches, and logs the time of a step after so many
        self.current_gradient_accumulation_steps: float = max(1, len(inputs))
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """As TRL's, which reads the tokens of the whole batch from the inputs."""
        if num_items_in_batch is not None:
            tokens = num_items_in_batch * self.accelerator.num_processes
            inputs = {**inputs, "num_items_in_batch": tokens}
        loss: Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if not model.training:
            loss: Tensor = super()._compute_loss(model, inputs)
            return loss
        if self.beta != 0.0 and "ref_per_token_logps" not in inputs:
            inputs["ref_per_token_logps"] = self._ref_log_probs(inputs)
        steps = self.current_gradient_accumulation_steps
        divisor = 1.0
        if self.loss_type in BY_ROWS:
            # TRL's mean over the rows of the micro-batch becomes its share of the batch's.
            rows = len(inputs["completion_ids"]) * self.accelerator.num_processes
            divisor = inputs["num_rows_in_batch"] / rows
        self.current_gradient_accumulation_steps = divisor
        try:
            with _different_rows(self.accelerator):
                loss = super()._compute_loss(model, inputs)
        finally:
            self.current_gradient_accumulation_steps = steps
        return loss

    def _ref_log_probs(self, inputs: dict[str, Any]) -> Tensor:
        """Of the reference model that TRL has: a copy of the model as it began, or the model without its adapter."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        model, without_adapter = self.ref_model, nullcontext()
        if model is None:
            own = self.accelerator.unwrap_model(self.model)
            model, without_adapter = self.model, use_adapter(own, "ref" if "ref" in own.peft_config else None)
        checkpointing = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), checkpointing, without_adapter:
            log_probs: Tensor = self._get_per_token_logps_and_entropies(
                model, ids, mask, inputs["completion_ids"].shape[1]
            )[0]
        return log_probs


@contextmanager
def _different_rows(accelerator: Any) -> Iterator[None]:
    """TRL gathers a figure for each row, to log the smallest and the largest; ranks here differ in their rows."""
    gather = accelerator.gather

    def gather_padded(tensor: Tensor) -> Tensor:
        padded = accelerator.pad_across_processes(tensor, pad_index=float("nan")) if tensor.ndim else tensor
        gathered: Tensor = gather(padded)
        return gathered

    accelerator.gather = gather_padded
    try:
        yield
    finally:
        accelerator.gather = gather


def _no_reward(**_: Any) -> list[float]:
    raise SettingError("evaluate() generates and needs reward_funcs: give them to QueueGRPOTrainer")
