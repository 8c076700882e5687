"""How far a run is with its prompts, by set and source."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from ..prompts.stored import NOBODY, Stored, read, read_sets
from ..run import Run
from ..store.replies import as_text

#: Prompts that were given up, named by `streamadv prompts show`.
GIVEN_UP_SHOWN: Final = 1000


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """Prompts of one source over all epochs: each is in one of the last five."""

    name: str
    source: str
    prompts: int  # of one epoch
    epochs: int
    epoch: int  # that is begun now, from 0
    failures: dict[str, int]  # tries that were played again, by how their groups ended
    trained: int
    filtered: dict[str, int]  # by filter
    given_up: dict[str, int]  # by how the last try ended
    in_play: int  # begun, and not ended
    left: int  # not begun yet

    @property
    def total(self) -> int:
        return self.prompts * self.epochs


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt that is in play or was given up."""

    source: str
    epoch: int
    index: int
    tries: int
    state: str  # 'in play', 'again', or how its last try ended
    group_id: str


def read_progress(run: Run) -> list[SourceProgress]:
    """Of all sets of a run, by name and source."""
    return [line for prompts in read_sets(run) for line in progress_of(read(run, prompts))]


def progress_of(stored: Stored) -> list[SourceProgress]:
    """Of each source of a set."""
    prompts = stored.prompts
    lines = []
    for number, (source, length) in enumerate(prompts.sources.items(), 1):
        counts = Counter[str]()
        for counter, value in stored.counters.items():
            what, of, _ = counter.split(" ")
            counts[what] += value if of == str(number) else 0
        ended = sum(count for what, count in counts.items() if not what.startswith("again:"))
        mine = [item for item in stored.entries if item.startswith(f"{number} ")]
        total = length * prompts.epochs
        lines.append(
            SourceProgress(
                prompts.name,
                source,
                length,
                prompts.epochs,
                min(prompts.epochs - 1, stored.following[number - 1] // length),
                _by_reason(counts, "again"),
                counts["trained"],
                _by_reason(counts, "filtered"),
                _by_reason(counts, "given_up"),
                len(mine),
                max(0, total - ended - len(mine)),
            )
        )
    return lines


def read_lines(run: Run, stored: Stored) -> list[PromptLine]:
    """The prompts of a set that are in play or were given up, the latter first."""
    key = run.keys.home.prompt_given_up(stored.prompts.name)
    given_up: Any = run.connection.scripts.zrange(key, 0, GIVEN_UP_SHOWN - 1)
    lines = []
    for member in given_up:
        source, position, tried, *outcome = as_text(member).split(" ")
        item = f"{source} {position}"
        if stored.is_of(item) and tried.isdigit():
            lines.append(_line(stored, item, int(tried), " ".join(outcome)))
    for item, entry in sorted(stored.entries.items()):
        tried, _, nonce = entry.split(" ")[:3]
        lines.append(_line(stored, item, int(tried), "again" if nonce == NOBODY else "in play"))
    return lines


def _line(stored: Stored, item: str, tried: int, state: str) -> PromptLine:
    place = stored.prompts.locate(*map(int, item.split()))
    return PromptLine(*place, tried + 1, state, stored.prompts.group_id(item, tried))


def _by_reason(counts: Counter[str], kind: str) -> dict[str, int]:
    prefix = f"{kind}:"
    return {
        what.removeprefix(prefix): count
        for what, count in sorted(counts.items())
        if what.startswith(prefix) and count
    }
