"""verl's asynchronous trainers on a trainer queue: advantages, marks and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from transfer_queue import KVBatchMeta
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerColocateAsync, PPOTrainerSeparateAsync, register_trainer
from verl.workers.utils.padding import response_to_nested

from ...errors import SettingError
from ...trainer.checkpoints import write_state
from .algorithm import log_probs_reader
from .options import options_of
from .rows import as_fields
from .sampler import QueueSampler


class QueuePPOTrainer(PPOTrainer):
    """A trainer of verl that trains on the batches of a trainer queue.

    A batch of the queue is what verl samples: `data.train_batch_size / parameter_sync_step` groups. Advantages are the
    queue's, or verl's own (`advantages` of the options). A step's batches are marked when verl has trained on them, and
    committed with verl's checkpoint, which holds the queue's state in `streamadv.json`.

    Raises SettingError for settings under which that would not hold.
    """

    mode: str
    """Of the trainer of verl that this one extends."""

    def __init__(self, config: DictConfig) -> None:
        self.queue_options = options_of(config, self.mode)
        sampler, agent = config.trainer.v1.sampler, config.actor_rollout_ref.rollout.agent
        with open_dict(config):
            config.trainer.v1.trainer_mode = self.mode  # its settings stay where they are
            if not (sampler.get("custom_sampler") or {}).get("path"):
                sampler.custom_sampler = {
                    "path": f"pkg://{QueueSampler.__module__}",
                    "name": QueueSampler.__name__,
                }
            if self.queue_options.generate and not agent.get("agent_loop_manager_class"):
                agent.agent_loop_manager_class = (
                    "streamadv.integrations.verl.agent_loop.QueueAgentLoopManager"
                )
        super().__init__(config)

    # What verl calls

    def _build_replay_buffer(self) -> QueueSampler:
        sampler = super()._build_replay_buffer()
        if not isinstance(sampler, QueueSampler):
            raise SettingError(
                f"trainer.v1.sampler.custom_sampler is {type(sampler).__name__}, needs a QueueSampler: leave it out"
            )
        return sampler

    def fit(self, agent_loop_manager: Any) -> None:
        """As verl's. Disconnects at the end."""
        try:
            super().fit(agent_loop_manager)
        finally:
            self.replay_buffer.close()

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """As verl's; then the batches of the step are marked, before a checkpoint of it is saved."""
        batch = super().step(metrics, timing_raw)
        self.replay_buffer.trained()
        return batch

    def _fetch_one_gen_batch(self) -> Any:
        """As verl's, with uids that a restart gives again."""
        return self.replay_buffer.name(super()._fetch_one_gen_batch())

    def _add_batch_to_generate(self) -> None:
        self.replay_buffer.fill()

    def _add_async_warmup_batches(self, num_warmup_batches: int | float) -> None:
        """Nothing: the first step submits a whole window."""

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.queue_options.advantages == "verl":
            return super()._compute_advantage(batch, metrics)
        outputs = self.replay_buffer.outputs(batch)
        correction = self.config.algorithm.get("rollout_correction", None)
        if correction is not None and not correction.get("bypass_mode", False):
            corrected = self._correct(batch, correction, metrics)
            if "rollout_is_weights" in outputs and "rollout_is_weights" in corrected:
                raise SettingError(
                    "both algorithm.rollout_correction and the queue's chain make importance weights: use one of them"
                )
            outputs |= corrected
        rows = [dict(zip(outputs, values, strict=True)) for values in zip(*outputs.values(), strict=True)]
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=as_fields(rows))

    def _save_checkpoint(self) -> None:
        """The queue's state is there before the rest, and only a whole checkpoint is committed."""
        state = self.replay_buffer.state()
        write_state(self._checkpoint(), state)
        super()._save_checkpoint()
        self.replay_buffer.queue.commit(state)

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        loaded = None
        if self.global_steps and self.config.trainer.resume_mode == "resume_path":
            loaded = Path(self.config.trainer.resume_from_path)
        elif self.global_steps:
            loaded = self._checkpoint()
        self.replay_buffer.begin(
            self.global_steps,
            loaded,
            needs_log_probs=log_probs_reader(self.config),
            has_rope_channels=hasattr(self.processor, "get_rope_index"),
        )

    # Parts

    def _checkpoint(self) -> Path:
        """The folder of this step's checkpoint."""
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _correct(self, batch: KVBatchMeta, correction: Any, metrics: dict[str, Any]) -> dict[str, list[Any]]:
        """verl's correction for stale rollouts, as `PPOTrainer._compute_advantage` has it."""
        fields = ["response_mask", "rollout_log_probs", "old_log_probs"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        mask = data["response_mask"]
        proto = DataProto(batch=data.to_padded_tensor())
        if "rollout_log_probs" not in proto.batch:
            return {}
        proto, figures = compute_rollout_correction_and_add_to_batch(proto, correction)
        metrics.update(figures)
        made = [name for name in ("response_mask", "rollout_is_weights") if name in proto.batch]
        return {name: list(response_to_nested(proto.batch[name], mask).unbind()) for name in made}


@register_trainer("streamadv_separate_async")
class QueueSeparateAsync(QueuePPOTrainer, PPOTrainerSeparateAsync):
    """verl's `separate_async` on a trainer queue: rollout engines have devices of their own."""

    mode = "separate_async"


@register_trainer("streamadv_colocate_async")
class QueueColocateAsync(QueuePPOTrainer, PPOTrainerColocateAsync):
    """verl's `colocate_async` on a trainer queue: trainer and rollout engines share devices."""

    mode = "colocate_async"
