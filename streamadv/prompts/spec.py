"""What a run knows of a finite set of prompts, and the ids of its groups.

A prompt is known by the number of its source and its position there: position p is place p mod N of epoch p div N.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from numbers import Real
from typing import Any, Final, NamedTuple, TypeGuard

from ..errors import SettingError
from ..messages import brief, whole_number

#: What the id of a prompt's group begins with.
PREFIX: Final = "prompt:"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
SOURCE: Final = re.compile(r"[A-Za-z0-9._/-]{0,80}")
#: prompt:<name>:<source>:<epoch>:<index>:<try>
GROUP_ID: Final = re.compile(
    rf"{PREFIX}({NAME.pattern}):({SOURCE.pattern}):([0-9]{{1,9}}):([0-9]{{1,12}}):([0-9]{{1,9}})"
)
ITEM: Final = re.compile(r"([1-9][0-9]{0,5}) ([0-9]{1,15})")
SELECT: Final = re.compile(r"(?:(?:begun|version) [1-9][0-9]{0,14})?")
MOST_SOURCES: Final = 1000
MIN_WEIGHT: Final = 1e-9
#: What is given for each source, in words.
BY_SOURCE: Final = {"sources": "the number of prompts", "weights": "the weight"}
MOST: Final = 10**12  # prompts of a source, over all epochs: scripts count exactly


def identity(group_id: str) -> str:
    """What a trainer trains on once: of a prompt's group the prompt, whatever its try; of any other the group."""
    return _prompt_of(group_id) if group_id.startswith(PREFIX) else group_id


@lru_cache(8192)
def _prompt_of(group_id: str) -> str:
    return group_id.rpartition(":")[0] if GROUP_ID.fullmatch(group_id) else group_id


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a finite one, of Python or of numpy."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def plain(value: Any) -> Any:
    """A number as JSON has it; anything else as it is."""
    return float(value) if is_number(value) and not isinstance(value, int) else value


class Tried(NamedTuple):
    """A try of a prompt, as the scripts name it."""

    source_number: int
    """From 1."""
    position: int
    number: int
    epoch: int
    source: str
    prompt: int

    @property
    def item(self) -> str:
        return f"{self.source_number} {self.position}"


@dataclass(frozen=True)
class PromptSet:
    """A finite set of prompts as all its producers have it. The prompts themselves stay with them."""

    name: str
    sources: dict[str, int]
    """Name -> number of prompts; '' is the name of a source without one."""
    epochs: int
    shuffle: int | None
    weights: dict[str, float]
    retries: int
    fingerprint: str
    skip_solved: int = 0
    """In how many epochs running a prompt is solved that is left out from then on; 0 = none is."""
    best_reward: float = 1.0
    """A prompt is solved where all rewards of its group are at least this."""
    select: str = ""
    """When weights are selected anew: 'begun <prompts>', 'version <batches>', '' = never."""

    @cached_property
    def text(self) -> str:
        """As the run has it, in JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def say_as(self, text: str) -> None:
        """Have this text: what the run has of the same set, which another release may have written otherwise."""
        vars(self)["text"] = text

    @staticmethod
    @lru_cache(64)  # read again with every batch
    def from_text(text: str) -> PromptSet:
        """Raises ValueError for what no producer of the run has written."""
        try:
            return PromptSet(**json.loads(text)).checked()
        except (TypeError, KeyError, AttributeError, SettingError) as error:
            raise ValueError(str(error)) from None

    def checked(self) -> PromptSet:
        """Itself, with integers of Python. Raises SettingError for a wrong value."""
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise SettingError(
                f"prompts: name is {brief(self.name)}: use letters, digits, '.', '_' and '-', at most 40"
            )
        where = f"prompts {self.name}: "
        epochs = whole_number(where + "epochs", self.epochs, 1, 10**6)
        retries = whole_number(where + "retries", self.retries, 0, 10**6)
        skip_solved = whole_number(where + "skip_solved", self.skip_solved, 0, 9)
        shuffle = whole_number(where + "shuffle", self.shuffle, None, or_none=True)
        if not is_number(self.best_reward):
            raise SettingError(f"{where}best_reward is {brief(self.best_reward)}, needs a number")
        if not isinstance(self.select, str) or not SELECT.fullmatch(self.select):
            raise SettingError(f"{where}select is {brief(self.select)}, needs 'begun n' or 'version n'")
        if not self.sources:
            raise SettingError(f"{where}there is no source: give a sequence, or a mapping of names")
        if len(self.sources) > MOST_SOURCES:
            raise SettingError(f"{where}there are {len(self.sources)} sources: give at most {MOST_SOURCES}")
        for source, length in self.sources.items():
            if not isinstance(source, str) or not SOURCE.fullmatch(source):
                raise SettingError(
                    f"{where}a source is named {brief(source)}: use letters, digits, '.', '_', '-' and '/', at most 80"
                )
            if not isinstance(length, int) or not 0 < length * epochs <= MOST:
                raise SettingError(f"{where}source {source!r} has {length} prompts, needs 1 or more")
        self.check_weights(self.weights)
        return replace(self, epochs=epochs, shuffle=shuffle, retries=retries, skip_solved=skip_solved)

    def check_weights(self, weights: Mapping[str, float], least: float = MIN_WEIGHT) -> None:
        """Raises SettingError unless each source has a weight. least: of one; 0 = all but one may be 0."""
        if weights.keys() != self.sources.keys():
            raise SettingError(
                f"prompts {self.name}: weights are for {sorted(weights)}, the sources are {sorted(self.sources)}: "
                "give each source one"
            )
        for source, weight in weights.items():
            if not is_number(weight) or not least <= weight < 10**9:
                raise SettingError(
                    f"prompts {self.name}: the weight of {source!r} is {brief(weight)}, needs a number "
                    f"{'from' if least == 0 else 'above'} 0{' on' * (least == 0)}"
                )
        if not any(weights.values()):
            raise SettingError(f"prompts {self.name}: all weights are 0: give one source a number above 0")

    @cached_property
    def totals(self) -> list[int]:
        """Of each source its prompts over all epochs."""
        return [length * self.epochs for length in self.sources.values()]

    def has(self, item: str) -> bool:
        """Whether this names one of the prompts."""
        match = ITEM.fullmatch(item)
        source = int(match[1]) - 1 if match else 0
        return match is not None and source < len(self.totals) and int(match[2]) < self.totals[source]

    @cached_property
    def lease_args(self) -> list[Any]:
        """Of each source its total and its weight, for the script `lease_prompt`."""
        weights = [self.weights[source] for source in self.sources]
        return [part for pair in zip(self.totals, weights, strict=True) for part in pair]

    def difference(self, other: PromptSet) -> str:
        """The first value in which two differ, with both: one line."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if mine == theirs:
                continue
            if name in BY_SOURCE:
                source = min(key for key in {*mine, *theirs} if mine.get(key) != theirs.get(key))
                mine, theirs = mine.get(source), theirs.get(source)
                name = f"{BY_SOURCE[name]} of source {source!r}" if source else BY_SOURCE[name]
            return f"{name} is {brief(mine)}, in the run {brief(theirs)}"
        return ""

    def locate(self, source: int, position: int) -> tuple[str, int, int]:
        """Source, epoch and index of a prompt. source: its number, from 1."""
        name, length, _ = self._places[source - 1]
        epoch, place = divmod(position, length)
        return name, epoch, index_at(length, self.shuffle, epoch, place)

    def group_id(self, item: str, number: int) -> str:
        """The id of the group of a try of a prompt. item: as in `Tried`."""
        source, position = map(int, item.split())
        return self.id_of(self.locate(source, position), number)

    def id_of(self, place: tuple[str, int, int], number: int) -> str:
        """As `group_id`. place: what `locate` says."""
        return f"{PREFIX}{self.name}:{place[0]}:{place[1]}:{place[2]}:{number}"

    def parse(self, group_id: str) -> Tried | None:
        """The try that a group is of; None if it is of none of these prompts."""
        match = GROUP_ID.fullmatch(group_id)
        return match and self.tried(*match.groups())

    def tried(self, name: str, source: str, *numbers: str) -> Tried | None:
        """As `parse`. numbers: epoch, index and try, as in the group's id."""
        source_number = self._numbers.get(source)
        if name != self.name or source_number is None:
            return None
        epoch, index, number = map(int, numbers)
        length = self.sources[source]
        if epoch >= self.epochs or index >= length:
            return None
        position = epoch * length + place_of(length, self.shuffle, epoch, index)
        return Tried(source_number, position, number, epoch, source, index)

    def overall(self, source: str, index: int) -> int:
        """The number of a prompt among those of all sources, from 0."""
        return self._places[self._numbers[source] - 1][2] + index

    @cached_property
    def _places(self) -> list[tuple[str, int, int]]:
        """Of each source name, length, and how many prompts come before it."""
        before = accumulate(self.sources.values(), initial=0)
        return [
            (name, length, first) for (name, length), first in zip(self.sources.items(), before, strict=False)
        ]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.sources, 1)}


