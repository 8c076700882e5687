"""`streamadv status`: where everything is, whether the ledger adds up, who is alive."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

from ..messages import counted, printable, seconds_text, size_text
from ..run import Run
from ..run.heartbeats import HEARD_S
from ..run.manifest import Manifest
from ..status import Status, read_status
from ..status.audit import Audit, audit
from ..status.causes import ordinary_wait, reasons_of, unsaved
from ..store.retry import patiently
from . import FAILED, INTERRUPTED, add_one_shot_options, joined
from .prompts import line_of

WATCH_SECONDS: Final = 1.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "status",
        help="shows depths, ages, the ledger and who is alive",
        description="Shows where every trajectory of a run is. The ledger is in trajectories: "
        "pushed = trained + dropped + dead + queued + in_flight.",
    )
    add_one_shot_options(parser, "one JSON object")
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 unless the ledger adds up (holds while workers run), or if the server may evict keys",
    )
    parser.add_argument(
        "--deep", action="store_true", help="with --check: walk over everything stored (for a quiet run)"
    )
    parser.add_argument("--watch", action="store_true", help="again every second until Ctrl-C")
    parser.set_defaults(run=show_status)


def show_status(arguments: argparse.Namespace) -> int:
    """Print the status; 1 when a check was asked for and failed."""
    arguments.check |= arguments.deep
    with joined(arguments, reading=True) as run:
        if arguments.watch:
            return watch(run, arguments)
        text, is_right = text_of(run, arguments)
        print(text, flush=True)
        return FAILED if arguments.check and not is_right else 0


def watch(run: Run, arguments: argparse.Namespace) -> int:
    """Show the status again and again until Ctrl-C: in place on a terminal, else one below the other."""
    with ExitStack() as stack:
        show: Callable[[str], object] = partial(print, flush=True)
        if sys.stdout.isatty() and not arguments.json:
            from rich.live import Live
            from rich.text import Text

            live = stack.enter_context(Live(auto_refresh=False, screen=True))

            def show(text: str) -> None:
                live.update(Text(text), refresh=True)

        try:
            while True:
                show(patiently(lambda: text_of(run, arguments), "status", run.name)[0])
                time.sleep(WATCH_SECONDS)
        except KeyboardInterrupt:
            return INTERRUPTED


def text_of(run: Run, arguments: argparse.Namespace) -> tuple[str, bool]:
    """The status as it is printed, and whether the run is balanced, on a server that evicts nothing."""
    run.refresh()
    status = read_status(run)
    audited = audit(run) if arguments.deep else None
    if audited is not None:
        status = replace(status, problems=[*status.problems, *audited.problems])
    is_right = status.balanced and not status.server.evicts
    if arguments.json:
        reasons = [reason for reason in (*reasons_of(status), unsaved(status)) if reason]
        more = {
            "waiting": [reason.line(status.run) for reason in reasons],
            "blocked": [reason.name for reason in reasons],
            "ignored": run.manifest.ignored,
            **({"payloads": audited.payloads, "uncounted": audited.uncounted} if audited else {}),
        }
        return json.dumps({**status.to_json(), **more}), is_right
    return "\n".join(map(printable, lines_of(status, run.manifest, audited))), is_right


def lines_of(status: Status, manifest: Manifest, audited: Audit | None = None) -> list[str]:
    """The status for people. audited: what a walk over everything stored has found."""
    lines = [
        *_ledger_lines(status),
        *_group_lines(status, manifest),
        *_stream_lines(status),
        *_people_lines(status),
        *(f"IGNORED {what}" for what in manifest.ignored),
        *(f"SERVER {risk}" for risk in (status.server.evicts, status.server.forgets) if risk),
        *(f"WAITING {reason.line(status.run)}" for reason in reasons_of(status)),
        *([f"UNCOMMITTED {reason.line(status.run)}"] if (reason := unsaved(status)) else []),
    ]
    if status.balanced:
        lines.append("ledger balanced" + (", nothing stored is missing or orphaned" if audited else ""))
    if audited is not None:
        lines.append(str(audited))
    lines += [f"PROBLEM {problem}" for problem in status.problems]
    trainer = status.trainer
    version = "none yet" if trainer.version is None else trainer.version
    return [
        f"run {status.run}: {counted(status.shards, 'shard')}, version {version}, committed {trainer.committed}, "
        f"batches named and not committed {trainer.batches}{', ended by its trainer' if trainer.finished else ''}",
        *(f"  {line}" for line in lines),
    ]


def _ledger_lines(status: Status) -> Iterator[str]:
    ledger, places = status.ledger, asdict(status.places)
    dropped = dict(ledger.dropped)
    evaluated = dropped.pop("eval", 0)  # counts as dropped, and is no loss
    evaluations = f"+ evaluated {evaluated} " if evaluated else ""
    yield (
        f"pushed {ledger.pushed} = trained {ledger.trained} {evaluations}+ dropped {sum(dropped.values())} "
        f"+ dead {sum(ledger.dead.values())} + queued {ledger.queued} + in_flight {ledger.in_flight}"
        f"   (duplicates refused: {status.duplicates})"
    )
    for title, counts in (("queued", places), ("dropped", dropped), ("dead", ledger.dead)):
        if any(counts.values()):
            yield f"{title}: {_counts(counts)}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def _group_lines(status: Status, manifest: Manifest) -> Iterator[str]:
    groups, used, staleness = status.groups, status.bytes, status.staleness
    outcomes = f"; {_counts(groups.outcomes)}" if groups.outcomes else ""
    yield f"groups: open {groups.open}, in the log {groups.logged}{outcomes}"
    if groups.short.is_much:
        yield f"LOST {groups.short}"
    budget = "" if manifest.max_bytes is None else f" of max_bytes {size_text(manifest.max_bytes)}"
    yield (
        f"bytes: live {size_text(used.live)}, reserved {size_text(used.reserved)}{budget}; "
        f"{size_text(status.place_bytes)} for each new rollout"
    )
    for each in status.evaluations:
        version = each.versions or "unknown"
        source = f" {each.data_source}" if each.data_source else ""
        name = "" if each.round is None else f"round {each.round}, "
        mean = f"mean reward {each.mean:.4g} of {each.trajectories} rollouts"
        yield f"evaluation{source}: {name}version {version}, {mean}"
    yield from map(line_of, status.prompts)
    if staleness.mean is not None:
        yield f"staleness of waiting groups: mean {staleness.mean:.2f}, max {staleness.max}"


def _stream_lines(status: Status) -> Iterator[str]:
    for name, stream in status.streams.items():
        age = "" if stream.oldest_age_s is None else f", the oldest for {seconds_text(stream.oldest_age_s)}"
        yield (
            f"stream {name}: {counted(stream.length, 'entry', 'entries')}{age}, {stream.pending} in hand, "
            f"{stream.lag} not taken"
        )


def stage_of(stream: str) -> str:
    """What takes the entries of a stream."""
    stages = {"rollouts": "grouper", "work": "advantage worker"}
    return stages.get(stream, stream.replace("scoring:", "scorer "))


def _people_lines(status: Status) -> Iterator[str]:
    """Who is there: the trainer, workers, producers."""
    yield _trainer_line(status)
    for name, stream in status.streams.items():
        stage = stage_of(name)
        if not stream.workers:
            yield f"{stage}: none"
        for worker in stream.workers:
            state = "alive" if worker.alive else "DEAD"
            in_hand = f", {counted(worker.pending, 'entry', 'entries')} in hand" if worker.pending else ""
            yield f"{stage} {worker.name}: {state}, heard of {seconds_text(worker.silent_s)} ago{in_hand}"
    for producer in status.producers:
        heard = seconds_text(producer.silent_s)
        state = {"open": "alive", "lost": "DEAD"}.get(producer.state, producer.state)
        plays = "" if producer.rollouts is None else f", {counted(producer.rollouts, 'rollout')} open"
        if producer.rollouts:
            plays += f", one without a turn for {seconds_text(producer.turn_s or 0)}"
        yield f"producer {producer.name}: {state}, heard of {heard} ago{plays}"


def _trainer_line(status: Status) -> str:
    trainer = status.trainer
    if trainer.state == "none":
        return "trainer: none has taken the run"
    got = "no batch yet"
    if trainer.batch is not None:
        got = f"got batch {trainer.batch} {seconds_text(trainer.batch_s or 0.0)} ago"
    if trainer.is_alive:
        size = trainer.world_size
        ranks = "" if size is None else f", {trainer.ranks_alive} of {counted(size, 'rank')}"
        if (trainer.silent_s or 0.0) > HEARD_S:
            did = "trained on it then" if trainer.state == "trains" else "waited for the next one"
            return f"trainer: silent for {seconds_text(trainer.silent_s or 0.0)}, {got}, {did}"
        doing = "trains on it"
        if trainer.state != "trains":
            reasons = reasons_of(status) or [ordinary_wait(status)]
            doing = f"waits for batch {trainer.version} ({reasons[0].text})"
        return f"trainer: alive{ranks}, {got}, {doing}"
    state = {"lost": "DEAD", "left": "has left", "ended": "has seen the end of the run"}[trainer.state]
    return f"trainer: {state}, heard of {seconds_text(trainer.silent_s or 0.0)} ago, {got}"
