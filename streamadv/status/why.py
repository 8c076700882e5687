"""Why a group is where it is, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..run.manifest import Manifest
from ..trajectory.packet import REWARD
from .seen import SeenGroup

_NUMBERS: Final = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip


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
