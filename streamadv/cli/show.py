"""`streamadv show`: groups and what was said in them. Takes nothing, acknowledges nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any, Final

from pydantic_core import to_json

from ..errors import StreamadvError
from ..messages import counted, printable
from ..run import Run
from ..status.kept import advantage_range, read_trajectories, turns_of, why
from ..status.seen import PLACES, SeenGroup, find_group, read_groups_at
from ..trajectory.schema import Trajectory
from ..view.texts import Ids, open_tokenizer
from . import add_one_shot_options, joined
from .files import in_columns
from .parser import count_or_none

COLUMNS: Final = ("GROUP", "WHERE", "OUTCOME", "BATCH", "VERSION", "REWARDS", "WHY")
#: What a group has in JSON, beside what is reckoned.
FIELDS: Final = (
    "group_id", "where", "outcome", "batch", "round", "size", "version", "data_source", "ended_ms",
)  # fmt: skip
#: Rewards of a group that its line has one by one.
MAX_REWARDS: Final = 8


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "show",
        help="shows groups, and their rollouts by turns",
        description="Without GROUP a line for each group that is open, waits for its commit, is kept (by the run's "
        "settings keep and keep_bytes) or is a dead letter. With GROUP its rollouts: prompts, answers and tool "
        "results, reward, advantage, versions, and why it is where it is. Only looks: it takes and ends nothing.",
    )
    parser.add_argument("group", metavar="GROUP[/INDEX]", nargs="?", help="one group, or one rollout of it")
    parser.add_argument("--where", choices=PLACES, help="only groups that are there")
    parser.add_argument(
        "--outcome", metavar="REASON", help="only groups that ended so: trained, stale, expired ..."
    )
    parser.add_argument("--batch", type=count_or_none, metavar="K", help="only groups of this batch")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json, or its folder, for text instead of token ids (default: the run's setting)",
    )
    add_one_shot_options(parser, "one JSON object for each group, or each rollout of GROUP")
    parser.set_defaults(run=show)


def show(arguments: argparse.Namespace) -> None:
    with joined(arguments, reading=True) as run:
        if arguments.group is None:
            _list_groups(run, arguments)
            return
        texts = open_tokenizer(arguments.tokenizer, run.manifest.tokenizer)
        group, index = _named(run, arguments.group)
        found = read_trajectories(run, group)
        trajectories = [each for each in found if index in (None, each.rollout_index)]
        if arguments.json:
            for each in trajectories:
                print(to_json(each.to_json(), inf_nan_mode="constants").decode())
        else:
            _print_group(run, group, index, trajectories, texts)


def _named(run: Run, name: str) -> tuple[SeenGroup, int | None]:
    """The group, and the index of a rollout if `name` has one. Raises StreamadvError."""
    group_id, _, index = name.rpartition("/")
    if group := find_group(run, name):
        return group, None
    if group_id and index.isdecimal() and (group := find_group(run, group_id)):
        if int(index) not in [member.rollout_index for member in group.members]:
            raise StreamadvError(
                f"group {group_id!r} has no rollout {index}: see `streamadv show {group_id}`"
            )
        return group, int(index)
    raise StreamadvError(
        f"group {name!r} of run {run.name} is not open, waiting, kept or dead: `streamadv show` lists those that are; "
        "of groups that have ended the run keeps a share (settings keep, keep_bytes)"
    )


# The table


def _list_groups(run: Run, arguments: argparse.Namespace) -> None:
    places = PLACES if arguments.where is None else (arguments.where,)
    groups = [
        group
        for place in places
        for group in read_groups_at(run, place)
        if arguments.outcome in (None, group.outcome) and arguments.batch in (None, group.batch)
    ]
    if arguments.json:
        for group in groups:
            found = {name: getattr(group, name) for name in FIELDS}
            found["rollouts"] = [member.rollout_index for member in group.members]
            found |= {
                "rewards": _rewards(group),
                "reason": why(group, run.manifest),
                "problem": group.problem,
            }
            print(json.dumps(found))
    elif not groups:
        print(f"run {run.name} has no such groups")
    else:
        rows: list[tuple[str, ...]] = [COLUMNS]
        for group in groups:
            rewards = _rewards(group)
            shown = " ".join(f"{reward:g}" for reward in rewards[:MAX_REWARDS])
            if len(rewards) > MAX_REWARDS:
                shown = f"{len(rewards)} of mean {sum(rewards) / len(rewards):.4g}"
            batch, version = ("-" if each is None else str(each) for each in (group.batch, group.version))
            reason = why(group, run.manifest)
            rows.append((group.group_id, group.where, group.outcome, batch, version, shown or "-", reason))
        print(in_columns(rows))


def _rewards(group: SeenGroup) -> list[float]:
    found = [member.reward for member in group.members if member.rollout_index in group.counting]
    return [reward for reward in found if reward is not None]


# One group


def _print_group(
    run: Run, group: SeenGroup, index: int | None, trajectories: Sequence[Trajectory], texts: Ids
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    source = f", {group.data_source}" if group.data_source else ""
    title = f"group {group.group_id}{source}: {group.outcome}: {why(group, run.manifest)}"
    console.print(Text(printable(title), style="bold"))
    found = {each.rollout_index: each for each in trajectories}
    for member in group.members:
        if index not in (None, member.rollout_index):
            continue
        trajectory = found.get(member.rollout_index)
        if trajectory is None:
            console.print(
                Text(f"\nrollout {member.rollout_index}: its data is gone, or cannot be read", style="bold")
            )
            continue
        text = _head(trajectory, member.rollout_index in group.counting)
        console.print(Text("\n" + printable(text), style="bold"))
        for number, row in enumerate(trajectory.rows):
            for turn in turns_of(trajectory, number, row):
                console.print(Text(printable(f"{turn.label}:"), style="cyan"))
                text = texts.decode(row.input_ids[turn.start : turn.stop].tolist())
                console.print(Text(text, style="dim" if turn.kind == "result" else ""))
    if group.problem:
        console.print(Text(printable(f"\nnot readable: {group.problem}"), style="bold"))


def _head(trajectory: Trajectory, counts: bool) -> str:
    span, status = trajectory.version_span, str(trajectory.status)
    parts = [f"reward {'none' if trajectory.reward is None else format(trajectory.reward, 'g')}"]
    parts += [f"{name} {value:g}" for name, value in trajectory.rewards.items()]
    if (found := advantage_range(trajectory)) is not None:
        low, high = found
        parts.append(f"advantage {low:.4g}" if low == high else f"advantages {low:.4g} to {high:.4g}")
    parts += [status] + ([] if trajectory.role == "train" else [str(trajectory.role)])
    if span is not None:
        parts.append(f"version {span[0]}" if span[0] == span[1] else f"versions {span[0]} to {span[1]}")
    if trajectory.staleness is not None:
        parts.append(f"staleness {trajectory.staleness}")
    parts.append(f"{counted(trajectory.num_tokens, 'token')}, {sum(trajectory.row_trainable)} trained on")
    return f"rollout {trajectory.rollout_index}: {', '.join(parts)}" + ("" if counts else " (does not count)")
