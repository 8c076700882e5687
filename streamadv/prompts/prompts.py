"""`Prompts`: a finite data set, played for some epochs."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from ..doors import renewed_at_fork
from ..errors import SettingError, StreamadvError
from ..messages import brief, whole_number
from .figures import TriesSeen
from .spec import PromptSet, plain

#: Prompts of a source that its fingerprint looks at, spread over it.
SAMPLED: Final = 64

#: What the last groups of each source have shown -> weight of each source.
Select = Callable[[Mapping[str, TriesSeen]], Mapping[str, float]]


class Prompts:
    """A finite data set, of which each epoch plays every prompt once, in an order that its seed decides.

    It stays with the producers; the run remembers what has been played. All producers give the same one: the run
    refuses another length, other prompts or another setting under the same name.

    Args:
        source: prompts by number (a list, a data set of Hugging Face, a table of Arrow or pandas), a `Stream`, or a
            mapping of names to some: then the names are the groups' `data_source`.
        epochs: how often each prompt is played.
        shuffle: seed of the order, another in each epoch; None = in the order of the source.
        weights: of each source its share while all have prompts left; by default its length, so that all end at once.
        retries: how often a prompt is played again whose group was dropped, expired, failed or is dead. Filters
            (zero variance, difficulty) end a prompt at once.
        name: of the data set in the run.
        skip_solved: a prompt that was solved in so many epochs running, 1 to 9, is left out of later ones; 0 = none is.
            It is solved where all rewards of its group are at least `best_reward`.
        best_reward: see `skip_solved`.
        select: chooses weights anew once an epoch, or every `select_every` batches: called by one of the producers with
            what the last groups of each source have shown (name -> `TriesSeen`; the last 4,096 groups of a shard), it
            returns the weight of each source from now on. A source of weight 0 is played after all others. A pure
            function, the same at all producers; the run notes its first answer for each period.
        select_every: batches; None = an epoch, that is as many prompts as all sources have.

    Raises SettingError for an argument out of range.
    """

    def __init__(
        self,
        source: Any,
        *,
        epochs: int = 1,
        shuffle: int | None = 0,
        weights: Mapping[str, float] | None = None,
        retries: int = 1,
        name: str = "train",
        skip_solved: int = 0,
        best_reward: float = 1.0,
        select: Select | None = None,
        select_every: int | None = None,
    ) -> None:
        if type(source).__name__ in ("DatasetDict", "IterableDatasetDict"):
            raise SettingError(
                f"prompts {name}: source is a {type(source).__name__}: give one of its splits, such as "
                f"source[{min(source)!r}], or a mapping of names"
            )
        by_name = isinstance(source, Mapping)
        named = dict(sorted(source.items(), key=lambda pair: str(pair[0]))) if by_name else {"": source}
        sources = {key: source_of(key, given) for key, given in named.items()}
        lengths = {key: len(each) for key, each in sources.items()}
        self._sources: Sequence[Source] = list(sources.values())
        shares: dict[str, float] = dict(lengths)
        if weights is not None:
            shares = {key: plain(share) for key, share in sorted(weights.items())}
        when = ""  # weights are selected anew
        if select is not None:
            if not callable(select):
                raise SettingError(
                    f"prompts {name}: select is {brief(select)}, needs a function of statistics by source"
                )
            every = whole_number(f"prompts {name}: select_every", select_every, 1, or_none=True)
            when = f"begun {sum(lengths.values())}" if every is None else f"version {every}"
        self._select = select
        options = (skip_solved, plain(best_reward), when)
        self.set = PromptSet(name, lengths, epochs, shuffle, shares, retries, "", *options).checked()
        if shuffle is not None and any(isinstance(each, Stream) for each in sources.values()):
            raise SettingError(
                f"prompts {name}: shuffle is {shuffle}, and a Stream is read in its order: use shuffle=None"
            )
        self.set = replace(self.set, fingerprint=_fingerprint(sources))

    def __repr__(self) -> str:
        names = ", ".join(f"{name or 'prompts'}: {length}" for name, length in self.set.sources.items())
        return f"Prompts({{{names}}}, epochs={self.set.epochs}, name={self.set.name!r})"

    def __len__(self) -> int:
        """Prompts of all sources over all epochs."""
        return sum(self.set.totals)

    def item(self, source: int, index: int) -> Any:
        """A prompt. source: its number, from 1."""
        return self._sources[source - 1][index]

    def _weights_for(self, seen: Mapping[str, TriesSeen]) -> Mapping[str, float]:
        """What `select` says. Raises SettingError for an answer that is no weight for each source."""
        weights = self._select(seen) if self._select is not None else self.set.weights
        if not isinstance(weights, Mapping):
            raise SettingError(
                f"prompts {self.set.name}: select returned {brief(weights)}, needs a weight by source"
            )
        self.set.check_weights(weights, least=0)
        return weights


def _fingerprint(sources: Mapping[str, Source]) -> str:
    """Of 64 prompts of each source at most: other data under the same lengths differ here."""
    digest = hashlib.blake2b(digest_size=8)
    for name, source in sources.items():
        length = len(source)
        sampled = sorted({place * (length - 1) // max(1, SAMPLED - 1) for place in range(SAMPLED)})
        for number in range(min(length, SAMPLED)) if isinstance(source, Stream) else sampled:
            digest.update(f"{name} {number} {_text_of(source[number])}\n".encode(errors="replace"))
    return digest.hexdigest()


def _text_of(prompt: Any) -> str:
    try:
        return json.dumps(prompt, sort_keys=True, default=_kind)
    except (TypeError, ValueError, RecursionError):  # keys that JSON has not, or a circle
        return _kind(prompt)


def _kind(value: Any) -> str:
    """Of what JSON cannot say, the type: its text may be another one in each process. Of bytes all of them."""
    return value.hex() if isinstance(value, bytes) else type(value).__name__


# What may be a source of prompts: anything with a length and items by number, tables, and streams

#: Prompts of a stream that are at hand still: what is played again mostly comes soon.
KEPT: Final = 4096


class Source(Protocol):
    """A list, a data set of Hugging Face, or anything else with a length and items by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Stream:
    """Prompts that can only be read in order: `source` iterates anew each time, `length` is how many it has.

    For `Prompts(..., shuffle=None)`. Each producer reads on to the prompts that it plays; an epoch, or a prompt that is
    played again much later, begins the iteration anew.
    """

    def __init__(self, source: Iterable[Any], length: int) -> None:
        if isinstance(source, Iterator) or not isinstance(source, Iterable):
            raise SettingError(
                f"Stream: source is {brief(source)}, needs to iterate anew each time: an object with `__iter__`"
            )
        self._source, self._length = source, whole_number("Stream: length", length, 1)
        self._lock = renewed_at_fork(threading.Lock())
        self._process = os.getpid()
        self._iterator: Iterator[Any] = iter(())
        self._next = self._length  # number of the next one; the iteration has not begun
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __repr__(self) -> str:
        return f"Stream({brief(self._source)}, {self._length})"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            if index in self._kept:
                return self._kept[index]
            # A fork shares open files, and the places at which they are read.
            if index < self._next or self._process != os.getpid():
                self._process = os.getpid()
                self._iterator, self._next = iter(self._source), 0
            while True:
                item = self._read()
                if self._next > index:
                    return item

    def _read(self) -> Any:
        try:
            item = next(self._iterator)
        except StopIteration:
            raise StreamadvError(
                f"prompts: {self!r} has ended after {self._next} of {self._length}: give it this length"
            ) from None
        except BaseException:  # an iteration that has raised has ended: the next prompt begins another one
            self._next = self._length
            raise
        self._kept[self._next] = item
        self._next += 1
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return item


class _Rows:
    """The rows of a table, whose items are columns."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Any:
        if hasattr(self._table, "iloc"):
            row = self._table.iloc[index]
            return row.to_dict() if hasattr(row, "to_dict") else row
        return self._table.slice(index, 1).to_pylist()[0]


def source_of(name: str, given: Any) -> Source:
    """A source as it was given. Raises SettingError for anything else."""
    if hasattr(given, "iloc") or (hasattr(given, "to_pylist") and hasattr(given, "slice")):
        return _Rows(given)
    is_text = isinstance(given, str | bytes) or hasattr(given, "__fspath__")
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not is_text:
        return given  # type: ignore[no-any-return]
    if is_text:
        how = 'read the file: `datasets.load_dataset("parquet", data_files=...)["train"]`, or a list of its lines'
    elif hasattr(given, "__iter__"):
        how = "make a list of it, or `sa.Stream(source, length)`"
    else:
        how = "make a list of it"
    raise SettingError(
        f"prompts: source {brief(name)} is {brief(given)}, needs a length and items by number: {how}"
    )
