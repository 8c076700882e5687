"""Which groups go into batch k: the rules, as pure functions."""

from __future__ import annotations

import re
import secrets
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..grouping.groups_log import LoggedGroup
from .record import BatchRecord

BATCH_ID: Final = re.compile(r"[0-9]+-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class NamingRules:
    """What decides whether a group goes into a batch."""

    drop_after: int | None  # versions
    needs: frozenset[str] = frozenset()  # columns that producers must have pushed
    trained: Container[str] = frozenset()  # ids of the groups in the weights
    rolled_back_above: int | None = None  # version restored by load_state_dict
    #: Epoch that load_state_dict took. Epochs taken again after a restart of the server do not count.
    branch: int = 0

    def reason_against(self, group: LoggedGroup, k: int) -> str | None:
        """Why the group is dropped instead of trained on at version k, or None."""
        if group.malformed:
            return "malformed"
        if group.group_id in self.trained:
            return "trained"
        if group.problem is not None:
            return "dead:undecodable"
        restored = self.rolled_back_above
        if (
            restored is not None
            and group.begun_epoch < self.branch
            and group.version is not None
            and group.version > restored
        ):
            return "rolled_back"
        staleness = group.staleness(k)
        if self.drop_after is not None and staleness is not None and staleness > self.drop_after:
            return "stale"
        if any(not self.needs <= set(member.columns) for member in group.references):
            return "dead:missing_column"
        return None


def choose(
    candidates: Iterable[LoggedGroup], k: int, batch_groups: int, rules: NamingRules
) -> tuple[list[LoggedGroup], list[tuple[LoggedGroup, str]]]:
    """The first `batch_groups` groups fit for batch k, and those before them to be dropped, with the reason."""
    fit: list[LoggedGroup] = []
    unfit: list[tuple[LoggedGroup, str]] = []
    for group in candidates:
        if len(fit) == batch_groups:
            break
        reason = rules.reason_against(group, k)
        if reason is None:
            fit.append(group)
        else:
            unfit.append((group, reason))
    return fit, unfit


def make_record(k: int, epoch: int, groups: Sequence[LoggedGroup], **decided: Any) -> BatchRecord:
    """The record of batch k. Groups are sorted by id, so that nothing depends on the order of arrival."""
    ordered = sorted(groups, key=lambda group: group.group_id)
    return BatchRecord(
        k=k,
        id=f"{k}-{secrets.token_hex(6)}",
        epoch=epoch,
        groups=[group.pointer for group in ordered],
        **decided,
    )
