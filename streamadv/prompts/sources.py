"""What may be a source of prompts: anything with a length and items by number, tables, and streams."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

from ..errors import SettingError, StreamadvError
from ..forks import renewed_at_fork
from ..messages import brief, whole_number

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
