"""What a run has of its prompts, as rank 0, groupers, commands and observers read and change it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ..errors import StreamadvError
from ..run import Run, Shard
from ..store.replies import as_count, as_int, as_text
from ..store.scripts import run_script
from .spec import PREFIX, PromptSet
from .steps import START, Lease, end, give_back

ENDED: Final = "ended"
ENTRY: Final = re.compile(r"([0-9]{1,15}) ([0-9]{1,15}) (\S+)(?: (.*) ([0-9]{1,15}))?", re.DOTALL)
#: The nonce of an entry that waits to be played again.
NOBODY: Final = "-"
#: The nonce of an entry whose group has ended, nobody knows how.
GONE: Final = "ended"
#: Ends of groups carried in one call.
PAGE: Final = 256
#: Leases given back in one call.
SLICE: Final = 256


@dataclass(frozen=True)
class Stored:
    """A set of prompts at one moment. What no process of the run has written is left out."""

    prompts: PromptSet
    born: str
    """Id of what the run has of it: another one after the run has lost it."""
    following: list[int]
    """Of each source the first position that was never begun."""
    entries: dict[str, str]
    """Prompt -> entry of each that was begun and has not ended."""
    ended: list[str]
    """Prompts that have ended, and are not below `following`."""
    counters: dict[str, int]
    """'<what> <source> <epoch>' -> number."""
    given_up: int
    """How many prompts were ever given up."""
    shares: dict[str, float]
    """Of each source the weight by which its prompts are begun now."""
    is_back: bool = False
    """Whether some have ever come back, because a trainer went on from an older checkpoint."""

    @property
    def unbegun(self) -> int:
        """Prompts that nobody has begun."""
        in_play = sum(
            int(position) >= self.following[int(source) - 1]
            for source, position in (item.split() for item in self.entries)
        )
        return sum(self.prompts.totals) - sum(self.following) - len(self.ended) - in_play

    @property
    def is_over(self) -> bool:
        return not (self.unbegun or self.entries)

    def of(self, *nonces: str) -> list[str]:
        """Prompts whose entries have one of these instead of the nonce of a lease."""
        return [item for item, entry in self.entries.items() if entry.split(" ")[2] in nonces]

    def leases(self, items: Iterable[str]) -> list[Lease]:
        return [Lease(item, self.entries[item]) for item in items]

    def group_id(self, item: str) -> str:
        """Of the try that counts."""
        return self.prompts.group_id(item, int(self.entries[item].partition(" ")[0]))


def read_sets(run: Run) -> list[PromptSet]:
    """What the run's producers have said of their prompts, by name."""
    found: Any = run.connection.scripts.hgetall(run.keys.home.prompts)
    sets = []
    for name, text in sorted(found.items()):
        try:
            prompts = PromptSet.from_text(text.decode(errors="replace"))
        except ValueError:
            continue
        if prompts.name.encode() == name:
            sets.append(prompts)
    return sets


def read(run: Run, prompts: PromptSet) -> Stored:
    """The set as it is now.

    It has two halves: both are read again if a prompt was begun or has ended meanwhile, since MULTI is refused above
    maxmemory. They come over one connection, since a server that is replaced may have lost one of them.
    """
    home = run.keys.home
    state: Any = None
    now: Any = {}
    while state != now:
        pipe = run.connection.scripts.pipeline(transaction=False)
        pipe.hgetall(home.prompt_state(prompts.name))
        pipe.hgetall(home.prompt_entries(prompts.name))
        pipe.hgetall(home.prompt_state(prompts.name))
        state, stored, now = pipe.execute()
    totals = prompts.totals
    entries, ended = {}, []
    for key, value in stored.items():
        item, entry = key.decode(errors="replace"), value.decode(errors="replace")
        if not prompts.has(item):
            continue
        if entry == ENDED:
            ended.append(item)
        elif ENTRY.fullmatch(entry):
            entries[item] = entry
    following = [
        min(total, as_count(state.get(b"next:%d" % source))) for source, total in enumerate(totals, 1)
    ]
    counters = {
        key.decode(errors="replace"): as_int(value) or 0
        for key, value in state.items()
        if key.count(b" ") == 2
    }
    born = state.get(b"born", b"").decode(errors="replace")
    shares = dict(zip(prompts.sources, prompts.weights.values(), strict=True))
    for number, source in enumerate(prompts.sources, 1):
        with suppress(ValueError):
            weight = float(state.get(b"weight:%d" % number, b""))
            shares[source] = weight if 0 <= weight < math.inf else shares[source]
    given_up = as_count(state.get(b"given_up"))
    is_back = b"is_back" in state
    return Stored(prompts, born, following, entries, ended, counters, given_up, shares, is_back)


def give_back_of_lost(run: Run, first_alive: Mapping[bytes, int]) -> int:
    """Give back the leases of producers that are lost or have been started again. Returns how many.

    first_alive: name of a producer -> its first instance that may be alive. Leases of one that is not there stay until
    the trainer has nothing else to wait for (`batch.prompts`).
    """
    given = 0
    for prompts in read_sets(run):
        stored, lost = read(run, prompts), list[str]()
        for item, entry in stored.entries.items():
            match = ENTRY.fullmatch(entry)
            if match and match[5] is not None and int(match[5]) < first_alive.get(match[4].encode(), 0):
                lost.append(item)
        for start in range(0, len(lost), SLICE):
            leases = stored.leases(lost[start : start + SLICE])
            given += run_script(run.connection.scripts, give_back(run.keys.home, prompts.name, leases))
    return given


def carry_ends(run: Run, *, again: bool = False) -> list[PromptSet]:
    """Carry the ends of groups to their prompts in the home shard. Returns the sets.

    again: also what was carried, which a server may have lost since.
    """
    sets = read_sets(run)
    for prompts in sets:
        for shard in run.shards:
            _carry(run, prompts, shard, again)
    return sets


def _carry(run: Run, prompts: PromptSet, shard: Shard, again: bool) -> None:
    def note(ends: bytes, known: str, last: str) -> str:
        """Returns the last end known: another one than `last` if somebody else was at it."""
        call = end(run.keys.home, prompts, ends.decode(errors="replace"), (shard.index, known, last), again)
        return as_text(run_script(run.connection.scripts, call))

    known = START if again else note(b"", START, START)
    is_more = True
    while is_more:
        last, ends, is_more = shard.call("read_prompt_ends", [known, PAGE])
        if (last := as_text(last)) == known:
            break
        known = note(ends, known, last)
        is_more = is_more or known != last


def check_requeue(run: Run, group_id: str) -> None:
    """Raises StreamadvError if the prompt of a dead group has ended otherwise, or is played again by now."""
    if not group_id.startswith(PREFIX):
        return
    for prompts in carry_ends(run):
        tried = prompts.parse(group_id)
        if tried is None:
            continue
        stored, home = read(run, prompts), run.keys.home
        entry = stored.entries.get(tried.item, "")
        given_up: Any = run.connection.scripts.zscore(
            home.prompt_given_up(prompts.name), f"{tried.item} {tried.number} dead"
        )
        number, failures, nonce, *_ = [*entry.split(" "), "", "", ""]
        # Without a failure it waits since a checkpoint was loaded.
        waits = number == str(tried.number + 1) and nonce == NOBODY and failures != "0"
        if given_up is not None or waits:
            return
        raise StreamadvError(
            f"group {group_id!r} cannot be requeued: its prompt is played again, or has ended: purge the letter, "
            f"and see `streamadv prompts show {prompts.name}`"
        )
