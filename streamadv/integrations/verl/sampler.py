"""verl's custom sampler: batches of the trainer queue, put into TransferQueue."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

from ... import doors
from ...errors import NoBatchError, RunEndedError, SettingError, StreamadvError
from ...messages import log_fields
from ...run.run import find_run
from ...status.read import read_status
from ...store.connection import Connection
from ...trainer import TrainerQueue
from ...trainer.checkpoints import read_state, write_state
from ...trainer.microbatch import Batch
from .algorithm import WHERE
from .options import Options
from .rows import as_fields, rows_of

logger = logging.getLogger(__name__)

TRAIN: Final = "train"
#: Name of the order of verl's data loader before any checkpoint.
BEGINNING: Final = "verl"
#: For a checkpoint without the queue's state.
REMEDY: Final = "or set trainer.resume_mode=disable and another run"
#: After this long without a new group, prompts are submitted in the place of those whose groups were dropped.
REFILL_S: Final = 5.0


class QueueSampler(ReplayBufferAsync):
    """Samples batches of a trainer queue. Validation stays with verl.

    Version k of the run is what the weights are after k batches; verl counts weight syncs. So the run's version is
    `global_steps` times `parameter_sync_step` at every checkpoint: the invariant of `begin`.

    Between two weight syncs several batches are sampled; `trained` marks them together, in order.
    """

    def __init__(
        self,
        trainer_mode: str,
        trainer_config: Any,
        max_off_policy_threshold: int | None,
        max_off_policy_strategy: str,
        sampler_kwargs: Any,
        refill_fn: Callable[[int], int] | None = None,
        **others: Any,
    ) -> None:
        options = getattr(getattr(refill_fn, "__self__", None), "queue_options", None)
        if not isinstance(options, Options):
            raise SettingError(
                f"{type(self).__name__} needs a trainer that marks and commits: set trainer.v1.trainer_mode to "
                "streamadv_separate_async or streamadv_colocate_async"
            )
        super().__init__(
            trainer_mode,
            trainer_config,
            max_off_policy_threshold,
            max_off_policy_strategy,
            sampler_kwargs,
            refill_fn=refill_fn,
            **others,
        )
        self.options = options
        self._connection = Connection(options.url)
        self.queue = TrainerQueue(self._connection, options.run, mark="explicit", **options.queue)
        self._needs_log_probs, self._has_rope_channels = "", False
        self._order, self._fetched = BEGINNING, 0  # of verl's data loader, and prompts it has given
        self._unmarked: list[Batch] = []
        self._outputs: dict[str, Mapping[str, Tensor]] = {}  # of the rows of the last batch, by key

    # What verl calls

    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        """The next batch, its rows in TransferQueue, and figures to log. `batch_size` is of validation alone.

        Raises RunEndedError when the run has ended.
        """
        if partition_id != TRAIN:
            sampled: tuple[KVBatchMeta, dict[str, Any]] = super().sample(
                global_steps, partition_id, batch_size
            )
            return sampled
        batch = self._next_batch()
        self._unmarked.append(batch)
        rows = rows_of(batch, global_steps, self.options.updates_per_sync, self._has_rope_channels)
        if not rows:
            raise SettingError(
                f"batch {batch.version} has no trainable token: see `response_mask` of what is pushed"
            )
        if self._needs_log_probs and "rollout_log_probs" not in rows[0].fields:
            raise SettingError(
                f"batch {batch.version} has trajectories without rollout_log_probs, which {self._needs_log_probs} "
                "reads: push them, or leave it out"
            )
        self._outputs = {row.key: row.outputs for row in rows}
        keys, tags = [row.key for row in rows], [dict(row.tag) for row in rows]
        tq.kv_batch_put(
            keys=keys, partition_id=TRAIN, fields=as_fields([row.fields for row in rows]), tags=tags
        )
        return KVBatchMeta(partition_id=TRAIN, keys=keys, tags=tags), dict(batch.metrics)

    # What the trainer calls

    def begin(
        self,
        global_steps: int,
        checkpoint: Path | None,
        *,
        needs_log_probs: str = "",
        has_rope_channels: bool = False,
    ) -> None:
        """Take the run, going on from a checkpoint if there is one. Raises SettingError where versions do not fit.

        needs_log_probs: the setting by which verl reads rollout_log_probs. has_rope_channels: see `rows_of`.
        """
        self._needs_log_probs, self._has_rope_channels = needs_log_probs, has_rope_channels
        if checkpoint is not None:
            state = read_state(checkpoint, REMEDY)
            self._resume_order(checkpoint, state)
            self.queue.load_state_dict(state)
        # Rows that verl has saved: the queue gives them again, or they are trained on.
        saved = [key for key, tag in _keys().items() if not tag.get("is_prompt", False)]
        if saved:
            tq.kv_clear(keys=saved, partition_id=TRAIN)
        self.queue.open()
        version, expected = self.queue.state_dict()["version"], global_steps * self.options.updates_per_sync
        if version != expected:
            raise SettingError(
                f"run {self.options.run} is at version {version}, verl at step {global_steps}, which is version "
                f"{expected}: resume from the checkpoint that belongs to it, or give another {WHERE}.run"
            )

    def state(self) -> dict[str, Any]:
        """What belongs into verl's checkpoint: the queue's state, and where the data loader is."""
        return {**self.queue.state_dict(), "verl": {"order": self._order, "fetched": self._fetched}}

    def _resume_order(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Go on where the data loader was. After an older checkpoint what has ended since is played again."""
        known, committed = state.get("verl", {}), 0
        with suppress(StreamadvError):  # the server may have lost the run
            committed = read_status(find_run(self._connection, self.options.run)).trainer.committed
        self._order, self._fetched = known.get("order", ""), known.get("fetched", 0)
        if committed > state["version"] or not self._order:
            self._order = doors.random_bytes(4).hex()
            write_state(checkpoint, {**state, "verl": {"order": self._order, "fetched": self._fetched}})

    def name(self, prompts: TensorDict) -> TensorDict:
        """Give prompts that the data loader has given their uids: place in its order, and checksum of the prompt.

        A prompt that is given again after a restart is the same group, which is played on, or was played already.
        """
        texts = [repr(raw).encode() for raw in prompts["raw_prompt"]]
        places = range(self._fetched, self._fetched + len(texts))
        self._fetched += len(texts)
        uids = [
            f"{self._order}-{place}-{zlib.crc32(text):08x}" for place, text in zip(places, texts, strict=True)
        ]
        prompts["uid"] = NonTensorStack(*uids)
        return prompts

    def fill(self) -> None:
        """Submit prompts until a window of them is in play or waits for the trainer."""
        if not self.options.generate or self.refill_fn is None:
            return
        not_admitted = sum(tag.get("status") == "pending" for tag in _keys().values())
        ahead = read_status(find_run(self._connection, self.options.run)).admission.groups_ahead
        sampled = sum(len({reference.group_id for reference in batch.references}) for batch in self._unmarked)
        missing = self.options.window - not_admitted - (ahead - sampled)
        if missing > 0:
            self.refill_fn(missing)

    def outputs(self, batch: KVBatchMeta) -> dict[str, list[Tensor]]:
        """What the chain has computed for these rows, by name; 0 for those that verl has added as padding."""
        made: dict[str, list[Tensor]] = {name: [] for name in next(iter(self._outputs.values()))}
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            for name, values in made.items():
                padding = tag.get("is_padding", False)
                values.append(torch.zeros(tag["response_len"]) if padding else self._outputs[key][name])
        return made

    def trained(self) -> None:
        """Mark the batches that were sampled as trained."""
        for batch in self._unmarked:
            self.queue.trained(batch)
        self._unmarked.clear()

    def close(self) -> None:
        """Disconnect. Batches that were sampled and not marked come again."""
        self.queue.close()
        self._connection.close()

    def _next_batch(self) -> Batch:
        while True:
            try:
                batch = self.queue.next_batch(REFILL_S if self.options.generate else None)
            except NoBatchError as error:
                logger.info("%s", error, extra=log_fields("no_batch", run=self.options.run, role="verl"))
                self.fill()
                continue
            if batch is None:
                raise RunEndedError(
                    f"run {self.options.run} has ended after {self.queue.state_dict()['version']} batches, verl wants "
                    "more: set trainer.total_training_steps, and begin again from its last checkpoint"
                )
            return batch


def _keys() -> dict[str, dict[str, Any]]:
    """Keys of the training partition and their tags."""
    keys: dict[str, dict[str, Any]] = (tq.kv_list(TRAIN) or {}).get(TRAIN, {})
    return keys
