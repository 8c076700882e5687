"""The one list of reasons for which a process waits.

Producers, workers, the trainer, commands, `streamadv status` and the watchdog name a wait by these reasons.
`status/causes.py` finds some of them in what a run stores. The waiting process itself meets the others: a server that
does not answer, a refused push.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple


class Kind(NamedTuple):
    """One entry of the list, as docs/reference/reasons.md shows it."""

    meaning: str
    remedy: str


REASONS: Final[dict[str, Kind]] = {
    # What a run lacks.
    "no_producer": Kind(
        "no producer has joined the run, or none is alive", "start one, with the same URL and run"
    ),
    "producers_idle": Kind(
        "producers are alive and neither begin groups nor push", "look at what the rollout processes wait for"
    ),
    "incomplete_groups": Kind(
        "open groups lack rollouts and nothing is pushed",
        "push what is missing, or fail() or cancel() what will not come; else they end at group_deadline_s",
    ),
    "missing_scores": Kind(
        "open groups lack rewards",
        "push with a reward, bring it by producer.score(), or give the run scorers; null = unscorable",
    ),
    "no_grouper": Kind("no grouper asks for pushed packets", "start `streamadv worker grouper`"),
    "no_scorer": Kind("no process of a scorer asks for its packets", "start the scorer of that name"),
    "no_advantage_worker": Kind(
        "no advantage worker asks for the work of named batches", "start `streamadv worker advantage`"
    ),
    "unknown_estimator": Kind(
        "an advantage worker was given a batch whose chain it does not know, and leaves it to others",
        "start it with --import MODULE, or install the package that brings the estimator",
    ),
    "failing_chain": Kind(
        "the chain fails on every group of a batch, so the fault is not in the data; advantage workers try again",
        "start the trainer with another chain, which takes over what was not delivered, or correct the estimator and "
        "restart its workers",
    ),
    "backlog": Kind(
        "a stage is at work, and slower than what comes", "start more of its processes, or look at their logs"
    ),
    "no_trainer": Kind(
        "no trainer has taken the run (pacing is by bytes alone then), or the one that had it is silent or has left",
        "start the trainer",
    ),
    "no_weights": Kind(
        "no trainer has said where the weights of a version lie",
        "start the trainer, which says so by queue.open(weights=URI) or queue.trained(batch, weights=URI)",
    ),
    "unmarked": Kind(
        "a trainer that marks batches itself has not marked those it has got",
        "call queue.trained(batch) after each update, or raise prefetch to read further ahead",
    ),
    "other_rank": Kind(
        "another rank of the job has not done its part yet", "look at that rank; all need the same job id"
    ),
    # What happens to all that comes.
    "filtered": Kind(
        "every group is filtered away", "the tasks are too easy or too hard, or turn the filter off"
    ),
    "stale": Kind(
        "every group is too old for the batch it could be in",
        "raise drop_after or max_staleness, or push the model_version that a rollout was played with",
    ),
    "rolled_back": Kind(
        "every group is of versions behind the checkpoint that was loaded",
        "restart the rollouts, or load with keep_rolled_back=True",
    ),
    "dead": Kind(
        "every group becomes a dead letter", "see `streamadv dead list` for what is wrong with them"
    ),
    "ended_short": Kind(
        "every group ends without enough usable rollouts (expired, failed or cancelled)",
        "raise group_deadline_s, look at why rollouts fail, or set partial_min_usable",
    ),
    # Admission.
    "pacing": Kind(
        "producers are as far ahead as max_staleness allows",
        "wait for the trainer, or raise max_staleness; `streamadv status` says whether a trainer is alive",
    ),
    "max_bytes": Kind(
        "live and reserved bytes fill max_bytes",
        "wait for commits, or raise max_bytes",
    ),
    "batch_over_budget": Kind(
        "max_bytes holds fewer groups than a batch needs",
        "raise max_bytes, lower batch_groups, or set min_groups",
    ),
    "uncommitted": Kind(
        "batches are trained on and not committed: many since the run began, or so many that they fill max_bytes",
        "save a checkpoint every few batches, `with queue.checkpoint(folder) as path: ...`, or raise max_bytes",
    ),
    "archive": Kind(
        "groups that the archive has not got yet fill keep_bytes, in a run with the setting archive",
        "start `streamadv archive --to FOLDER`, look at why it is slow, or raise keep_bytes",
    ),
    "lost_groups_first": Kind(
        "a server came back without groups, which are admitted before new ones", "wait, or raise max_bytes"
    ),
    "unannounced": Kind(
        "the server does not let producers read what the trainer announces, so they ask for admission every 2 s",
        "give them the rights that `streamadv config acl` prints",
    ),
    "prompts_begun": Kind(
        "all prompts are begun, and some have not ended: a trained one ends when a checkpoint with it is saved",
        "wait for the trainer; after its loop it has to save one more, `with queue.checkpoint(folder) as path: ...`",
    ),
    "prompts_left": Kind(
        "prompts are left, and the producers that loop over them wait for others, were left in the middle, or had "
        "finished before an older checkpoint brought prompts back",
        "start another producer if nobody loops over them; else go on with the loop or close its iterator, and give "
        "each loop a thread or task of its own",
    ),
    # The server.
    "server_away": Kind("nothing answers at the URL", "start the server or correct the URL"),
    "name_resolution": Kind("the host name of the URL is not known", "correct the URL or the name service"),
    "server_hangs": Kind(
        "the server takes the connection and does not reply in time", "look at the server and its machine"
    ),
    "server_loading": Kind("the server reads its data after a start", "wait"),
    "server_busy": Kind("somebody's script keeps the server busy", "wait, or end it: SECURITY.md says how"),
    "failover": Kind("another server takes over, or a slot moves", "wait; look at Sentinels or the cluster"),
    "stream_end": Kind(
        "somebody has given a stream its last possible id, so that it takes no more entries",
        "what is in it is taken; once it is empty (`redis-cli XLEN KEY` says 0) delete it: `redis-cli DEL KEY`",
    ),
    "misconf": Kind(
        "the server refuses writes, since it cannot save its data", "make room on its disk and see its log"
    ),
    "noreplicas": Kind(
        "the server refuses writes, since replicas are missing", "start them, or lower min-replicas-to-write"
    ),
    "maxmemory": Kind(
        "the server is above its maxmemory and refuses pushes", "wait for commits, or raise maxmemory"
    ),
    # The ordinary course of things.
    "groups_coming": Kind("the groups of a batch are being produced", "wait; more producers shorten it"),
    "computing": Kind("the work of a batch is being computed", "wait; more advantage workers shorten it"),
}


@dataclass(frozen=True, slots=True)
class Reason:
    """Why somebody waits: one of REASONS, with the figures of this moment."""

    name: str
    text: str

    def remedy(self, run: str | None) -> str:
        """What to do about it, see `pasteable`."""
        return pasteable(REASONS[self.name].remedy, run)

    def line(self, run: str | None) -> str:
        """What blocks and what to do about it. run: None where no run is known yet."""
        return f"{self.text}: {self.remedy(run)} [{self.name}]"


_COMMAND: Final = re.compile(r"`(streamadv [^`]*)`")


def pasteable(text: str, run: str | None) -> str:
    """`text`, with the run's name in each of its commands."""
    return text if run is None else _COMMAND.sub(rf"`\1 --run {run}`", text)


def listed(reasons: Sequence[Reason], run: str | None) -> str:
    """Reasons on one line."""
    return "; ".join(reason.line(run) for reason in reasons)
