"""verl's agent loops as producers: what they have played is pushed to the run, one group for each prompt."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import transfer_queue as tq
from verl.experimental.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import (
    AgentLoopManagerTQ,
    AgentLoopWorkerTQ,
    apply_greedy_sampling_params,
)

from ...errors import GroupEndedError, TrajectoryError
from ...messages import log_fields
from ...producer import Producer
from ...producer.async_group import AsyncRollout
from ...producer.async_producer import AsyncProducer
from .. import columns_of
from .options import Options, options_of
from .rows import NUM_TURNS
from .sampler import TRAIN

logger = logging.getLogger(__name__)


def record(
    outputs: Sequence[AgentLoopOutput],
    *,
    updates_per_sync: int = 1,
    model_version: int | None = None,
    response_length: int | None = None,
) -> dict[str, Any]:
    """The arguments of `rollout.push` for what an agent loop has returned: one trajectory, a row for each output.

    `reward` is the last output's; without one the run's scorers bring it. The numbers of its `reward_extra_info` become
    named `rewards`. `model_version`: the span of weights that the engines report, in batches.

    Args:
        outputs: of one session.
        updates_per_sync: batches between two weight syncs (`parameter_sync_step`), which the engines count.
        model_version: known to be as new as the weights, where engines report none.
        response_length: a last response of so many tokens counts as truncated.

    Raises TrajectoryError for images and other data that have no columns.
    """
    if not outputs:
        raise TrajectoryError("the agent loop has returned no output")
    final = outputs[-1]
    rows = [_row(output) for output in outputs]
    made: dict[str, Any] = {"rows": rows} if len(rows) > 1 else rows[0]
    extra = final.extra_fields.get("reward_extra_info") or {}
    made["rewards"] = {str(name): float(value) for name, value in extra.items() if _is_number(value)}
    made["status"] = (
        "truncated"
        if response_length is not None and len(final.response_ids) >= response_length
        else "completed"
    )
    if final.reward_score is not None:
        made["reward"] = float(final.reward_score)
    spans = [
        (output.extra_fields.get("min_global_steps"), output.extra_fields.get("max_global_steps"))
        for output in outputs
    ]
    known = [int(step) for span in spans for step in span if step is not None]
    if known:
        made["model_version"] = (min(known) * updates_per_sync, max(known) * updates_per_sync)
    elif model_version is not None:
        made["model_version"] = model_version - model_version % updates_per_sync
    return made


class QueueAgentLoopWorker(AgentLoopWorkerTQ.__ray_actor_class__):
    """A worker of verl whose agent loops push to the run. Validation stays with verl.

    A prompt is a group with the prompt's uid, so one that is played again after a restart is not counted twice. As soon
    as its rollouts are pushed or have failed, it leaves TransferQueue.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._options: Options = options_of(self.config, self.config.trainer.v1.trainer_mode)
        self._producer: AsyncProducer | None = None
        self._opening = asyncio.Lock()

    async def _run_prompt(
        self,
        prompt: dict[str, Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool = False,
    ) -> None:
        if trajectory["validate"]:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        uid = prompt["uid"]
        try:
            await self._play(dict(prompt), dict(sampling_params), trajectory, trace)
        except GroupEndedError:
            logger.info("prompt %s was played before", uid, extra=self._log_fields("group_played", uid))
        except Exception:
            fields = self._log_fields("group_not_played", uid)
            logger.exception("prompt %s was not played to its end", uid, extra=fields)
        finally:
            await tq.async_kv_clear(keys=[uid], partition_id=TRAIN)

    def _log_fields(self, event: str, uid: str) -> dict[str, object]:
        return log_fields(event, run=self._options.run, role="verl", group=uid)

    async def _play(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool
    ) -> None:
        size = int(prompt.pop("__rollout_n__", self.config.actor_rollout_ref.rollout.n))
        if not prompt.pop("__do_sample__", True):
            apply_greedy_sampling_params(sampling_params)
        producer = await self._opened()
        source = prompt.get("data_source")
        async with producer.group(
            size, group_id=prompt["uid"], data_source=None if source is None else str(source)
        ) as group:
            await tq.async_kv_put(key=prompt["uid"], partition_id=TRAIN, tag={"status": "running"})
            await group.run(self._play_rollout, prompt, sampling_params, trajectory, trace)

    async def _play_rollout(
        self,
        rollout: AsyncRollout,
        prompt: Mapping[str, Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool,
    ) -> None:
        outputs = await self._run_agent_loop(
            sampling_params, trajectory=trajectory, trace=trace, session_id=rollout.rollout_index, **prompt
        )
        await rollout.push(
            **record(
                outputs,
                updates_per_sync=self._options.updates_per_sync,
                model_version=rollout.model_version,
                response_length=self.config.actor_rollout_ref.rollout.response_length,
            )
        )

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput] | None, validate: bool, **kwargs: Any
    ) -> list[AgentLoopOutput] | None:
        """Of training: the outputs with their score. They are pushed, instead of put into TransferQueue."""
        if validate:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            return None
        outputs = output if isinstance(output, list) else [] if output is None else [output]
        if outputs:
            await self._compute_score(outputs, kwargs=kwargs)
        return outputs

    async def _opened(self) -> AsyncProducer:
        async with self._opening:
            if self._producer is None:
                made = Producer(self._options.url, self._options.run)
                self._producer = await made.__aenter__()
        return self._producer


class QueueAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager of agent loops, with workers that push to the run."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.agent_loop_workers_class = ray.remote(QueueAgentLoopWorker)


def _row(output: AgentLoopOutput) -> dict[str, Any]:
    if output.multi_modal_data:
        raise TrajectoryError(
            f"multi_modal_data: {', '.join(output.multi_modal_data)} have no columns: only text is carried"
        )
    ids, experts = [*output.prompt_ids, *output.response_ids], output.routed_experts
    experts = None if experts is None else np.asarray(experts, np.int16)[: len(ids)]
    row = columns_of(ids, len(output.prompt_ids), output.response_mask, output.response_logprobs, experts)
    return row | {NUM_TURNS: np.array([output.num_turns], np.int32)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)
