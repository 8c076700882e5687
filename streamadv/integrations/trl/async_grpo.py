"""AsyncGRPOTrainer on a trainer queue: a rollout worker that hands over rows, and counts those that were trained on.

TRL makes micro-batches of its own and reads ahead, so a step may end in the middle of a batch. So rows are counted, in
their order: a checkpoint holds the queue's state, and how many rows of the next batch are in the weights.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from ...errors import RunEndedError, SettingError
from ...trainer import TrainerQueue
from ...trainer.checkpoints import read_state, write_state
from ...trainer.microbatch import Batch
from .. import refuse
from ..transformers import NO_EFFECT, changed, check_commit, warn_of

#: What producers, the queue and its worker have taken over, and what TRL's own worker alone reads.
WITHOUT_EFFECT: Final = (
    *("chat_template_kwargs", "fork_threshold_tokens", "heartbeat_stale_after_s", "log_completions"),
    *("max_completion_length", "max_inflight_tasks", "max_staleness", "max_tool_calling_iterations", "min_p"),
    *("num_completions_to_print", "queue_maxsize", "repetition_penalty", "request_timeout", "top_k", "top_p"),
)
#: In the state file: rows of the next batch that are in the weights, and the id of that batch.
ROWS: Final = "trl_rows"


class QueueRolloutWorker:
    """Rows of a trainer queue as the samples of AsyncGRPOTrainer: its `rollout_worker`.

    One thread reads batches and puts their rows into `rollout_buffer`, in order. `trained` says how many of them TRL
    has trained on; a batch whose last row is among them is marked.

    Args:
        args: of the trainer.
        connection, run: of the queue.
        options: of `TrainerQueue`. `prefetch` has to cover the rows that TRL reads ahead; by default it does if a batch
            has `num_generations` rows a group.
    """

    def __init__(
        self, args: AsyncGRPOConfig, connection: Any, run: str | None = None, **options: Any
    ) -> None:
        check_commit(args, "manual")
        groups = options.get("batch_groups", 64)
        ahead = (args.gradient_accumulation_steps + 1) * args.per_device_train_batch_size * args.world_size
        options.setdefault("prefetch", math.ceil(ahead / (groups * args.num_generations)) + 1)
        self.queue = TrainerQueue(
            connection, run, **{**options, "rank": 0, "world_size": 1, "mark": "explicit", "commit": "manual"}
        )
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(ahead)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._skip = (0, "")  # rows of the first batch that are in the weights, and its id
        # batches handed over, and their rows left to train on
        self._untrained: deque[tuple[Batch, int]] = deque()
        self._lock = threading.Lock()
        self._version = 0  # as TRL counts
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._groups: dict[str, int] = {}
        self._thread = threading.Thread(target=self._read, name="streamadv-rows", daemon=True)

    # What TRL calls

    def start(self) -> None:
        """Begin to hand over rows."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and disconnect. Rows that were not trained on come again."""
        self._stop.set()
        self.queue.close()

    def update_model_version(self, model_version: int) -> None:
        """TRL's count of weight syncs: samples carry it, so that TRL drops none. The queue bounds staleness."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the thread. TRL asks when it has waited for 5 s; the queue says itself what it waits for."""
        if self._error is not None:
            raise self._error

    # What the trainer says

    def trained(self, rows: int) -> None:
        """So many more rows are in the weights: mark the batches that are whole now."""
        while rows:
            with self._lock:
                batch, left = self._untrained[0]
                if rows < left:
                    self._untrained[0] = (batch, left - rows)
                    return
                self._untrained.popleft()
            rows -= left
            self.queue.trained(batch)

    def state_dict(self) -> dict[str, Any]:
        """The queue's state, and what of the next batch is in the weights."""
        state = self.queue.state_dict()
        with self._lock:
            if self._untrained:
                batch, left = self._untrained[0]
                state[ROWS] = [len(_rows(batch)) - left, batch.id]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        rows, batch_id = state.get(ROWS, (0, ""))
        self._skip = (int(rows), str(batch_id))
        self.queue.load_state_dict(state)

    # The thread

    def _read(self) -> None:
        try:
            for batch in self.queue:
                for name, value in batch.metrics.items():
                    self.metrics_queue.put({name: value})
                self._hand_over(batch)
                if self._stop.is_set():
                    return
            raise RunEndedError(
                f"run of {self.queue!r} has ended: TRL waits for a whole micro-batch, rows after the last one are not "
                "trained on; set max_steps to end before"
            )
        except BaseException as error:  # TRL's thread raises it, by `check_health`
            if not self._stop.is_set():
                self._error = error

    def _hand_over(self, batch: Batch) -> None:
        samples = _rows(batch)
        skipped = self._skip[0] if self._skip[1] == batch.id else 0
        self._skip = (0, "")
        with self._lock:
            self._untrained.append((batch, len(samples) - skipped))
        for group_id, sample in samples[skipped:]:
            number = self._groups.setdefault(group_id, len(self._groups))
            made = RolloutSample(
                prompt=[], completion=[], model_version=self._version, group_id=number, **sample
            )
            while not self._stop.is_set():
                try:
                    self.rollout_buffer.put(made, timeout=0.5)
                    break
                except queue.Full:
                    continue


