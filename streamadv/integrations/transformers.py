"""transformers' Trainer, fed by the trainer queue: one batch is one optimizer step.

    queue = queue_for(args, "redis://localhost:6379", run="exp1", batch_groups=64, tokens_per_micro_batch=16384)
    trainer = MyTrainer(model, args, queue=queue, weights="weights")   # class MyTrainer(QueueTrainer)
    trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

`QueueTrainer` is a Trainer, and a mixin for its subclasses: `streamadv.integrations.trl` puts it before GRPOTrainer.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from .. import weights as weight_files
from ..errors import SettingError
from ..extras import require
from ..messages import log_fields
from ..trainer import TrainerQueue
from ..trainer.checkpoints import STATE_FILE, read_state, write_state
from ..trainer.microbatch import Batch, MicroBatch, PromptResponse
from . import refuse
from .peft_weights import check_mergeable, merged, under_base_names

require("streamadv.integrations.transformers", "transformers", "accelerate")
import torch  # noqa: E402  after the check, which names the extra
from torch import Tensor  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer import TRAINER_STATE_NAME  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402

logger = logging.getLogger(__name__)

#: Settings of a Trainer that the queue decides, and that change nothing else.
WITHOUT_EFFECT: Final = (
    *("data_seed", "length_column_name", "num_train_epochs", "per_device_train_batch_size"),
    "train_sampling_strategy",
)
#: Of its data loader, which `evaluate` alone has: settings, and those within `accelerator_config`.
OF_LOADER: Final = (
    *("dataloader_drop_last", "dataloader_in_order", "dataloader_multiprocessing_context"),
    *("dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory"),
    *("dataloader_prefetch_factor", "remove_unused_columns"),
)
OF_ACCELERATOR: Final = (
    *("dispatch_batches", "even_batches", "non_blocking", "split_batches", "use_seedable_sampler"),
)
NO_EFFECT: Final = "have no effect"
EVALUATE_ALONE: Final = "hold for evaluate() alone"

#: `publish(version)` makes the weights of a version readable; returns their URI, or None where producers need none.
Publish = Callable[[int], str | None]


def queue_for(
    args: TrainingArguments, connection: Any, run: str | None = None, **options: Any
) -> TrainerQueue:
    """The trainer queue of this process: with rank, world size and device of `args`; the trainer marks and commits.

    options: of `TrainerQueue`, such as `batch_groups`, `tokens_per_micro_batch` and `chain`.

    Raises SettingError for options that are the trainer's, and where nothing would ever be committed.
    """
    refuse("mark" in options, "mark is given: the trainer marks a batch after its step; leave it out")
    check_commit(args, options.get("commit", "manual"))
    own = {"rank": args.process_index, "world_size": args.world_size, "mark": "explicit"}
    return TrainerQueue(connection, run, **{"device": args.device.type, **options, **own})


def check_commit(args: TrainingArguments, commit: str) -> None:
    """Raise SettingError unless either checkpoints commit what was trained, or each batch is committed."""
    saves = args.save_strategy != "no"
    refuse(
        not saves and commit == "manual",
        "save_strategy is no: without checkpoints nothing is committed, and data pile up on the server; set it, or "
        "give queue_for commit='each_batch'",
    )
    refuse(
        saves and commit == "each_batch",
        "commit is 'each_batch': a checkpoint commits what was trained; leave it out, or set save_strategy='no'",
    )


def newest_checkpoint(folder: str | Path) -> str | None:
    """The newest checkpoint in a trainer's output folder that was saved whole; None without one.

    For `train(resume_from_checkpoint=...)`: a first start and a restart are then the same program.
    """
    found = []
    for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        number = path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if number.isdecimal() and all(_is_json(path / name) for name in (STATE_FILE, TRAINER_STATE_NAME)):
            found.append((int(number), str(path)))
    return max(found)[1] if found else None


class QueueTrainer(Trainer):
    """A Trainer that trains on the batches of a trainer queue.

    One batch is one optimizer step, however many micro-batches the queue cuts it into. Override `compute_loss(model,
    inputs, return_outputs=False, num_items_in_batch=None)`: it is called with each micro-batch. `inputs` has what
    `inputs_of` returns, `self.batch` is the batch. Sum the loss over the tokens and divide by `num_items_in_batch`, the
    trainable tokens that the chain has left in the whole batch, divided by the number of ranks: that is the mean over
    the whole batch, since DDP averages over the ranks.

    After the step the batch is marked as trained; a checkpoint holds the queue's state, and is committed when all ranks
    have saved it. Training ends after `max_steps` batches, or with the run.

    Args:
        queue: by `queue_for`, on every rank.
        weights: how producers get the weights, before the first batch and after each. A folder: files of
            `streamadv.weights`; adapters of PEFT are merged into them, under the names of the model without. A
            function: is called on every rank with the version, and returns a URI or None.
        keep_every: of a folder's versions, the multiples of it stay for good, to be evaluated later.
        positional, keywords: of the Trainer, but for `train_dataset`.

    Raises SettingError for arguments under which a batch would not be one step, or not one of the queue.
    """

    loss_is_scaled_for_ga = True  # by `num_items_in_batch`

    def __init__(
        self,
        *positional: Any,
        queue: TrainerQueue,
        weights: str | Path | Publish | None = None,
        keep_every: int | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*positional, **keywords)
        self.queue = queue
        self.batch: Batch | None = None
        """The batch that is trained on, or was last."""
        self._figures: dict[str, list[float]] = defaultdict(list)  # metrics of the batches since the last log
        self._rows = 0  # trained on since `train` was called
        self._weights, self._keep_every = weights, keep_every
        self._has_ended = False
        self._saved: Batch | None = None
        check(self.args, queue)
        warn_without_effect(self.args, evaluates=self.eval_dataset is not None)
        if isinstance(weights, str | Path):
            check_mergeable(self.model)
        self.args.ignore_data_skip = True  # a checkpoint's queue gives what comes after it
        # First: a checkpoint that another callback saves after a step holds a batch that is marked.
        self.callback_handler.callbacks.insert(0, _Marks(self))

    # What a subclass may change

    def inputs_of(self, micro_batch: MicroBatch, batch: Batch) -> dict[str, Any]:
        """What `compute_loss` gets: the columns of `micro_batch.prompt_response`, at least one row.

        A micro-batch without a trainable token becomes a row of padding, which adds nothing to a loss: all ranks run
        the model equally often.
        """
        return dict(rows_of(micro_batch, self.pad_id))

    @property
    def pad_id(self) -> int:
        """The token that pads rows; no model sees it, for the attention mask hides it."""
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        pad_id: int | None = getattr(tokenizer, "pad_token_id", None)
        return 0 if pad_id is None else pad_id

    # What the Trainer calls

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *positional: Any, **keywords: Any
    ) -> Any:
        """As `Trainer.train`. From a checkpoint, every rank loads the queue's state in it first.

        resume_from_checkpoint: its folder, which all ranks see; True takes the newest that was saved whole.

        Raises SettingError if it has no state of a queue.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise SettingError(
                    f"resume_from_checkpoint is True: no checkpoint in {self.args.output_dir} was saved whole; use "
                    "newest_checkpoint(output_dir), which is None then"
                )
        self._rows = 0
        if resume_from_checkpoint:
            self.queue.load_state_dict(read_state(Path(resume_from_checkpoint)))
        return super().train(resume_from_checkpoint or None, *positional, **keywords)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches; nothing is sharded or read ahead, as each rank has a queue of its own."""
        return DataLoader(_Batches(self), batch_size=None)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward pass of each micro-batch. Gradients are exchanged in the last one."""
        batch = self.batch = inputs
        self._rows += batch.num_rows
        for name, value in batch.metrics.items():
            self._figures[name].append(value)
        num_items = self._tokens_left(batch) / self.accelerator.num_processes
        loss = torch.zeros((), device=self.args.device)
        for number, micro_batch in enumerate(batch, 1):
            is_last = number == len(batch)
            self.accelerator.gradient_state._set_sync_gradients(is_last)
            with nullcontext() if is_last else self._without_exchange(model):
                loss += super().training_step(model, self.inputs_of(micro_batch, batch), num_items)
        return loss

    def log(self, logs: dict[str, float], *positional: Any, **keywords: Any) -> None:
        """As `Trainer.log`; with the loss go `batch.metrics` since the last time, each as its name asks for.

        Largest and smallest values, counts since the batch before, what holds now; of all others the mean.
        """
        if "loss" in logs:
            figures = {name: _over_batches(name, values) for name, values in self._figures.items()}
            logs.update({name: value for name, value in figures.items() if name not in logs})
            self._figures.clear()
        if logs.get("train_runtime"):  # transformers counts per_device_train_batch_size rows a step
            logs["train_samples_per_second"] = round(self._rows / logs["train_runtime"], 3)
        super().log(logs, *positional, **keywords)

    def floating_point_ops(self, inputs: Any) -> int:
        """Of a forward and backward pass over a batch."""
        return int(super().floating_point_ops(_tokens(inputs)))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        super()._track_num_input_tokens(_tokens(inputs))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The state is there before the rest, and only a checkpoint that all ranks have saved is committed."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        state = self.queue.state_dict()
        if self.args.process_index == 0:
            write_state(Path(self._get_output_dir(trial=trial)) / name, state)
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        self.queue.commit(state)
        self._saved = self.batch

    # Parts

    def _publish(self, version: int) -> str | None:
        """Make the weights of a version readable; their URI. Every rank calls it: with FSDP all hold a part of them."""
        if self._weights is None:
            return None
        if not isinstance(self._weights, str | Path):
            return self._weights(version)
        model = self.accelerator.unwrap_model(self.model_wrapped)
        with merged(model):
            tensors = self.accelerator.get_state_dict(self.model_wrapped)
            if self.args.process_index != 0:
                return None
            tensors = under_base_names(model, tensors)
            return weight_files.publish(self._weights, version, tensors, keep_every=self._keep_every)

    def _tokens_left(self, batch: Batch) -> Tensor:
        """Tokens of the batch on all ranks that a loss sums over; at least one. A row's first token is none."""
        left = 0
        for micro_batch in batch:
            mask, starts = micro_batch.response_mask.bool(), micro_batch.cu_seqlens[:-1].long()
            left += int(mask.sum() - mask[starts].sum())
        here = torch.tensor(float(left), device=self.args.device)
        total: Tensor = self.accelerator.reduce(here, reduction="sum")
        return total.clamp(min=1.0)

    def _without_exchange(self, model: Any) -> AbstractContextManager[Any]:
        """Gradients stay on their rank, unless accelerate is told to exchange them each time."""
        if self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return nullcontext()
        context: AbstractContextManager[Any] = self.accelerator.no_sync(model)
        return context


