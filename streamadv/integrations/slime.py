"""slime's and miles' trainers on the batches of a trainer queue. Needs nothing of either but what calls it.

    --rollout-function-path streamadv.integrations.slime.rollout
    --data-source-path streamadv.integrations.slime.QueueDataSource
    --custom-reward-post-process-path streamadv.integrations.slime.advantages
    --advantage-estimator grpo --global-batch-size <rollout_batch_size x n_samples_per_prompt>

Rollout k is batch k: `rollout` gives its rows as samples, with the advantages of the queue's chain. The data source is
saved behind the model: it writes the queue's state beside the checkpoint and commits. Producers play elsewhere, with
slime's engines behind its router or any others; `record` makes the arguments of a push of a sample.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from ..errors import SettingError, TrajectoryError
from ..messages import brief, log_fields
from ..settings import redis_url, run_name
from ..trainer import TrainerQueue
from ..trainer.checkpoints import read_state, write_state
from ..trainer.microbatch import Batch, MicroBatch
from . import ROUTED_EXPERTS, columns_of, refuse, trained_rows

__all__ = ["QueueDataSource", "advantages", "record", "rollout"]

logger = logging.getLogger(__name__)

#: JSON with options of `TrainerQueue`, such as {"chain": "rloo", "max_staleness": 2}.
OPTIONS: Final = "STREAMADV_SLIME_OPTIONS"
#: Options that the arguments of slime decide.
OWN: Final = ("rank", "world_size", "batch_groups", "mark", "commit", "prefetch")
#: slime asks for so many rollouts beyond the one that it trains on.
AHEAD: Final = 2
#: Of a sample's metadata: its advantage.
ADVANTAGE: Final = "streamadv_advantage"
_STATUS: Final = ("completed", "truncated")


class QueueDataSource:
    """The data source: it holds the queue. Its samples come from `rollout`, its state is the queue's.

    STREAMADV_REDIS_URL and STREAMADV_RUN say which run; STREAMADV_SLIME_OPTIONS has further options of `TrainerQueue`.

    Raises SettingError for arguments under which a rollout would not be one step, or not one of the queue.
    """

    def __init__(self, args: Any) -> None:
        check(args)
        self.args = args
        self._batches: dict[int, Batch] = {}  # by rollout, until they are trained on
        self._queue: TrainerQueue | None = None

    # What slime calls

    def load(self, rollout_id: int | None = None) -> None:
        """Take the run behind rollout `rollout_id`, whose checkpoint is loaded; -1 at the beginning.

        A checkpoint whose save was broken off between the model and the queue is made up for: the batches until then
        are in the model, so they are marked and not given again. Raises SettingError where versions do not fit.
        """
        version = 0 if rollout_id is None else rollout_id + 1
        queue = self._made()
        state = None if version == 0 else self._state_of(version)
        if state is not None:
            queue.load_state_dict(state)
        queue.open()
        found: int = queue.state_dict()["version"]
        if found != version:
            raise SettingError(
                f"the run is at version {found}, slime begins rollout {version}: load the checkpoint that belongs to "
                "it, or give STREAMADV_RUN another name"
            )
        self._queue = queue

    def save(self, rollout_id: int) -> None:
        """Rollouts up to this one are in the checkpoint that is there: write the queue's state, and commit."""
        queue = self.queue
        self._trained(rollout_id)
        state = queue.state_dict()
        write_state(self._folder(self.args.save, rollout_id + 1), state)
        queue.commit(state)

    def get_samples(self, num_samples: int) -> Any:
        raise SettingError(
            f"get_samples: producers choose the prompts; set rollout_function_path to {__name__}.rollout"
        )

    def add_samples(self, samples: Any) -> None:
        raise SettingError("add_samples: what is not trained on stays in the run, leave it there")

    def __len__(self) -> int:
        """Prompts of an epoch: as many as all rollouts take, for `num_rollout` counts them."""
        return int(self.args.num_rollout or 0) * int(self.args.rollout_batch_size)

    # What `rollout` calls

    @property
    def queue(self) -> TrainerQueue:
        if self._queue is None:
            raise SettingError(
                "the data source was not loaded: leave rollout_global_dataset on, by which slime loads and saves it"
            )
        return self._queue

    def next_batch(self, rollout_id: int) -> Batch:
        """Batch `rollout_id`; those that were trained on by now are marked. Raises SettingError at the run's end."""
        self._trained(rollout_id - AHEAD)
        batch = self.queue.next_batch()
        if batch is None:
            raise SettingError(
                f"the run has ended after {rollout_id} batches: set num_rollout to {rollout_id}, or play more"
            )
        refuse(
            batch.version != rollout_id,
            f"rollout {rollout_id} is asked for, the next batch is {batch.version}: start again from a checkpoint",
        )
        self._batches[rollout_id] = batch
        return batch

    # Parts

    def _trained(self, rollout_id: int) -> None:
        for number in sorted(self._batches):
            if number <= rollout_id:
                self.queue.trained(self._batches.pop(number))

    def _made(self, **changed: Any) -> TrainerQueue:
        text = os.environ.get(OPTIONS) or "{}"
        try:
            given = json.loads(text)
        except ValueError as error:
            raise SettingError(f"{OPTIONS} is {brief(text)}, no JSON: {error}") from None
        refuse(not isinstance(given, dict), f"{OPTIONS} is {brief(text)}, needs an object")
        for name in OWN:
            refuse(name in given, f"{OPTIONS}: {name} follows from slime's arguments, leave it out")
        own = {"batch_groups": self.args.rollout_batch_size, "mark": "explicit", "prefetch": AHEAD}
        return TrainerQueue(redis_url(None), run_name(None), **{**given, **own, **changed})

    def _state_of(self, version: int) -> Any:
        """The queue's state at a version: as it was saved, or made from the one before."""
        folder = self._folder(self.args.load, version)
        if folder.exists():
            return read_state(folder)
        names = (path.name.removeprefix("streamadv_") for path in folder.parent.glob("streamadv_*"))
        since = max((int(name) for name in names if name.isdecimal() and int(name) < version), default=0)
        fields = log_fields("state_made_up", role="slime", batch=version)
        logger.warning(
            "%s is missing: the save was broken off; batches %d to %d are in the model", folder, since, version - 1,
            extra=fields,
        )  # fmt: skip
        queue = self._made(keep_rolled_back=True)  # they are in the model, whatever they were played with
        try:
            if since:
                queue.load_state_dict(read_state(self._folder(self.args.load, since)))
            for _ in range(since, version):
                batch = queue.next_batch()
                if batch is None:
                    raise SettingError(f"{folder} is missing, and the run has no batch {version - 1}")
                queue.trained(batch)
            return queue.state_dict()
        finally:
            queue.close()

    @staticmethod
    def _folder(checkpoints: Any, version: int) -> Path:
        return Path(checkpoints) / "rollout" / f"streamadv_{version}"


