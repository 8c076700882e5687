"""A worker's hand-off: results of one work item, written to the results log in one script."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
from redis.exceptions import OutOfMemoryError

from .. import metrics
from ..run import Run
from ..run.consumer import ADVANTAGE
from ..store.calls import run_transaction
from ..store.scripts import script_call
from ..trajectory.schema import Status
from .compute import ComputedItem


def publish(run: Run, computed: ComputedItem) -> bool:
    """Hand results off. False if another worker has finished the entry, or the batch is gone."""
    keys = run.keys.shard(computed.entry.shard)
    output = keys.output(secrets.token_hex(12)) if computed.outputs else keys.void
    payloads = [(output, dict(computed.outputs))] if computed.outputs else []
    call = script_call("publish", keys, _arguments(computed, {}), output=output)
    try:
        return bool(run_transaction(run.connection, payloads, call))
    except OutOfMemoryError:  # the HSET is refused above maxmemory; the script, which acks first, is not
        call = script_call("publish", keys, _arguments(computed, computed.outputs), output=output)
        return bool(run.connection.push.eval(*call.by_text))


def _arguments(computed: ComputedItem, inline: Mapping[Any, Any]) -> list[Any]:
    """ARGV of `publish.lua`. inline: outputs that the script writes itself."""
    output_bytes = sum(len(value) for value in computed.outputs.values())
    payload_bytes = sum(group.size_bytes for group in computed.groups)
    return [
        *(ADVANTAGE, computed.entry.id, computed.item.batch, computed.header),
        *(output_bytes, payload_bytes, len(inline)),
        *(part for pair in (*inline.items(), *computed.results.items()) for part in pair),
    ]


def observe(computed: ComputedItem) -> None:
    """Metrics of results that were handed off."""
    groups = computed.groups
    members = [member for group in groups for member in group.references]
    stds = []
    for group in groups:
        rewards = [member.reward for member in group.references if member.reward is not None]
        if len(rewards) > 1:
            stds.append(float(np.std(rewards, ddof=1)))
    metrics.work_item_computed(
        rewards=[member.reward for member in members if member.reward is not None],
        advantages=[] if computed.advantages is None else computed.advantages,
        response_tokens=[sum(member.row_trainable) for member in members],
        turns=[len(member.steps) for member in members if member.steps],
        truncated=[float(member.status is Status.TRUNCATED) for member in members],
        group_reward_std=stds,
        group_completion_s=[(group.logged_ms - group.opened_ms) / 1000 for group in groups],
        metrics=computed.metrics,
        is_weights=computed.is_weights,
    )
