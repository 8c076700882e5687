"""`streamadv status`: where everything is, whether the ledger adds up, who is alive."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from ..messages import printable
from ..run import Run, find_run
from ..run.manifest import Manifest
from ..status import Status, read_status
from ..status.audit import Audit, audit
from ..status.causes import reasons_of
from ..status.model import to_json
from ..store.retry import RETRYABLE, Outage
from . import FAILED, add_redis_options, add_wait_option, connect_once, settings_from

WATCH_SECONDS: Final = 1.0


def add_parser(subparsers: Any) -> None:
    """Add the `status` command to the command line."""
    parser = subparsers.add_parser(
        "status",
        help="shows depths, ages, the ledger and who is alive",
        description="Shows where every trajectory of a run is. The ledger is in trajectories: "
        "pushed = trained + dropped + dead + queued + in_flight.",
    )
    add_redis_options(parser)
    add_wait_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 unless the ledger adds up (holds while workers run)"
    )
    parser.add_argument(
        "--deep", action="store_true", help="with --check: walk over everything stored (for a quiet run)"
    )
    parser.add_argument("--watch", action="store_true", help="again every second until Ctrl-C")
    parser.set_defaults(run=show_status)


def show_status(arguments: argparse.Namespace) -> int:
    """Print the status; 1 when a check was asked for and failed."""
    if arguments.deep and not arguments.check:
        arguments.check = True
    outage = Outage("status")
    with connect_once(arguments, reading=True) as connection:
        run = find_run(connection, settings_from(arguments).run)
        while True:
            try:
                is_balanced = show(run, arguments)
            except RETRYABLE as error:
                if not arguments.watch:
                    raise
                outage.pause_after(error)
                continue
            outage.over()
            if not arguments.watch:
                return FAILED if arguments.check and not is_balanced else 0
            time.sleep(WATCH_SECONDS)


def show(run: Run, arguments: argparse.Namespace) -> bool:
    """Print the status once. Returns whether the run is balanced."""
    run.refresh()
    status = read_status(run)
    audited = audit(run) if arguments.deep else None
    if audited is not None:
        status = replace(status, problems=[*status.problems, *audited.problems])
    if arguments.json:
        reasons = reasons_of(status)
        more = {
            "waiting": [str(reason) for reason in reasons],
            "blocked": [reason.name for reason in reasons],
            "ignored": run.manifest.ignored,
            **({"payloads": audited.payloads, "uncounted": audited.uncounted} if audited else {}),
        }
        print(json.dumps({**status.to_json(), **more}), flush=True)
    else:
        lines = lines_of(status, run.manifest, audited)
        print("\n".join(map(printable, lines)), flush=True)
    return status.balanced


def lines_of(status: Status, manifest: Manifest, audited: Audit | None = None) -> list[str]:
    """The status for people. audited: what a walk over everything stored has found."""
    lines = [
        *_ledger_lines(status),
        *_group_lines(status, manifest),
        *_stream_lines(status),
        *(f"IGNORED {what}" for what in manifest.ignored),
        *(f"WAITING {reason}" for reason in reasons_of(status)),
    ]
    if status.balanced:
        lines.append("ledger balanced" + (", nothing stored is missing or orphaned" if audited else ""))
    if audited is not None:
        lines.append(str(audited))
    lines += [f"PROBLEM {problem}" for problem in status.problems]
    trainer = status.trainer
    version = "none yet" if trainer.version is None else trainer.version
    return [
        f"run {status.run}: {status.shards} shard(s), version {version}, committed {trainer.committed}, "
        f"batches named {trainer.batches}",
        *(f"  {line}" for line in lines),
    ]


def _ledger_lines(status: Status) -> Iterator[str]:
    ledger, places = status.ledger, to_json(status.places)
    yield (
        f"pushed {ledger.pushed} = trained {ledger.trained} + dropped {sum(ledger.dropped.values())} "
        f"+ dead {sum(ledger.dead.values())} + queued {ledger.queued} + in_flight {ledger.in_flight}"
        f"   (duplicates refused: {status.duplicates})"
    )
    for title, counts in (("queued", places), ("dropped", ledger.dropped), ("dead", ledger.dead)):
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
    budget = "" if manifest.max_bytes is None else f" of max_bytes {manifest.max_bytes}"
    yield (
        f"bytes: live {used.live}, reserved {used.reserved}{budget}; {status.place_bytes} for each new rollout"
    )
    for each in status.evaluations:
        version = "unknown" if each.version is None else each.version
        source = f" {each.data_source}" if each.data_source else ""
        yield f"evaluation{source}: version {version}, mean reward {each.mean:.4g} of {each.trajectories} rollouts"
    if staleness.mean is not None:
        yield f"staleness of waiting groups: mean {staleness.mean:.2f}, max {staleness.max}"


def _stream_lines(status: Status) -> Iterator[str]:
    for name, stream in status.streams.items():
        age = "" if stream.oldest_age_s is None else f", oldest {stream.oldest_age_s:.1f} s"
        yield (
            f"stream {name}: length {stream.length}, pending {stream.pending}, lag {stream.lag}, "
            f"consumers {stream.consumers}{age}"
        )
    for producer in status.producers:
        yield f"producer {producer.name}: {producer.state}, last heard of {producer.silent_s} s ago"
