"""A source that fails to give a prompt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import streamadv as sa
from streamadv.status import read_status
from tests.support import join, producing

from .test_once import SIZE, stored


class Flaky:
    """Prompts of which one cannot be read the first time."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 70

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            self.bad = -1
            raise OSError("the disk is away")
        return index


def test_a_prompt_that_cannot_be_read_begins_no_group(redis_url: str, run: str) -> None:
    with producing(redis_url, run) as producer:
        source = Flaky(-1)
        given = sa.Prompts(source, shuffle=None)
        source.bad = 0
        with pytest.raises(OSError, match="the disk is away"):
            next(producer.prompts(given, SIZE))
        joined = join(redis_url, run)
        assert read_status(joined).groups.open == 0
        assert len(stored(joined).of("-")) == 1  # it is there for others
        assert next(producer.prompts(given, SIZE))[0] == 0


class Lines:
    """A stream that fails once, in the middle."""

    has_failed = False

    def __iter__(self) -> Iterator[int]:
        for number in range(100):
            if number == 70 and not self.has_failed:
                self.has_failed = True
                raise OSError("the disk is away")
            yield number


def test_a_stream_that_has_failed_is_read_anew() -> None:
    stream = sa.prompts.Stream(Lines(), 100)
    assert stream[69] == 69
    with pytest.raises(OSError, match="the disk is away"):
        stream[70]
    assert stream[71] == 71
