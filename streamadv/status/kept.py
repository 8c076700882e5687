"""`sa.kept`: trajectories that can be looked at, why their groups are where they are, and the turns of a rollout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from ..errors import SettingError, TrajectoryError, WireError
from ..messages import brief
from ..run import Run, find_run
from ..run.manifest import Manifest
from ..run.packets import FetchedPacket, decode_own, fetch_columns, fetch_replies, know_columns
from ..settings import redis_url, run_name
from ..store.connection import Connection
from ..trajectory.columns import KNOWN_COLUMNS, LOG_PROBS, OUTPUT_COLUMNS, Array
from ..trajectory.members import Reference, offsets
from ..trajectory.packet import REWARD, payload_trajectory, payloads_of
from ..trajectory.schema import Row, Trajectory
from .seen import PLACES, SeenGroup, Where, read_groups_at

#: Results that are 0 on tokens that are not trained on, as in a micro-batch.
SPREAD: Final = frozenset({"advantages", "returns"})
MASK: Final = "response_mask"
#: What was computed that is shown; other columns that a step has changed are as they were pushed.
SHOWN: Final = OUTPUT_COLUMNS.keys() | {MASK}
_NUMBERS: Final = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip


def kept(
    url: str | Connection | None = None,
    *,
    run: str | None = None,
    where: Where = "kept",
    outcome: str | None = None,
    batch: int | None = None,
) -> Iterator[Trajectory]:
    """The trajectories of a run that can be looked at, group by group, the oldest first in each shard.

    Each has its columns with `advantages` and `returns`, `reward`, `status`, versions, `outcome`, `reason` in words,
    and the `batch` that trained on it. Nothing is taken, and an observer's rights suffice. What goes while this reads
    is left out. url: as of a producer; default STREAMADV_REDIS_URL. where: `kept` (groups that have ended, by the run's
    settings `keep` and `keep_bytes`), `open`, `waiting` or `dead`. outcome: only groups that ended so: trained, stale,
    zero_variance ... batch: only groups of this batch.

    Raises SettingError for a run or place that does not exist.
    """
    if where not in PLACES:
        raise SettingError(f"where is {brief(where)}, needs one of {', '.join(PLACES)}")
    connection = url if isinstance(url, Connection) else Connection(redis_url(url))
    try:
        found = find_run(connection, run_name(run))
        for group in read_groups_at(found, where):
            if outcome in (None, group.outcome) and batch in (None, group.batch):
                yield from read_trajectories(found, group)
    finally:
        if connection is not url:
            connection.close()


def read_trajectories(run: Run, group: SeenGroup) -> Iterator[Trajectory]:
    """The trajectories of a group of this run, as `trajectories_of` has them."""
    packets = fetch_columns(run, group.packets, None, header=True)
    return trajectories_of(group, packets, why(group, run.manifest))


def trajectories_of(
    group: SeenGroup, packets: Iterable[FetchedPacket], reason: str | None
) -> Iterator[Trajectory]:
    """The trajectories of a group with all their columns; none of a packet that is gone or cannot be read.

    packets: of the group, with their headers. reason: why the group is where it is.
    """
    outputs = outputs_of(group)
    members = {member.rollout_index: member for member in group.members}
    found = []
    for fetched in packets:
        if fetched.problem is None:
            indices = fetched.packet.members.table["index"].tolist()
            payloads = payloads_of(fetched.packet, fetched.columns, fetched.header)
            found += list(zip(indices, payloads, strict=True))
    for index, payload in sorted(found, key=lambda each: each[0]):
        if index not in members:
            continue
        reference = members[index]
        trained = group.outcome == "trained" and index not in group.left_out
        more: dict[str, Any] = {"outcome": group.outcome, "reason": reason, "round": group.round}
        more["batch"] = k = group.batch if trained or group.where == "waiting" else None
        more["staleness"] = None if k is None else reference.staleness(k)
        with suppress(WireError, TrajectoryError):
            columns, mask = outputs.get(index, {}), payload.columns[MASK]
            mask = columns.pop(MASK, mask)  # the chain may have left tokens out
            columns |= {name: np.where(mask > 0, columns[name], 0) for name in SPREAD & columns.keys()}
            yield payload_trajectory(reference, payload, columns, **more)


def columns_of_group(run: Run, group: SeenGroup) -> dict[str, Array]:
    """The columns that a group has itself. Raises WireError if they cannot be read."""
    found: dict[str, Array] = {}
    for key, size, names in group.columns:
        know_columns(run, [names])
        (reply,) = fetch_replies(run, [(key, size, names)])
        found |= decode_own(run, names, reply)
    return found


def outputs_of(group: SeenGroup) -> dict[int, dict[str, Array]]:
    """The results of a kept group per token, by rollout index and column."""
    counting = [member for member in group.members if member.rollout_index in group.counting]
    outputs: dict[int, dict[str, Array]] = {member.rollout_index: {} for member in counting}
    for name, level, values in group.results:
        if name not in SHOWN:
            continue
        counts = [count_at(member, level) for member in counting]
        if sum(counts) != len(values):
            continue
        for member, (start, stop) in zip(counting, pairwise(offsets(np.array(counts)).tolist()), strict=True):
            outputs[member.rollout_index][name] = _per_token(member, level, values[start:stop])
    shown = SHOWN | (KNOWN_COLUMNS.keys() & {*group.record.get("late", ())})
    for member in counting:
        outputs[member.rollout_index] |= {
            name: np.minimum(values, 0) if name in LOG_PROBS else values  # a trainer's may be above
            for name, _, values in group.late.get(member.rollout_index, ())
            if name in shown and len(values) == member.num_tokens
        }
    for columns in outputs.values():
        if "advantages" in columns:
            columns.setdefault("returns", columns["advantages"])
    return outputs


def count_at(member: Reference, level: str) -> int:
    """Numbers of a member that a result of this level has."""
    counts = {
        "trajectory": 1,
        "row": len(member.row_lengths),
        "step": len(member.steps),
        "token": member.num_tokens,
    }
    return counts[level]


def _per_token(member: Reference, level: str, values: Array) -> Array:
    if level == "row":
        return np.repeat(values, member.row_lengths)
    if level != "step":
        return values
    first, out = offsets(np.array(member.row_lengths)).tolist(), np.zeros(member.num_tokens, values.dtype)
    for step, value in zip(member.steps, values, strict=True):
        out[first[step.row] + step.start : first[step.row] + step.end] = value
    return out


# Why a group is where it is


def number_text(number: int) -> str:
    """A small number as a word."""
    return _NUMBERS[number] if 0 <= number < len(_NUMBERS) else str(number)


def why(group: SeenGroup, manifest: Manifest) -> str:
    """Why the group has ended so, or what it waits for. manifest: of its run."""
    counting = [m for m in group.members if m.rollout_index in group.counting]
    rewards = [m.reward for m in counting if m.reward is not None and not m.is_baseline]
    match group.outcome:
        case "open":
            return _missing(group)
        case "complete" | "partial":
            text = "waits for a batch"
            if group.batch is not None:
                text = f"in batch {group.batch}, which is not committed"
            return text if group.outcome == "complete" else f"{text}; {_usable(group)}"
        case "trained" if group.batch is not None:
            without = f", without rollout {', '.join(map(str, group.left_out))}" if group.left_out else ""
            return f"trained on in batch {group.batch}{without}"
        case "trained":
            return "the checkpoint that was loaded contains it"
        case "zero_variance":
            return _all_equal(rewards, manifest.filter_by)
        case "difficulty":
            return _too_easy_or_hard(rewards, manifest)
        case "expired":
            return f"{_usable(group)} when its deadline came"
        case "incomplete":
            return f"{_usable(group)}, and no others can come"
        case "stale":
            versions = [m.versions[0] for m in counting if m.versions]
            k, drop_after = group.naming or (None, None)
            return f"oldest version {min(versions, default='unknown')}, batch {k}, drop_after {drop_after}"
        case "rolled_back":
            return f"begun at version {group.version}, which the checkpoint that was loaded has taken back"
        case "no_train_members":
            return "all its rollouts are baselines"
        case "eval":
            played = f", round {group.round}" if group.round else f" of version {group.version}"
            return f"evaluation{played}"
    return group.detail or group.outcome.removeprefix("dead:").replace("_", " ")


def _missing(group: SeenGroup) -> str:
    free, under_way, unscored = (group.slots.count(letter) for letter in ".ps")
    parts = [(free, "not pushed yet"), (under_way, "under way to it"), (unscored, "without a reward")]
    text = ", ".join(f"{number_text(count)} {what}" for count, what in parts if count)
    return f"of {number_text(len(group.slots))} rollouts {text}" if text else "nothing is missing"


def _usable(group: SeenGroup) -> str:
    return f"{number_text(len(group.counting))} of {number_text(group.size)} rollouts were there"


def _all_equal(rewards: Sequence[float], filter_by: str) -> str:
    if filter_by != REWARD or not rewards:
        return f"all its rollouts have the same {filter_by}"
    which = "its only reward is" if len(rewards) == 1 else f"all {number_text(len(rewards))} rewards are"
    return f"{which} {rewards[0]:g}"


def _too_easy_or_hard(rewards: Sequence[float], manifest: Manifest) -> str:
    low, high = manifest.difficulty_low, manifest.difficulty_high
    if manifest.filter_by != REWARD or not rewards:
        return f"its mean {manifest.filter_by} is outside difficulty_low {low} to difficulty_high {high}"
    mean = sum(rewards) / len(rewards)
    if high is not None and mean >= high:
        return f"mean reward {mean:.4g}, difficulty_high {high:g}"
    return f"mean reward {mean:.4g}" + ("" if low is None else f", difficulty_low {low:g}")


# Turns of a rollout


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens `start` to `stop` of a row."""

    kind: Literal["prompt", "answer", "result"]
    label: str
    row: int
    start: int
    stop: int


