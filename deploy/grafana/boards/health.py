"""The first rows of every board: is the run healthy, and if not, why."""

from __future__ import annotations

from typing import Final

from .panels import Panel, now
from .promql import Target, greatest, or_zero, selector, total

#: Reasons to wait in a run where all is well.
ORDINARY: Final = 'reason!~"pacing|groups_coming|computing"'
YES_NO: Final = {"0": "no", "1": "yes"}
RED_GREEN: Final = ((None, "red"), (1, "green"))
MANY_S: Final = ((None, "green"), (60, "orange"), (120, "red"))
SHARE_USED: Final = ((None, "green"), (0.8, "orange"), (0.9, "red"))
#: In place of facts of a run that cannot be read: neither a good value nor a bad one.
UNKNOWN: Final = "unknown"
#: Runs that any process works for, at 0.
RUNS: Final = f"0 * count by (run) ({selector('build_info')})"


def health() -> list[Panel]:
    """The panels."""
    return [
        now(
            "Firing alerts",
            "short",
            "Alerts of deploy/prometheus/rules that fire now.",
            "Each has an entry in docs/reference/alerts.md: what it means, what to look at, what to do. Without the "
            "rules loaded nothing ever shows here.",
            Target(
                'max by (alertname) (ALERTS{alertname=~"Streamadv.*", alertstate="firing", run=~"$run|"})',
                "{{alertname}}",
            ),
            width=8,
            steps=((None, "green"), (1, "red")),
            none="none",
            names=True,
        ),
        now(
            "Why nothing moves",
            "short",
            "Reasons why the run, or a process of it, waits, but those of a run where all is well.",
            "Any name here is worth a look: docs/reference/reasons.md has its meaning and remedy, and the "
            "board Flow who waits since when. With the run unreadable, only what processes say of themselves shows.",
            Target(
                f"max by (reason) ({selector('run_blocked', ORDINARY)} == 1)"
                f" or max by (reason) ({selector('blocked', ORDINARY)} == 1)",
                "{{reason}}",
            ),
            width=8,
            steps=((None, "green"), (1, "orange")),
            none="all moves",
            names=True,
        ),
        now(
            "Trainer",
            "short",
            "What the trainer does: waits or trains; none has taken the run; lost, left, or the run has ended.",
            "lost: silent for 30 s without having said so: see its log, start it again from its checkpoint. "
            "unknown: the run cannot be read.",
            Target(f"max by (state) ({selector('run_trainer')} == 1)", "{{state}}"),
            width=4,
            none=UNKNOWN,
            names=True,
        ),
        now(
            "Trainer waits",
            "s",
            "How long the trainer has waited for its next batch, at this moment and by its own clock.",
            "Above a minute or two: read Why nothing moves. no trainer: none answers its scrape.",
            Target(greatest("waiting_seconds", 'stage="trainer"'), "waits"),
            width=4,
            steps=MANY_S,
            none="no trainer",
        ),
        now(
            "Run can be read",
            "short",
            "Whether a process that exports the run's facts (grouper, exporter) reads them from the server.",
            "no: none of them runs, or the server does not answer. Everything below that is of the run is then blank. "
            "Look at the server, then start `streamadv exporter` or a grouper.",
            Target(or_zero(f"min (max by (run) ({selector('run_readable')}) or {RUNS})"), "readable"),
            width=4,
            steps=RED_GREEN,
            words=YES_NO,
        ),
        now(
            "Ledger balanced",
            "short",
            "pushed = trained + dropped + dead + queued + in flight, and the counters agree with what is stored.",
            "no: `streamadv status --check` says where; please report it. unknown: the run cannot be read.",
            Target(f"min ({selector('run_balanced')})", "balanced"),
            width=4,
            steps=RED_GREEN,
            words=YES_NO,
            none=UNKNOWN,
        ),
        now(
            "Fullest memory",
            "percentunit",
            "The greater of: live and reserved bytes of max_bytes; the server's memory of its maxmemory.",
            "Above 90 % producers wait for commits, or pushes are refused: commit more often, or raise the limit. "
            "unknown: the run cannot be read.",
            Target(f"max ({share_of_budget()} or {share_of_server()})", "used"),
            width=4,
            steps=SHARE_USED,
            none=UNKNOWN,
        ),
        now(
            "Silent processes",
            "short",
            "Targets of Prometheus' job streamadv that do not answer their scrape.",
            "Not 0: the process has died or hangs: `up` on the board Workers and server names it. One that was taken "
            "out of the targets does not count.",
            Target('count (up{job="streamadv"} == 0) or vector(0)', "silent"),
            width=4,
            steps=((None, "green"), (1, "red")),
        ),
        now(
            "Producers alive",
            "short",
            "Producers that were heard of in the last 30 s and have not finished.",
            "0: nothing comes in any more. Start producers, or see why they died. unknown: the run cannot be read.",
            Target(total("run_producers", 'state="open"'), "alive"),
            width=4,
            steps=((None, "orange"), (1, "green")),
            none=UNKNOWN,
        ),
        now(
            "Oldest open group",
            "s",
            "How long the oldest group that has not ended is open.",
            "Near the group deadline (3600 s unless set): a rollout does not come, and its group will be lost. See "
            "What open groups lack on the board Flow. unknown: the run cannot be read.",
            Target(greatest("run_oldest_open_group_seconds"), "open for"),
            width=4,
            steps=((None, "green"), (1800, "orange"), (3300, "red")),
            none=UNKNOWN,
        ),
    ]


def share_of_budget() -> str:
    """Live and reserved bytes of max_bytes."""
    payloads = selector("run_payload_bytes", 'kind=~"live|reserved"')
    used = f"sum by (run) (max by (run, kind) ({payloads}))"
    return _labelled(f"{used} / {greatest('run_max_bytes', by='run')}", "max_bytes")


def share_of_server() -> str:
    """The server's memory of its maxmemory."""
    used = greatest("run_server_used_memory_bytes", by="run")
    return _labelled(f"{used} / {greatest('run_server_maxmemory_bytes', by='run')}", "maxmemory")


def _labelled(expr: str, limit: str) -> str:
    """The series with the label `of`, so that `or` keeps both of a run."""
    return f'label_replace({expr}, "of", "{limit}", "", "")'