def check(args: TrainingArguments, queue: TrainerQueue) -> None:
    """Raise SettingError for arguments under which a batch would not be one step, or not one of the queue."""
    refuse(
        args.gradient_accumulation_steps != 1,
        f"gradient_accumulation_steps is {args.gradient_accumulation_steps}: a batch is one step, and the "
        "queue cuts it; set it to 1, and tokens_per_micro_batch of the queue",
    )
    refuse(args.max_steps <= 0, f"max_steps is {args.max_steps}: needs the number of batches to train on")
    refuse(args.deepspeed, "deepspeed is set: it decides itself when it steps; use DDP or FSDP")
    refuse(
        args.n_gpu > 1,
        f"n_gpu is {args.n_gpu}: start a process for each device, by torchrun or accelerate launch",
    )
    refuse(
        args.save_on_each_node,
        "save_on_each_node is set: the queue's state is rank 0's; save where all nodes can read",
    )
    refuse(
        args.auto_find_batch_size,
        "auto_find_batch_size is set: leave it out, tokens_per_micro_batch of the queue bounds a micro-batch",
    )
    refuse(
        getattr(args, "parallelism_config", None),
        "parallelism_config is set: every rank needs rows of its own; use DDP or FSDP",
    )
    refuse(
        (queue.rank, queue.world_size) != (args.process_index, args.world_size),
        f"queue is of rank {queue.rank} of {queue.world_size}, this process is {args.process_index} of "
        f"{args.world_size}: make the queue by queue_for(args, ...)",
    )


