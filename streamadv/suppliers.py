"""Where a column comes from: each one that the chain needs is pushed, or made late, by the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .algorithms.chain import Chain
from .errors import SettingError

#: Columns only the weights being trained can fill: they need a supplier, or producers that push them.
LATE_COLUMNS = frozenset({"old_log_probs", "values"})


def pushed_columns(chain: Chain, late: Iterable[str], pushed: Sequence[str]) -> frozenset[str]:
    """Columns that producers have to push. Raises SettingError when a needed column has no supplier."""
    made: set[str] = set()
    for step in chain.steps:
        for name in step.needs:
            if name in LATE_COLUMNS and name not in late and name not in pushed and name not in made:
                raise SettingError(
                    f"chain step {step.name} needs column {name}, nobody supplies it: "
                    f"pass late={{{name!r}: function}}, or pushed=[{name!r}] if producers push it"
                )
        made |= set(step.makes)
    return frozenset(name for name in chain.needs if name not in late)
