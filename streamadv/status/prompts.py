"""How far a run is with its prompts, by set and source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..prompts.figures import END, TriesSeen, by_prompt
from ..prompts.stored import NOBODY, Stored, read, read_sets
from ..run import Run
from ..run.run import by_reason
from ..store.replies import as_text

#: Prompts that were given up, named by `streamadv prompts show`.
GIVEN_UP_SHOWN: Final = 1000
TRAINED: Final = "trained"
AGAIN: Final = "again"
IN_PLAY: Final = "in play"
#: How a prompt ends, as counters are named.
ENDED: Final = (TRAINED, "filtered", "given_up", "skipped")
#: Ends of groups in a shard, the last ones, that the time to the end is reckoned from; fewer than LEAST tell nothing.
RECENT: Final = 200
LEAST: Final = 10
#: Prompts of a source that are named because they were given up.
NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """Prompts of one source over all epochs: each is trained, filtered, given up, skipped, in play, or left."""

    name: str
    source: str
    prompts: int  # of one epoch
    epochs: int
    epoch: int  # that is begun now, from 0
    failures: dict[str, int]  # tries that were played again, by how their groups ended
    trained: int
    filtered: dict[str, int]  # by filter
    given_up: dict[str, int]  # by how the last try ended
    skipped: int  # solved in the epochs before
    in_play: int  # begun, and not ended
    waiting: int  # of these: to be played again, and nobody plays them
    left: int  # not begun yet
    seconds_left: float | None  # until the whole set has ended, at the pace of the last groups
    failing: dict[str, int]  # index of a prompt that was given up -> in how many epochs, of the 5 with most
    weight: float  # by which its prompts are begun now, beside those of the other sources

    @property
    def total(self) -> int:
        return self.prompts * self.epochs


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt that is in play or was given up."""

    source: str
    epoch: int
    index: int
    tries: int  # that count towards `retries`, with the one in play
    state: str  # 'in play', 'again', or how its last try ended
    group_id: str


def read_progress(run: Run, now_ms: int) -> list[SourceProgress]:
    """Of all sets of a run, by name and source. now_ms: of the server."""
    sets = read_sets(run)
    pace = _read_pace(run, now_ms) if sets else {}
    return [
        line
        for prompts in sets
        for line in progress_of(
            read(run, prompts), pace.get(prompts.name, 0.0), _read_given_up(run, prompts.name)
        )
    ]


def read_ends(run: Run) -> str:
    """How the last groups of prompts have ended, up to 4,096 of each shard: for `by_source` and `by_prompt`."""
    lines = []
    for keys in run.keys.shards:
        found: Any = run.connection.scripts.xrevrange(keys.prompt_ends)
        lines += [fields.get(b"end", b"") for _, fields in reversed(found)]
    return b"\n".join(lines).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TriedPrompt:
    """A prompt with a group among the last ones."""

    name: str  # of the set
    source: str
    index: int
    seen: TriesSeen


def tried(run: Run) -> list[TriedPrompt]:
    """Prompts with a group among the last ones: what is dropped most comes first, then what has the lowest reward."""
    ends = read_ends(run)
    found = [
        TriedPrompt(prompts.name, *place, seen)
        for prompts in read_sets(run)
        for place, seen in by_prompt(prompts, ends).items()
    ]
    return sorted(found, key=lambda each: (-each.seen.dropped, each.seen.reward_mean or 0.0))


def _read_given_up(run: Run, name: str) -> list[str]:
    """'<source> <position> <try> <outcome>' of prompts that were given up, the first ones first."""
    found: Any = run.connection.scripts.zrange(run.keys.home.prompt_given_up(name), 0, GIVEN_UP_SHOWN - 1)
    return list(map(as_text, found))


def _read_pace(run: Run, now_ms: int) -> dict[str, float]:
    """Of each set its groups that end in a second; a set with too few of the last ends is left out."""
    pace, count = dict[str, float](), Counter[str]()
    for keys in run.keys.shards:
        ends: Any = run.connection.scripts.xrevrange(keys.prompt_ends, count=RECENT)
        for _, fields in ends:
            found = END.fullmatch(fields.get(b"end", b"").decode(errors="replace"))
            name = found[1] if found else ""
            count[name] += 1
            pace[name] = pace.get(name, 0.0) + 1000 / max(1, now_ms - int(ends[-1][0].partition(b"-")[0]))
    return {name: pace[name] for name in count if count[name] >= LEAST}


def progress_of(stored: Stored, pace: float = 0.0, given_up: Sequence[str] = ()) -> list[SourceProgress]:
    """Of each source of a set. pace: groups that end in a second. given_up: see `_read_given_up`."""
    prompts = stored.prompts
    failing = [Counter[str]() for _ in prompts.sources]
    for item in (line.rsplit(" ", 2)[0] for line in given_up):
        if stored.prompts.has(item):
            place = tuple(map(int, item.split()))
            failing[place[0] - 1][str(prompts.locate(*place)[2])] += 1
    counts = [_counts(stored, number) for number in range(1, len(prompts.sources) + 1)]
    ended, again, skipped = (
        sum(sum(of[kind] for of in counts) for kind in kinds) for kinds in (ENDED, (AGAIN,), ("skipped",))
    )
    remaining = sum(prompts.totals) - ended
    seconds = remaining * (ended - skipped + again) / ended / pace if pace and ended else None
    lines = []
    for number, (source, length) in enumerate(prompts.sources.items(), 1):
        of = counts[number - 1]
        in_play, waiting = (
            sum(item.startswith(f"{number} ") for item in items)
            for items in (stored.entries, stored.of(NOBODY))
        )
        lines.append(
            SourceProgress(
                prompts.name,
                source,
                length,
                prompts.epochs,
                min(prompts.epochs - 1, stored.following[number - 1] // length),
                by_reason(+of, AGAIN),
                of[TRAINED],
                by_reason(of, "filtered"),
                by_reason(of, "given_up"),
                of["skipped"],
                in_play,
                waiting,
                max(0, length * prompts.epochs - sum(of[kind] for kind in ENDED) - in_play),
                seconds,
                dict(failing[number - 1].most_common(NAMED)),
                stored.shares[source],
            )
        )
    return lines


def _counts(stored: Stored, number: int) -> Counter[str]:
    """Of a source: '<what>:<how>' -> number over all epochs, and of each what alone."""
    counts = Counter[str]()
    for counter, value in stored.counters.items():
        what, of, _ = counter.split(" ")
        if of == str(number):
            for name in {what, what.partition(":")[0]}:
                counts[name] += value
    return counts


def read_lines(run: Run, stored: Stored) -> list[PromptLine]:
    """The prompts of a set that are in play or were given up, the latter first."""
    lines = []
    for member in _read_given_up(run, stored.prompts.name):
        source, position, tried, *outcome = member.split(" ")
        item = f"{source} {position}"
        if stored.prompts.has(item) and tried.isdigit():
            lines.append(_line(stored, item, int(tried), stored.prompts.retries, " ".join(outcome)))
    for item, entry in sorted(stored.entries.items(), key=lambda each: list(map(int, each[0].split()))):
        tried, failures, nonce = entry.split(" ")[:3]
        state = AGAIN if nonce == NOBODY else IN_PLAY
        lines.append(_line(stored, item, int(tried), int(failures), state))
    return lines


def _line(stored: Stored, item: str, tried: int, failures: int, state: str) -> PromptLine:
    place = stored.prompts.locate(*map(int, item.split()))
    return PromptLine(*place, failures + 1, state, stored.prompts.group_id(item, tried))
