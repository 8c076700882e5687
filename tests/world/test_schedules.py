"""The pipeline in a simulated world: schedules of a seed, and those that once broke a promise."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamadv.testing.judge import run_schedule

FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))
SCHEDULES = int(os.environ.get("STREAMADV_WORLD_SCHEDULES", "30"))
SEED = int(os.environ.get("STREAMADV_WORLD_SEED", "0"))
#: Schedules of one test: several processes share them out.
PAGE = 10


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of lines about servers that are away."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("file", FOUND, ids=lambda file: file.stem)
def test_a_schedule_that_once_broke_a_promise_keeps_it(file: Path) -> None:
    _, broken = run_schedule(choices=json.loads(file.read_text()))
    assert broken is None


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEED, SEED + SCHEDULES, PAGE))
def test_every_promise_holds_in_schedules_of_a_seed(first: int) -> None:
    for seed in range(first, min(first + PAGE, SEED + SCHEDULES)):
        world, broken = run_schedule(seed)
        assert broken is None, f"seed {seed}: {broken}; choices: {json.dumps(world.choices)}"
