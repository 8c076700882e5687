"""Training by the Tinker protocol (Thinking Machines' service, and servers that speak it), fed by the trainer queue.

    client = service.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=32)
    train(queue, client, "checkpoints", adam=tinker.AdamParams(learning_rate=4e-5))

Gradients, optimizer and weights are on the server. A checkpoint is the path of a state that the server has saved, with
the queue's state beside it; weights of each version are a path too, by which producers sample (`TinkerEngine`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ..errors import SettingError
from ..extras import require
from ..messages import log_fields, whole_number
from ..trainer import TrainerQueue
from ..trainer.microbatch import Batch, MicroBatch
from . import trained_rows
from .engines.completion import LENGTH, Completion

require("streamadv.integrations.tinker", "tinker")
import tinker
import torch
from tinker import AdamParams, Datum, ModelInput, SamplingParams
from torch import Tensor

if TYPE_CHECKING:
    from ..producer.membership import Weights

__all__ = ["TinkerEngine", "datums", "train"]

logger = logging.getLogger(__name__)

#: In a checkpoint: the path of the state that the server has saved.
SAVED: Final = "tinker.json"
#: Columns of the chain by which advantages are weighed.
WEIGHTS: Final = ("rollout_is_weights", "sample_weights")

LogProbs = Literal["rollout_log_probs", "old_log_probs"]
DivideBy = Literal["tokens", "rows"]


def train(
    queue: TrainerQueue,
    client: tinker.TrainingClient,
    folder: str | Path,
    *,
    adam: AdamParams | Callable[[int], AdamParams],
    loss_fn: str = "importance_sampling",
    loss_fn_config: Mapping[str, float] | None = None,
    log_probs: LogProbs = "rollout_log_probs",
    divide_by: DivideBy | None = "tokens",
    weights: bool = False,
    save_every: int = 20,
    publish_every: int = 1,
    max_batches: int | None = None,
    sampler_ttl_s: int | None = None,
    log: Callable[[int, Mapping[str, float]], object] | None = None,
) -> int:
    """Train on the batches of a queue until its run ends. Returns the version that was reached.

    One batch is one optimizer step: a `forward_backward` for each micro-batch, then `optim_step`. From the newest
    checkpoint in `folder`, if there is one, the server loads the state with its optimizer first.

    Args:
        queue: of one process (`world_size` 1), `commit` manual. Bound `tokens_per_micro_batch` by what one request may
            hold.
        client: a new one of this process: gradients of a step that was broken off are not in it.
        folder: of the checkpoints, each a small file and the queue's state, on a disk that the next start sees.
        adam: of each step, or a function of the version that is trained.
        loss_fn, loss_fn_config: of the server: importance_sampling, ppo, cispo, dro.
        log_probs: the column that the loss divides by.
        divide_by: what of the whole batch advantages are divided by, for a server that sums over tokens: those that the
            chain has left, or rows. None leaves them as they are, for a server that takes means.
        weights: tell the server which tokens are trained on, for one that takes means over them (SkyRL's of JAX).
            Others refuse this input of their losses.
        save_every: batches between two checkpoints; there is one at the end too.
        publish_every: batches between two versions that producers sample with.
        max_batches: version at which to end, though the run goes on.
        sampler_ttl_s: seconds after which the server may delete weights for sampling.
        log: called after each step with the version and figures: the batch's, and `tinker/*` of the server.

    Raises SettingError for settings that cannot hold, and what the queue and the client raise: the next start goes on
    from the last checkpoint.
    """
    save_every = whole_number("save_every", save_every, 1)
    publish_every = whole_number("publish_every", publish_every, 1)
    saved = queue.resume(folder)
    if saved is not None:
        client.load_state_with_optimizer(_path_in(saved)).result()
    version: int = queue.state_dict()["version"]
    if max_batches is not None and version >= max_batches:
        return version

    def publish() -> str:
        name = f"streamadv-{version:06d}"
        return str(client.save_weights_for_sampler(name, ttl_seconds=sampler_ttl_s).result().path)

    def save() -> None:
        with queue.checkpoint(folder) as path:
            state = client.save_state(f"streamadv-{version:06d}").result().path
            (path / SAVED).write_text(json.dumps({"path": str(state)}))

    queue.open(weights=publish())
    is_saved = True
    while (max_batches is None or version < max_batches) and (batch := queue.next_batch()) is not None:
        params = adam if isinstance(adam, AdamParams) else adam(batch.version)
        divisor = _divisor(batch, divide_by)
        parts = [datums(mb, log_probs=log_probs, divisor=divisor, weights=weights) for mb in batch]
        figures = _step(client, batch.version, parts, params, loss_fn, loss_fn_config)
        version = batch.version + 1
        queue.trained(batch, weights=publish() if version % publish_every == 0 else None)
        is_saved = version % save_every == 0
        if is_saved:
            save()
        if log is not None:
            log(version, {**batch.metrics, **figures})
    if not is_saved:
        save()
    return version


def datums(
    micro_batch: MicroBatch,
    *,
    log_probs: LogProbs = "rollout_log_probs",
    divisor: float = 1.0,
    weights: bool = False,
) -> list[Datum]:
    """A datum for each row that has a trainable token: inputs and, one token further, what they are to predict.

    `advantages` are those of the chain, times `rollout_is_weights` and `sample_weights` where it makes them, over
    `divisor`; 0 at tokens that are not trained on. `logprobs` are of the column `log_probs`; `weights`, if asked for,
    are 1 at tokens that are trained on.

    Raises SettingError if the batch lacks it.
    """
    columns = micro_batch.columns
    if log_probs not in columns or log_probs in micro_batch.optional:
        raise SettingError(
            f"log_probs is {log_probs}: trajectories of the batch lack this column; push it, or name another"
        )
    mask: Tensor = columns["response_mask"].bool()
    advantages: Tensor = columns["advantages"] / divisor
    for name in WEIGHTS:
        if name in columns:
            advantages = advantages * columns[name]
    advantages = torch.where(mask, advantages, 0.0).cpu()
    tokens, behind = columns["input_ids"].cpu(), columns[log_probs].float().cpu()
    made = []
    for _, start, _, stop in trained_rows(micro_batch):
        predicted = slice(start + 1, stop)
        inputs = {
            "target_tokens": tokens[predicted].long(),
            "logprobs": behind[predicted],
            "advantages": advantages[predicted].float(),
        }
        if weights:
            inputs["weights"] = mask[predicted].float().cpu()
        made.append(Datum(ModelInput.from_ints(tokens[start : stop - 1].tolist()), inputs))
    return made


class TinkerEngine:
    """Samples by a Tinker server, for `Episode` as an `EngineClient` does.

        engine = TinkerEngine(service, max_tokens=512)
        engine.refresh(producer.wait_for_weights())
        completion = await engine.complete(episode.tokens)

    Args:
        service: makes the sampling clients.
        sampling: of `tinker.SamplingParams`, such as `max_tokens`, `temperature` and `stop`.
    """

    def __init__(self, service: tinker.ServiceClient, **sampling: Any) -> None:
        self.version: int | None = None
        """Of the weights. A completion has the one it began with."""
        self._service, self._sampling = service, sampling
        self._client: tinker.SamplingClient | None = None

    def refresh(self, weights: Weights | None) -> int | None:
        """Sample by these weights from now on, if they are others: `producer.weights`. Returns their version."""
        if weights is not None and weights.version != self.version:
            self._client = self._service.create_sampling_client(model_path=weights.uri)
            self.version = weights.version
        return self.version

    async def complete(self, prompt_ids: Sequence[int], **sampling: Any) -> Completion:
        """Sample one completion. sampling: in place of that of the engine. Raises SettingError without weights."""
        client, version = self._client, self.version
        if client is None:
            raise SettingError("the engine has no weights: call refresh(producer.wait_for_weights()) first")
        params = SamplingParams(**{**self._sampling, **sampling})
        prompt = [int(token) for token in prompt_ids]
        answer = await client.sample_async(ModelInput.from_ints(prompt), 1, params)
        (sampled,) = answer.sequences
        reason = LENGTH if sampled.stop_reason == "length" else str(sampled.stop_reason)
        return Completion(prompt, sampled.tokens, sampled.logprobs, reason, version)


def _divisor(batch: Batch, divide_by: DivideBy | None) -> float:
    counts = {"rows": batch.num_rows, "tokens": sum(int(mb.columns["response_mask"].sum()) for mb in batch)}
    return 1.0 if divide_by is None else max(1.0, counts[divide_by])


def _step(
    client: tinker.TrainingClient,
    version: int,
    parts: Sequence[list[Datum]],
    adam: AdamParams,
    loss_fn: str,
    loss_fn_config: Mapping[str, float] | None,
) -> dict[str, float]:
    """One optimizer step. All requests are on their way before the first answer is awaited."""
    config = None if loss_fn_config is None else dict(loss_fn_config)
    asked = [client.forward_backward(part, loss_fn, config) for part in parts if part]
    if not asked:
        fields = log_fields("no_tokens", role="trainer", batch=version)
        logger.warning("batch %d has no trainable token: no step is made", version, extra=fields)
        return {}
    stepped = client.optim_step(adam)
    figures: dict[str, float] = {}
    for answer in asked:
        for name, value in answer.result().metrics.items():
            summed = name.endswith(":sum") or name == "loss"
            figures[f"tinker/{name}"] = figures.get(f"tinker/{name}", 0.0) + value if summed else value
    figures |= {f"tinker/{name}": value for name, value in (stepped.result().metrics or {}).items()}
    return figures


def _path_in(checkpoint: Path) -> str:
    try:
        path = json.loads((checkpoint / SAVED).read_text())["path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f"{checkpoint / SAVED} cannot be read: {error}; resume from a checkpoint that this trainer has saved"
        ) from None
    return str(path)
