"""Lease a prompt, give it back, tell how its group has ended: calls of scripts, and generators that yield them.

Producers carry these out among their own steps, and `stored.py` does it for all others.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from .. import doors
from ..errors import SettingError
from ..store.keys import RunKeys, ShardKeys
from ..store.scripts import ScriptCall, script_call
from .figures import ends_of, parse_figures
from .spec import PromptSet

T = TypeVar("T")
ScriptSteps = Generator[ScriptCall, Any, T]

#: Ends read in one call for `select`.
READ: Final = 2048
#: Prompts leased in one call. A producer that holds some back holds up nobody: there is much more for the others.
MOST_LEASED: Final = 32
LEFT_PER_LEASE: Final = 64
#: Before the first entry of a stream.
START: Final = "0-0"


class Lease(NamedTuple):
    """A prompt that a producer plays: what it is, and the entry that says so."""

    item: str
    entry: str

    @property
    def number(self) -> int:
        """Of the try."""
        return int(self.entry.partition(" ")[0])


def describe(keys: ShardKeys, prompts: PromptSet) -> ScriptSteps[None]:
    """Agree on what these prompts are. Raises SettingError if the run has others under the name."""
    args = [prompts.name, prompts.text, doors.random_bytes(8).hex()]
    reply = yield script_call("describe_prompts", keys, args, **_keys(prompts.name, "state"))
    text = reply.decode(errors="replace")
    try:
        difference = prompts.difference(PromptSet.from_text(text))
    except ValueError:
        difference = "what the run has cannot be read"
    if not difference:
        prompts.say_as(text)
        return
    raise SettingError(
        f"prompts {prompts.name} of this producer are not those of the run: {difference}: give all producers the same, "
        "or another name="
    )


def lease(keys: ShardKeys, prompts: PromptSet, mode: str, nonce: str, owner: str) -> ScriptCall:
    """mode: lease, repeat or ask."""
    args = [prompts.name, prompts.text, mode, nonce, owner, MOST_LEASED, LEFT_PER_LEASE, prompts.select]
    args += prompts.lease_args
    return script_call("lease_prompt", keys, args, **_keys(prompts.name, "state", "entries", "again"))


def skip(keys: ShardKeys, prompts: PromptSet, leases: Sequence[Lease]) -> ScriptCall:
    """End those of these prompts that were solved often enough."""
    args: list[Any] = [prompts.skip_solved]
    for each in leases:
        source, epoch, index = prompts.locate(*map(int, each.item.split()))
        args += [*each, epoch, prompts.overall(source, index)]
    return script_call("skip_prompts", keys, args, **_keys(prompts.name, "state", "entries", "solved"))


def select(keys: ShardKeys, prompts: PromptSet, period: int, weights: Mapping[str, float]) -> ScriptCall:
    """Prompts are begun in these shares, unless others were selected for this period."""
    args = [period, *(float(weights[source]) for source in prompts.sources)]
    return script_call("select_prompts", keys, args, **_keys(prompts.name, "state"))


def read_ends(keys: RunKeys) -> ScriptSteps[str]:
    """How the last groups of prompts in all shards have ended: lines for `figures.ends_of`."""
    pages = []
    for shard in keys.shards:
        last, is_more = START.encode(), 1
        while is_more:
            last, page, is_more = yield script_call("read_prompt_ends", shard, [last, READ])
            pages.append(page)
    return b"\n".join(pages).decode(errors="replace")


def give_back(
    keys: ShardKeys, name: str, leases: Sequence[Lease], nonce: str = "", what: str = "again"
) -> ScriptCall:
    """Somebody else has to play these prompts, and those of the lease with this nonce, to which there was no answer.

    what: 'ended': nobody has to, as their groups have ended, and how is still to be told.
    """
    args = [what, nonce, *(part for lease in leases for part in lease)]
    return script_call("leave_prompts", keys, args, **_keys(name, "entries", "again"))


def end(
    keys: ShardKeys,
    prompts: PromptSet,
    ends: str,
    read: tuple[int, str, str],
    again: bool,
) -> ScriptCall:
    """Ends of groups, as lines of `prompt_ends`. read: shard, last entry known before, last one of these."""
    args: list[Any] = [prompts.retries, *read, "repeat" if again else "check", prompts.skip_solved]
    alike: object = None  # what the ends in the last argument share
    for tried, outcome, figures in ends_of(prompts, ends):
        shared = (tried.source_number, tried.epoch, tried.number, outcome)
        if shared != alike:
            alike = shared
            args.append(f"{tried.source_number} {tried.epoch} {tried.number} {outcome}")
        args[-1] += f" {tried.position}"
        if prompts.skip_solved:  # '/<number of the prompt among all>/<1 if it was solved, else 0>'
            known = parse_figures(figures)
            is_solved = known is not None and known.least >= prompts.best_reward
            args[-1] += f"/{prompts.overall(tried.source, tried.prompt)}/{int(is_solved)}"
    kinds = ("state", "entries", "again", "given_up", "solved")
    return script_call("end_prompts", keys, args, **_keys(prompts.name, *kinds))


def _keys(name: str, *kinds: str) -> Mapping[str, Any]:
    return {f"prompt_{kind}": name for kind in kinds}