def turns_of(trajectory: Trajectory, number: int, row: Row) -> Iterator[Turn]:
    """The turns of a row: each ends where `response_mask` changes."""
    edges = np.flatnonzero(np.diff(row.response_mask)) + 1
    rewards = {step.start: step.reward for step in trajectory.steps if step.row == number}
    agent = f" ({row.agent})" if row.agent else ""
    answers, where = 0, f"row {number}{agent}, " if len(trajectory.rows) > 1 else ""
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(row)], strict=True):
        if row.response_mask[start]:
            answers += 1
            reward = f", reward {rewards[start]:g}" if rewards.get(start) else ""
            yield Turn("answer", f"{where}answer {answers}{reward}", number, start, stop)
        elif start == 0:
            yield Turn("prompt", f"{where}prompt", number, start, stop)
        else:
            yield Turn("result", f"{where}result", number, start, stop)


def advantage_range(trajectory: Trajectory) -> tuple[float, float] | None:
    """The least and the greatest advantage of tokens that are trained on; None where none is known."""
    rows = [row for row in trajectory.rows if row.advantages is not None]
    values = [row.columns["advantages"][row.response_mask > 0] for row in rows]
    together = np.concatenate(values) if values else np.zeros(0)
    return (float(together.min()), float(together.max())) if len(together) else None
