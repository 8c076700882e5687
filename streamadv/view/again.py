"""The panel of a batch that is computed again: as it was, or by another chain, in words and figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, StreamadvError
from ..extras import TO_COMPUTE, require
from ..messages import one_line
from ..run import Run

if TYPE_CHECKING:
    from ..archive.compare import Change


@dataclass(slots=True)
class Again:
    """What came out."""

    chain: str
    """As it was asked for; "" = that of the batch."""
    about: list[str] = field(default_factory=list)
    """What was there of the batch, a line each."""
    verdict: str = ""
    is_same: bool | None = None
    """None with another chain."""
    problem: str = ""
    """Why it cannot be computed."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """By data source; the last one, of all of them, has the name "all"."""


def compute_again(run: Run, k: int, chain: str) -> Again:
    """Compute batch k again on this machine's processor. chain: a preset's name, or JSON; "" = as it was."""
    again = Again(chain)
    try:
        require("to compute a batch again", *TO_COMPUTE)
        import torch

        from ..archive.compare import compare, total, with_chain
        from ..archive.rewind import find_batch, first_difference, rewind
        from ..archive.source import RunSource

        source = RunSource(run)
        batch = find_batch(source, k)
        again.about = batch.about()
        record = with_chain(batch, _chain(chain)) if chain else None
        computed = rewind(source, batch, torch.device("cpu"), record)
        if record is None:
            difference = first_difference(batch, computed)
            again.is_same = difference is None
            again.verdict = f"first difference: {difference}" if difference else "bit-identical"
        else:
            changes = compare(source, batch, computed)
            of_all = total(changes.values())
            again.changes = {**changes, "all": of_all} if len(changes) > 1 else changes
            again.verdict = _in_words(of_all)
    except StreamadvError as error:
        again.problem = str(error)
    return again


def _chain(text: str) -> str | dict[str, Any]:
    if not text.lstrip().startswith("{"):
        return text.strip()
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise SettingError(f"chain is no JSON: {one_line(str(error))}") from None
    return found


def _in_words(change: Change) -> str:
    before, after = change.before, change.after
    learn = f"{after.groups} of {change.groups} groups would learn"
    learn += f" instead of {before.groups}" if after.groups != before.groups else ", as before"
    size = f"the effective sample size is {after.effective:,.0f} tokens"
    size += (
        f" instead of {before.effective:,.0f}" if round(after.effective - before.effective) else ", as before"
    )
    signs = f"{change.signs:,} of {change.compared:,} tokens turn from good to bad or back"
    return f"{learn}; {size}; {signs}"