def warn_without_effect(args: TrainingArguments, evaluates: bool) -> None:
    """Name the settings of a Trainer that lose their effect, if they are set. evaluates: there is an `eval_dataset`."""
    warn_of(args, NO_EFFECT, changed(args, WITHOUT_EFFECT))
    loader = [*changed(args, OF_LOADER)]
    if args.use_cpu and "dataloader_pin_memory" in loader:
        loader.remove("dataloader_pin_memory")  # transformers has set it
    own = args.accelerator_config
    loader += [f"accelerator_config.{name}" for name in changed(own, OF_ACCELERATOR)]
    warn_of(args, EVALUATE_ALONE if evaluates else NO_EFFECT, loader)


def changed(settings: Any, names: Iterable[str]) -> dict[str, Any]:
    """Those of the settings of these names that are not the defaults."""
    defaults = {field.name: field.default for field in fields(settings)}
    found = {name: getattr(settings, name) for name in names if name in defaults}
    return {name: value for name, value in found.items() if value != defaults[name]}


def warn_of(args: TrainingArguments, what: str, names: Iterable[str]) -> None:
    """Say in one line what is to be said of these settings."""
    if listed := ", ".join(sorted(names)):
        extra = log_fields("settings_without_effect", role="trainer")
        logger.warning("settings of %s %s: %s", type(args).__name__, what, listed, extra=extra)


