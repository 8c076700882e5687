"""A stream that was read before the process forked."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import streamadv as sa

COUNT = 5000


class Lines:
    """The lines of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[str]:
        with self.path.open() as lines:
            for line in lines:
                yield line.strip()


def read_every_second(prompts: sa.Prompts, first: int, found: Any) -> None:
    found.put([prompts.item(1, index) for index in range(first, COUNT, 2)])


def test_processes_that_were_forked_read_a_stream_each_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"question {number}\n" for number in range(COUNT)))
    prompts = sa.Prompts(sa.Stream(Lines(path), COUNT), shuffle=None)
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    for first in range(2):
        process = context.Process(target=read_every_second, args=(prompts, first, found))
        process.start()
        try:
            assert found.get(timeout=10) == [f"question {number}" for number in range(first, COUNT, 2)]
        finally:
            process.kill()
            process.join()