def rollout(args: Any, rollout_id: int, data_source: QueueDataSource, evaluation: bool = False) -> Any:
    """The rollout function: batch `rollout_id` as samples, groups in lists, and the batch's figures.

    Each trajectory is one rollout of slime, its rows its samples. Rollouts that a batch lacks of `global_batch_size`
    are filled up by samples without a trainable token.

    Raises SettingError for `evaluation`, which needs a function of its own, and for batches that have no value a row.
    """
    refuse(
        evaluation,
        "evaluation is asked for: set eval_function_path to slime's, or evaluate by producers of the run",
    )
    package = next((name for name in ("miles", "slime") if name in sys.modules), None)  # the one that calls
    if package is None:
        raise SettingError("neither slime nor miles is imported: they call this function by its path")
    sample = import_module(f"{package}.utils.types").Sample
    batch = data_source.next_batch(rollout_id)
    groups: dict[str, list[Any]] = {}
    for made in (made for mb in batch for made in _samples_of(mb, sample)):
        made.index = sum(map(len, groups.values()))
        groups.setdefault(made.metadata["group_id"], []).append(made)
    for number, group in enumerate(groups.values()):
        for made in group:
            made.group_index = number
    names: dict[str, int] = {}
    for made in (made for group in groups.values() for made in group):
        made.rollout_id = names.setdefault(made.metadata["trajectory"], len(names))
    missing = int(args.global_batch_size) - len(names)
    filling = [_nothing(sample, len(names) + number) for number in range(missing)]
    samples = [*groups.values(), *([filling] if filling else [])]
    metrics = {f"streamadv/{name}": value for name, value in batch.metrics.items()}
    return import_module(f"{package}.rollout.base_types").RolloutFnTrainOutput(
        samples=samples, metrics=metrics
    )