# The order of the prompts of a source in an epoch: a pure function of seed, epoch and place. Nothing is stored.

ROUNDS: Final = 4
#: Rounds of so many bits are looked up: up to 16 million prompts of a source, 8 kB a round.
TABLE_BITS: Final = 12
_WORD: Final = (1 << 64) - 1


def index_at(length: int, seed: int | None, epoch: int, place: int) -> int:
    """Which of `length` prompts comes at a place (from 0) of the epoch. seed: None = in order."""
    if seed is None:
        return place
    bits, mask, rounds = _network(length, seed, epoch)
    while True:  # a permutation of a power of 4, repeated until the value is inside (cycle walking)
        left, right = place >> bits, place & mask
        for mixed in rounds:  # a Feistel network, which any round function makes a permutation
            left, right = right, left ^ mixed(right)
        place = left << bits | right
        if place < length:
            return place


def place_of(length: int, seed: int | None, epoch: int, index: int) -> int:
    """Where a prompt comes in the epoch: the inverse of `index_at`."""
    if seed is None:
        return index
    bits, mask, rounds = _network(length, seed, epoch)
    while True:
        right, left = index >> bits, index & mask
        for mixed in rounds[::-1]:
            left, right = right, left ^ mixed(right)
        index = right << bits | left
        if index < length:
            return index


@lru_cache(64)
def _network(length: int, seed: int, epoch: int) -> tuple[int, int, list[Callable[[int], int]]]:
    """Bits of each half of the smallest power of 4 that has so many, the mask of a half, and the rounds' functions."""
    bits = (max(1, (length - 1).bit_length()) + 1) // 2
    mask = (1 << bits) - 1
    keys = [_mix(_mix(_mix(seed & _WORD) + epoch) + number) for number in range(ROUNDS)]
    rounds: list[Callable[[int], int]] = [partial(_round, key, mask) for key in keys]
    if bits <= TABLE_BITS:
        rounds = [array("H", map(mixed, range(mask + 1))).__getitem__ for mixed in rounds]
    return bits, mask, rounds


def _round(key: int, mask: int, half: int) -> int:
    word = (half + key) * 0xBF58476D1CE4E5B9 & _WORD
    return (word ^ word >> 32) * 0x94D049BB133111EB >> 40 & mask


def _mix(word: int) -> int:
    """Spread the bits of a 64-bit word (the finalizer of splitmix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
