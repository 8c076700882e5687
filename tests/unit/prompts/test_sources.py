"""What may be a source of prompts: sequences, tables, and streams whose length is known."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

import streamadv as sa
from streamadv.errors import SettingError, StreamadvError


class Table:
    """As a table of Arrow: `table[0]` is its first column."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.num_rows = len(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> str:
        return "a column"

    def slice(self, start: int, length: int) -> Table:
        return Table(self.rows[start : start + length])

    def to_pylist(self) -> list[dict[str, Any]]:
        return self.rows


class Frame:
    """As a data frame of pandas: `frame[0]` is a column, too."""

    class Row:
        def __init__(self, row: dict[str, Any]) -> None:
            self.row = row

        def to_dict(self) -> dict[str, Any]:
            return self.row

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.iloc = [self.Row(row) for row in rows]

    def __len__(self) -> int:
        return len(self.iloc)

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


ROWS = [{"question": f"What is {number} + 1?"} for number in range(5)]


@pytest.mark.parametrize("source", [ROWS, Table(ROWS), Frame(ROWS)])
def test_the_prompts_of_a_table_are_its_rows(source: Any) -> None:
    prompts = sa.Prompts(source)
    assert [prompts.item(1, index) for index in range(5)] == ROWS
    assert prompts.set == sa.Prompts(ROWS).set


def test_the_prompts_of_a_parquet_file_are_its_rows(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "train.parquet")
    prompts = sa.Prompts(parquet.read_table(tmp_path / "train.parquet"))
    assert [prompts.item(1, index) for index in range(5)] == ROWS
    assert prompts.set == sa.Prompts(ROWS).set


class Stream:
    """Iterates anew each time, and counts."""

    def __init__(self, count: int) -> None:
        self.count, self.begun, self.read = count, 0, 0

    def __iter__(self) -> Iterator[str]:
        self.begun += 1
        for number in range(self.count):
            self.read += 1
            yield f"question {number}"


def test_a_stream_is_read_in_its_order() -> None:
    stream = Stream(5000)
    prompts = sa.Prompts(sa.Stream(stream, 5000), epochs=2, shuffle=None)
    assert [prompts.item(1, index) for index in range(5000)] == [f"question {n}" for n in range(5000)]
    assert stream.begun == 1
    assert prompts.item(1, 4990) == "question 4990"  # one that is played again soon after
    assert stream.begun == 1
    assert prompts.item(1, 3) == "question 3"
    assert stream.begun == 2


def test_a_stream_serves_threads() -> None:
    prompts = sa.Prompts(sa.Stream(Stream(400), 400), shuffle=None)
    found: list[Any] = []

    def read(first: int) -> None:
        found.extend((index, prompts.item(1, index)) for index in range(first, 400, 4))

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(index, f"question {index}") for index in range(400)]


def test_a_stream_with_fewer_prompts_than_it_says_is_named() -> None:
    prompts = sa.Prompts(sa.Stream(Stream(100), 110), shuffle=None)
    with pytest.raises(StreamadvError, match="ended after 100 of 110"):
        prompts.item(1, 100)


def test_a_stream_that_is_shuffled_is_refused() -> None:
    with pytest.raises(SettingError, match="shuffle=None"):
        sa.Prompts(sa.Stream(Stream(10), 10))


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        ("train.parquet", "load_dataset"),
        (iter(ROWS), "sa.Stream"),
        (Stream(10), "sa.Stream"),
        (17, "a list"),
        ({}, "no source"),
        ([], "needs 1 or more"),
    ],
)
def test_what_is_no_source_is_refused(source: Any, remedy: str) -> None:
    with pytest.raises(SettingError, match=remedy):
        sa.Prompts(source)


def test_the_fingerprint_tells_data_apart() -> None:
    same = sa.Prompts([{"question": "a", "answer": 1}, {"question": "b", "answer": 2}])
    assert same.set == sa.Prompts([{"answer": 1, "question": "a"}, {"answer": 2, "question": "b"}]).set
    assert same.set != sa.Prompts([{"question": "a", "answer": 1}, {"question": "b", "answer": 3}]).set
    assert same.set != sa.Prompts([{"question": "b", "answer": 2}, {"question": "a", "answer": 1}]).set
    streamed = sa.Prompts(sa.Stream(Stream(100), 100), shuffle=None).set.fingerprint
    assert streamed == sa.Prompts(sa.Stream(Stream(100), 100), shuffle=None).set.fingerprint


class DatasetDict(dict[str, Any]):
    """As the splits of a data set of Hugging Face."""


def test_splits_are_no_sources() -> None:
    splits = DatasetDict(train=ROWS, test=ROWS)
    with pytest.raises(SettingError, match=r"give one of its splits, such as .*\['test'\]"):
        sa.Prompts(splits)
    assert len(sa.Prompts({"gsm8k": splits["train"]})) == 5


class Column:
    """As a series of pandas: its items are values."""

    def __init__(self, values: list[str]) -> None:
        self.iloc = values

    def __len__(self) -> int:
        return len(self.iloc)


def test_the_prompts_of_a_series_are_its_values() -> None:
    assert sa.Prompts(Column(["one", "two"])).item(1, 1) == "two"


@pytest.mark.parametrize("prompt", [{1: "a", "b": 2}, {("a", 1): 2}, {1, 2}, object()])
def test_prompts_may_be_anything(prompt: Any) -> None:
    assert sa.Prompts([prompt]).item(1, 0) is prompt
    assert sa.Prompts([prompt]).set == sa.Prompts([prompt]).set


def test_names_of_several_kinds_are_refused() -> None:
    with pytest.raises(SettingError, match="a source is named 1"):
        sa.Prompts({1: ["one"], "a": ["two"]})