def advantages(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """The reward post-processing: rewards to log, and the chain's advantages in the place of normalised ones.

    With `advantage_estimator` grpo, gspo or cispo each token of a row gets its value.
    """
    return [float(each.reward or 0.0) for each in samples], [each.metadata[ADVANTAGE] for each in samples]


def record(sample: Any, **fields: Any) -> dict[str, Any]:
    """The arguments of `rollout.push` for a sample of slime or miles that was played.

    fields: others, or in place of these. Raises TrajectoryError for images, which have no columns, and for a sample
    that was not played to its end: `rollout.fail` is for that.
    """
    status = sample.status.value
    if status not in _STATUS:
        raise TrajectoryError(f"the sample is {status}: call rollout.fail({status!r})")
    if sample.multimodal_inputs or sample.multimodal_train_inputs:
        raise TrajectoryError("multimodal_inputs have no columns: only text is carried")
    prompt = len(sample.tokens) - sample.response_length
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    experts = sample.rollout_routed_experts
    experts = None if experts is None else np.asarray(experts, np.int32)
    made = columns_of(sample.tokens, prompt, mask, sample.rollout_log_probs, experts) | {"status": status}
    if isinstance(sample.reward, dict):
        made["rewards"] = {str(name): float(value) for name, value in sample.reward.items()}
    elif sample.reward is not None:
        made["reward"] = float(sample.reward)
    return made | fields


def check(args: Any) -> None:
    """Raise SettingError for arguments that cannot hold for a queue."""
    n = int(args.rollout_batch_size) * int(args.n_samples_per_prompt)
    refuse(
        args.global_batch_size != n,
        f"global_batch_size is {args.global_batch_size}: a batch of the queue is one step, set it to {n}, "
        "rollout_batch_size x n_samples_per_prompt",
    )
    refuse(
        args.advantage_estimator not in ("grpo", "gspo", "cispo"),
        f"advantage_estimator is {args.advantage_estimator}: advantages come from the queue's chain, set it to grpo, "
        "gspo or cispo",
    )
    refuse(
        getattr(args, "async_save", False),
        "async_save is set: when such a checkpoint is whole is not known here; leave it out",
    )
    refuse(
        not getattr(args, "rollout_global_dataset", True),
        "rollout_global_dataset is off: slime then neither loads nor saves the data source; leave it on",
    )
    for name in ("kl_coef", "normalize_advantages", "use_opd"):
        refuse(
            getattr(args, name, False),
            f"{name} is set: it changes advantages, which come from the queue's chain; leave it out",
        )
    path = getattr(args, "custom_reward_post_process_path", None)
    refuse(
        path != f"{__name__}.advantages",
        f"custom_reward_post_process_path is {brief(path)}, needs {__name__}.advantages",
    )
    refuse(
        getattr(args, "save", None) is None,
        "save is not set: without checkpoints nothing is committed; set it",
    )


def _samples_of(mb: MicroBatch, sample: type[Any]) -> Iterator[Any]:
    columns = {name: column.cpu() for name, column in mb.columns.items() if name not in mb.optional}
    refuse(
        "rollout_is_weights" in columns,
        "the chain corrects token by token, which slime's samples cannot carry: leave correction out, and set use_tis",
    )
    references, log_probs = mb.references, columns.get("rollout_log_probs")
    for number, start, cut, stop in trained_rows(mb):
        reference = references[number]
        row = {name: column[start:stop] for name, column in columns.items()}
        name = f"{reference.group_id}/{reference.rollout_index}"
        versions = [] if reference.versions is None else sorted(set(reference.versions))
        yield sample(
            tokens=row["input_ids"].tolist(),
            response_length=stop - cut,
            reward=reference.reward,
            loss_mask=columns["response_mask"][cut:stop].int().tolist(),
            rollout_log_probs=None if log_probs is None else log_probs[cut:stop].tolist(),
            rollout_routed_experts=row[ROUTED_EXPERTS][:-1] if ROUTED_EXPERTS in row else None,
            weight_versions=[str(version) for version in versions],
            status=sample.Status(reference.status),
            metadata={
                ADVANTAGE: _one_value(row, name),
                "group_id": reference.group_id,
                "trajectory": name,
                "data_source": reference.data_source,
            },
        )


def _one_value(row: dict[str, Tensor], name: str) -> float:
    """The advantage of a row. Raises SettingError if its tokens have different ones."""
    values = row["advantages"][row["response_mask"].bool()]
    if "sample_weights" in row:
        values = values * row["sample_weights"][row["response_mask"].bool()]
    refuse(
        bool((values != values[0]).any()),
        f"the tokens of {name} have different advantages, slime's samples carry one a row: take a chain of outcomes",
    )
    return float(values[0])


def _nothing(sample: type[Any], rollout_id: int) -> Any:
    """A sample that adds nothing to a loss."""
    return sample(
        group_index=-1, index=rollout_id, rollout_id=rollout_id, tokens=[0, 0], response_length=1, reward=0.0,
        loss_mask=[0], rollout_log_probs=[0.0], status=sample.Status.COMPLETED,
        metadata={ADVANTAGE: 0.0, "group_id": "", "trajectory": ""}, remove_sample=True,
    )  # fmt: skip
