"""`streamadv prompts list`, `show`: how far a run is with its finite data sets."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from ..errors import StreamadvError
from ..messages import counted, printable, seconds_text
from ..prompts.figures import TriesSeen, by_prompt, by_source
from ..prompts.stored import read, read_sets
from ..status.prompts import AGAIN, IN_PLAY, SourceProgress, read_ends, read_lines, read_progress
from . import add_one_shot_options, joined


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("prompts", help="shows how far the run is with its prompts")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, action, text in (
        ("list", list_all, "each data set by source: trained, filtered, given up, in play, left"),
        ("show", show, "the prompts of one data set that were given up, are in play, or have ended lately"),
    ):
        sub = actions.add_parser(name, help=text, description=text)
        if name == "show":
            sub.add_argument("name", metavar="NAME", nargs="?", default="train", help="default: train")
        add_one_shot_options(sub, "one JSON object")
        sub.set_defaults(run=action)


def list_all(arguments: argparse.Namespace) -> None:
    with joined(arguments, reading=True) as run:
        lines, ends = read_progress(run, run.now_ms()), read_ends(run)
        sets = [(prompts.name, by_source(prompts, ends)) for prompts in read_sets(run)]
    seen = {(name, source): of for name, found in sets for source, of in found.items()}
    if arguments.json:
        shown = [asdict(line) | {"seen": asdict(seen[line.name, line.source])} for line in lines]
        print(json.dumps({"run": run.name, "prompts": shown}))
    elif not lines:
        print(f"run {run.name}: no producer has played sa.Prompts(...)")
    else:
        print(
            "\n".join(printable(line_of(line) + _seen_text(seen[line.name, line.source])) for line in lines)
        )


def _seen_text(seen: TriesSeen) -> str:
    if seen.reward_mean is None:
        return ""
    return (
        f"; last {counted(seen.rewarded, 'group')}: reward {seen.reward_mean:.4g}, "
        f"deviation {seen.reward_deviation:.4g}, {seen.solved} solved"
    )


def show(arguments: argparse.Namespace) -> None:
    with joined(arguments, reading=True) as run:
        sets = [prompts for prompts in read_sets(run) if prompts.name == arguments.name]
        if not sets:
            raise StreamadvError(
                f"run {run.name} has no prompts {arguments.name!r}: see `streamadv prompts list --run {run.name}`"
            )
        stored = read(run, sets[0])
        lines = read_lines(run, stored)
        progress = [line for line in read_progress(run, run.now_ms()) if line.name == arguments.name]
        seen = by_prompt(sets[0], read_ends(run))
    if arguments.json:
        found = {"sources": list(map(asdict, progress)), "prompts": list(map(asdict, lines))}
        found["seen"] = [
            {"source": source, "index": index} | asdict(of) for (source, index), of in seen.items()
        ]
        print(json.dumps({"run": run.name, "name": arguments.name, **found}))
        return
    print("\n".join(printable(line_of(line)) for line in progress))
    if lines:
        print("begun and not ended (`again`: it waits to be played again), or given up:")
    for line in lines:
        source = f"{line.source} " if line.source else ""
        tries = counted(line.tries, "try", "tries")
        state = line.state if line.state in (IN_PLAY, AGAIN) else f"given up ({line.state})"
        print(
            printable(f"  {source}{line.index}, epoch {line.epoch + 1}: {state}, {tries} ({line.group_id})")
        )
    if seen:
        print("what the last groups have shown, over all epochs:")
    for (source, index), of in seen.items():
        text = f"{source} {index}".strip()
        figures = f"trained {of.trained}, filtered {of.filtered}, dropped {of.dropped}{_seen_text(of)}"
        print(printable(f"  {text}: {counted(of.tries, 'try', 'tries')} seen, {figures}, {of.tokens} tokens"))


def line_of(progress: SourceProgress) -> str:
    """One line for people."""
    name = f"{progress.name} {progress.source}".strip()
    parts = [f"trained {progress.trained} of {progress.total}"]
    for title, counts in (("filtered", progress.filtered), ("given up", progress.given_up)):
        if counts:
            parts.append(
                f"{title} {sum(counts.values())} ({', '.join(f'{why} {n}' for why, n in counts.items())})"
            )
    if progress.skipped:
        parts.append(f"left out as solved {progress.skipped}")
    parts += [f"in play {progress.in_play}", f"left {progress.left}"]
    if progress.failures:
        parts.append(f"played again {sum(progress.failures.values())} times")
    often = {index: times for index, times in progress.failing.items() if times > 1}
    if often:  # what fails in every epoch will fail in the next one
        named = ", ".join(f"{index} in {times} epochs" for index, times in often.items())
        parts.append(f"given up again and again: {named}")
    if progress.seconds_left:
        parts.append(f"ends in about {seconds_text(progress.seconds_left)}")
    return f"prompts {name}: epoch {progress.epoch + 1} of {progress.epochs}, {', '.join(parts)}"
