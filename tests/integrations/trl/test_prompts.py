"""Prompts of data sets of Hugging Face, which come with TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

import streamadv as sa
from streamadv.errors import SettingError

ROWS = [{"question": f"What is {number} + 1?", "answer": number + 1} for number in range(11)]


def played(url: str, run: str, prompts: sa.Prompts) -> list[Any]:
    """The prompts in the order in which they come."""
    with sa.Producer(url, run) as producer:
        groups = producer.prompts(prompts, 2)
        return [next(groups)[0] for _ in range(len(prompts))]


@pytest.mark.parametrize("is_file", [False, True])
def test_each_row_of_a_data_set_is_played_once_an_epoch(
    redis_url: str, run: str, tmp_path: Path, is_file: bool
) -> None:
    data = datasets.Dataset.from_list(ROWS)
    if is_file:
        data.to_parquet(str(tmp_path / "train.parquet"))
        files = str(tmp_path / "train.parquet")
        data = datasets.load_dataset("parquet", data_files=files, cache_dir=str(tmp_path))["train"]
    seen = played(redis_url, run, sa.Prompts(data, epochs=2))
    for epoch in (seen[:11], seen[11:]):
        assert sorted(epoch, key=lambda row: row["answer"]) == ROWS
    assert seen[:11] != seen[11:]


def test_a_data_set_without_a_length_is_a_stream(redis_url: str, run: str) -> None:
    data = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(SettingError, match=r"sa\.Stream\(source, length\)"):
        sa.Prompts(data)
    prompts = sa.Prompts(sa.Stream(data, len(ROWS)), epochs=2, shuffle=None)
    assert played(redis_url, run, prompts) == 2 * ROWS


def test_a_mapping_of_splits_is_refused_by_name() -> None:
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))
    with pytest.raises(SettingError, match="give one of its splits, such as source\\['train'\\]"):
        sa.Prompts(splits)