def rows_of(micro_batch: MicroBatch, pad_id: int) -> Mapping[str, Tensor]:
    """The rows as prompts and responses: at least one row, and every prompt at least one token wide.

    Columns that some trajectory of the batch lacks are left out: a Trainer takes a column of 0 for one that it can use.
    A first token has nothing before it that a model could predict it from: it is not trained on.
    """
    rows: PromptResponse = micro_batch.prompt_response(pad_id)
    columns = {name: column for name, column in rows.columns.items() if name not in micro_batch.optional}
    if len(rows.rows) == 0:
        for name, column in columns.items():
            width = 2 if name in ("input_ids", "attention_mask", "position_ids") else 1
            filler = pad_id if name.endswith("_ids") and name != "position_ids" else 0
            columns[name] = column.new_full((1, width, *column.shape[2:]), filler)
        for name in ("prompt_mask", "response_attention_mask", "attention_mask"):
            columns[name] = torch.ones_like(columns[name])
        return columns
    without_prompt = ~columns["prompt_mask"].any(1)
    if bool(without_prompt.any()):
        mask = columns["response_mask"].clone()
        mask[:, 0] &= ~without_prompt
        columns["response_mask"] = mask
        if columns["prompt_ids"].shape[1] == 0:
            for name in ("prompt_ids", "input_ids"):
                columns[name] = torch.nn.functional.pad(columns[name], (1, 0), value=pad_id)
            for name in ("prompt_mask", "attention_mask", "position_ids"):
                columns[name] = torch.nn.functional.pad(columns[name], (1, 0))
    return columns


class _Batches(IterableDataset[Batch]):
    """The queue as the Trainer's data. When the run has ended, training ends."""

    def __init__(self, trainer: QueueTrainer) -> None:
        self._trainer = trainer

    def __iter__(self) -> Iterator[Batch]:
        yield from self._trainer.queue
        self._trainer._has_ended = True
        self._trainer.control.should_training_stop = True


class _Marks(TrainerCallback):
    """Tells the queue what the trainer has done."""

    def __init__(self, trainer: QueueTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        queue = self._trainer.queue.open()
        uri = self._trainer._publish(queue.state_dict()["version"])
        if uri is not None:
            queue.open(weights=uri)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        batch = self._trainer.batch
        assert batch is not None
        self._trainer.queue.trained(batch, weights=self._trainer._publish(batch.version + 1))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        if trainer._has_ended and trainer.batch is not trainer._saved and args.save_strategy != "no":
            control.should_save = True  # what was trained since the last checkpoint


def _tokens(batch: Batch) -> dict[str, Tensor]:
    """All tokens of this rank's micro-batches, as the Trainer counts them."""
    ids = [micro_batch.input_ids for micro_batch in batch]
    tokens = torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _over_batches(name: str, values: Sequence[float]) -> float:
    """A figure of several batches, from those of each (docs/reference/batch-metrics.md)."""
    if name.endswith("/max"):
        return max(values)
    if name.endswith("/min"):
        return min(values)
    if name.startswith(("ledger/", "val-core/", "val-aux/")) or name == "critic/kl_coef":
        return values[-1]
    if name.startswith(("groups/", "trajectories/")) and name != "groups/kept_ratio":
        return sum(values)
    if name.startswith("dropped/") and name.endswith("/groups"):
        return sum(values)
    return sum(values) / len(values)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True