class QueueAsyncGRPOTrainer(AsyncGRPOTrainer):
    """An AsyncGRPOTrainer whose samples come from a `QueueRolloutWorker`, with its state in every checkpoint.

    worker: of rank 0; the other ranks give None, as their samples come from rank 0.
    """

    def __init__(
        self, model: str, args: AsyncGRPOConfig, worker: QueueRolloutWorker | None, **keywords: Any
    ) -> None:
        refuse(
            args.token_budget is None or args.token_budget > 0,
            f"token_budget is {args.token_budget}: TRL drops longer rows unseen; set it to 0",
        )
        refuse(args.max_steps <= 0, f"max_steps is {args.max_steps}: needs the number of steps")
        warn_of(args, NO_EFFECT, changed(args, WITHOUT_EFFECT))
        args.max_staleness = 1 << 30  # the queue drops what is stale, whole groups, before it is handed over
        super().__init__(model=model, args=args, rollout_worker=worker, **keywords)
        self.args.ignore_data_skip = True
        self._worker = worker
        self.callback_handler.callbacks.insert(0, _CountRows(self))  # before one that saves a checkpoint

    def train(self, resume_from_checkpoint: str | None = None, *positional: Any, **keywords: Any) -> Any:
        """As `Trainer.train`; from a checkpoint rank 0 loads the queue's state first."""
        if resume_from_checkpoint and self._worker is not None:
            self._worker.load_state_dict(read_state(Path(resume_from_checkpoint)))
        return super().train(resume_from_checkpoint, *positional, **keywords)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        state: dict[str, Any] = {}
        if self._worker is not None:
            state = self._worker.state_dict()
            write_state(folder, state)
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self._worker is not None:
            self._worker.queue.commit(state)


class _CountRows(TrainerCallback):
    """Tells the worker how many rows a step had: TRL has counted them for its log."""

    def __init__(self, trainer: QueueAsyncGRPOTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer._worker is not None:
            self._trainer._worker.trained(round(self._trainer._step_samples))


def _rows(batch: Batch) -> list[tuple[str, dict[str, Any]]]:
    """The rows with a trainable token: id of the group, and fields of a sample."""
    rows = []
    for mb in batch:
        names = ("old_log_probs", "rollout_log_probs")
        name = next((name for name in names if name in mb and name not in mb.optional), None)
        if name is None:
            raise SettingError(
                "AsyncGRPOTrainer needs rollout_log_probs: push them, or give old_log_probs as late"
            )
        weights = mb.columns.get("rollout_is_weights")
        bounds = mb.cu_seqlens.tolist()
        for reference, start, stop in zip(mb.references, bounds[:-1], bounds[1:], strict=True):
            mask = mb.response_mask[start:stop].cpu().numpy()
            if not mask.any():
                continue
            advantages = mb.advantages[start:stop].cpu().numpy()
            if weights is not None:
                advantages = advantages * weights[start:stop].cpu().numpy()
            advantages = advantages[mask]
            if np.ptp(advantages) > 1e-6:
                raise SettingError(
                    f"group {reference.group_id}, rollout {reference.rollout_index}: its tokens have different "
                    "advantages or weights, AsyncGRPOTrainer takes one for a row; use QueueGRPOTrainer, or another "
                    "chain"
                )
            sample = {
                "input_ids": mb.input_ids[start:stop].cpu().numpy(),
                "completion_mask": mask.astype(np.int64),
                "old_log_probs": mb.columns[name][start:stop].cpu().numpy(),
                "advantage": float(advantages[0]),
                "metrics": {} if reference.reward is None else {"reward": float(reference.reward)},
            }
            rows.append((reference.group_id, sample))
    return rows
