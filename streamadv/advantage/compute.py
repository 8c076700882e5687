"""The chain over one work item, and over its groups one by one where it fails.

`compute` is a pure function from fetched columns to results: the same item gives the same bits on any worker.

One bad group must neither stop the stage nor take the other groups of its batch with it. A work item that failed, or
that ended the process of an earlier worker, is computed group by group. The computation is deterministic, so an
exception or a timeout is final at once. Only a crash of the process needs several tries, since the group may not be
at fault; the server counts each try before it is made. The results report failing groups as dead, without numbers.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..algorithms.chain import cut_chain, run_chain
from ..algorithms.packed import Level, PackedBatch
from ..algorithms.packing import empty_column, pack_members
from ..batch.record import Death
from ..batch.selection import running_of
from ..errors import ChainError, EstimatorError, SettingError, TrajectoryError
from ..grouping.groups_log import LoggedGroup
from ..grouping.layout import Layout, place
from ..messages import log_fields, summed_up
from ..metrics import Sample
from ..run import Run
from ..run.consumer import ADVANTAGE
from ..run.hangs import call_within
from ..run.kept import RESULTS_OF
from ..trajectory.columns import Array
from .prepare import PreparedItem
from .results import counts_of, results_of_groups

logger = logging.getLogger(__name__)

#: Seconds for one computation: far above what the largest takes, the first one included, which compiles.
TIMEOUT_S: Final = 300.0
#: Crashes of a process while it computed a group alone, until the group is dead.
MAX_ATTEMPTS: Final = 10
#: Exceptions that point to a bug in the chain, not to bad data: the columns were checked before.
CODE_ERRORS: Final = (AttributeError, ImportError, NameError, NotImplementedError, TypeError)
#: Tokens of a work item that are sampled for the metrics.
SAMPLED_TOKENS: Final = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class ComputedItem:
    """Results of one work item, as they will be published."""

    prepared: PreparedItem  # without its columns
    published: Layout  # the members that the results are for: of the living groups of the item's shard
    header: str  # JSON of a ResultHeader
    #: a number per trajectory, row or step: in the log
    results: dict[str, bytes] = field(default_factory=dict)
    #: columns, and results of groups that may be kept: in a hash of their own
    outputs: dict[str, memoryview] = field(default_factory=dict)
    # For the metrics:
    advantages: Sample | None = None
    is_weights: Sample | None = None


def compute(prepared: PreparedItem, device: torch.device) -> ComputedItem:
    """Run the worker's part of the chain over the living groups, and pick the results of the item's shard.

    A chain that has to see the whole batch gets the groups of all shards.
    """
    item, groups = prepared.item, prepared.living
    chain, layout = cut_chain(item.chain, item.late)[0], Layout.of(groups)
    in_shard = [group for group in groups if group.shard == item.shard]
    published = layout if len(in_shard) == len(groups) else Layout.of(in_shard)
    header: dict[str, Any] = {
        **{"unit": item.number, "level": chain.level, "dead": prepared.dead},
        **{"groups": counts_of(published), "columns": [], "metrics": {}, "weights": {}},
    }
    computed = replace(prepared, columns={})
    if not groups:
        return ComputedItem(computed, published, json.dumps(header))
    batch = pack_members(layout, lay_out(layout, prepared.columns, chain.needs, device), device)
    result = run_chain(chain, batch, item.kl_coefficient, running_of(item.running))
    # By level, which values are of members of the shard, bool; none: all are.
    chosen: dict[str, Tensor] = {}
    if published is not layout:
        is_published = np.array([group.shard == item.shard for group in groups], np.bool_)
        chosen["trajectory"] = torch.from_numpy(is_published[layout.group]).to(device)
        chosen["step"] = chosen["trajectory"][batch.steps.trajectory]
        chosen["row"] = chosen["trajectory"][batch.row_trajectory]

    def pick(level: str, values: Tensor) -> Array:
        picked = values[chosen[level]] if chosen else values
        return np.ascontiguousarray(picked.cpu().numpy())

    results = {
        "rewards": pick("trajectory", result.rewards).tobytes(),
        "step_rewards": pick("step", result.step_rewards).tobytes(),
    }
    tokens = dict(result.columns)
    for name, values in (("advantages", result.advantages), ("returns", result.returns)):
        if values is not None and result.level == "token":
            tokens[name] = values
        elif values is not None:
            results[name] = pick(result.level, values).tobytes()
    if chosen and tokens:
        chosen["token"] = chosen["row"][batch.token_row]
    picked = {name: pick("token", values) for name, values in tokens.items()}
    outputs = {name: array.data.cast("B") for name, array in picked.items() if array.size}
    kept = results_of_groups(published, prepared.share_kept, chain.level, results, outputs)
    header |= {"kept": list(kept)} if kept else {}
    header |= {"columns": sorted(outputs), "metrics": dict(result.metrics), "weights": dict(result.weights)}
    outputs |= {f"{RESULTS_OF}{group_id}": memoryview(raw) for group_id, raw in kept.items()}
    return ComputedItem(
        computed,
        published,
        json.dumps(header),
        results,
        outputs,
        _sample(batch, result.level, result.advantages, chosen.get(result.level)),
        _sample(batch, "token", result.columns.get("rollout_is_weights"), chosen.get("token")),
    )


def _sample(batch: PackedBatch, level: Level, values: Tensor | None, mask: Tensor | None) -> Sample | None:
    """Those of `values` where `mask` is true (None = all), for the metrics; of tokens as `sample_tokens`."""
    if values is None:
        return None
    if level == "token":
        return sample_tokens(batch, values, mask)
    return Sample((values if mask is None else values[mask]).cpu().numpy())


def lay_out(
    layout: Layout, fetched: Mapping[str, Mapping[str, Array]], names: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """The columns of these names, [N] each, on the host. fetched: payload key -> columns of the packet.

    Raises TrajectoryError for a column that is not one number per token.
    """
    if not names:
        return {}
    sources = [(fetched[layout.packets[packet].key], parts) for packet, parts in layout.pieces()[0].items()]
    columns = {}
    for name in names if sources else ():
        first = sources[0][0][name]
        if name in layout.members.entries or first.ndim > 1:
            raise TrajectoryError(
                f"column {name} is needed, and has not one number per token: push another one"
            )
        columns[name] = empty_column(layout.num_tokens, first.dtype, device)
        out = columns[name].numpy()
        for packet_columns, parts in sources:
            place(packet_columns[name], parts, out)
    return columns


def sample_tokens(batch: PackedBatch, values: Tensor, mask: Tensor | None = None) -> Sample:
    """Some of `values` [N], of tokens that are trained on and, if given, where `mask` [N] is true.

    All of them if one is not finite, so that such are counted.
    """
    step = max(1, len(values) // SAMPLED_TOKENS) if bool(values.sum().isfinite()) else 1
    trainable = batch.column("response_mask")[::step].bool()
    chosen = trainable if mask is None else trainable & mask[::step]
    return Sample(values[::step][chosen].cpu().numpy(), step)


def compute_safely(
    run: Run,
    prepared: PreparedItem,
    device: torch.device,
    stop: threading.Event | None = None,
) -> ComputedItem:
    """`compute`; groups whose data break it are reported as dead.

    A group that alone takes longer than TIMEOUT_S is dead. Raises ChainError and SettingError if the chain is wrong,
    and Stopped if a computation goes on after `stop` was set.
    """
    item = prepared.item
    what = f"{ADVANTAGE}: the chain ({item.chain.get('estimator')}) on batch {item.batch}"

    def bounded(part: PreparedItem) -> ComputedItem:
        return call_within(partial(compute, part, device), TIMEOUT_S, what, stop)

    if not prepared.entry.reclaimed:
        try:
            return bounded(prepared)
        except SettingError:
            raise
        except Exception as error:  # the data of some group: `isolate` finds out of which
            fields = log_fields("computing_alone", run=run.name, role=ADVANTAGE, batch=item.k)
            logger.warning(
                "%s: batch %s is computed group by group: %s", ADVANTAGE, item.batch, error, extra=fields
            )
    dead = isolate(run, prepared.living, lambda group: bounded(replace(prepared, groups=[group])))
    if len(dead) == len(prepared.living) > 1:
        detail = next(iter(dead.values())).detail
        raise ChainError(f"batch {item.batch}: every group fails, as with {detail}")
    if dead:
        first, death = next(iter(dead.items()))
        fields = log_fields(
            "group_dead", run=run.name, role=ADVANTAGE, group=first, reason=death.reason, count=len(dead)
        )
        logger.error("%s dead (%s): %s", summed_up(first, len(dead)), *death, extra=fields)
    try:
        return bounded(replace(prepared, dead=prepared.dead | dead))
    except SettingError:
        raise
    except Exception as error:
        raise ChainError(f"batch {item.batch}: groups that compute alone fail together: {error}") from error


def isolate(
    run: Run, groups: Sequence[LoggedGroup], compute_alone: Callable[[LoggedGroup], object]
) -> dict[str, Death]:
    """Compute every group alone. Returns those that cannot be computed, by id.

    Raises SettingError and ChainError if the chain is wrong: an exception that points to a bug in its code is one
    unless another group computes.
    """
    deaths: dict[str, Death] = {}
    bugs: list[str] = []
    for group in groups:
        shard = run.shards[group.shard]
        # How often it was tried alone, this time included. The count stays if the process dies in this.
        attempts: int = shard.call("attempt", [group.group_id, "1"])
        try:
            if attempts > MAX_ATTEMPTS:
                text = f"crashed the process {MAX_ATTEMPTS} times"
                deaths[group.group_id] = Death("compute_error", text)
            else:
                compute_alone(group)
        except SettingError:
            raise
        # Any: the group's data may provoke whatever the chain's libraries raise. It is not kept: its frames hold the
        # group's tensors, in a cycle if one of them holds the exception.
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error.__cause__ if isinstance(error, EstimatorError) else error, CODE_ERRORS):
                bugs.append(text)
            deaths[group.group_id] = Death("compute_error", text[:500])
        finally:
            shard.call("attempt", [group.group_id, "0"])
    if bugs and len(deaths) == len(groups):
        raise ChainError(f"the chain fails by itself: {bugs[0]}")
    return deaths
