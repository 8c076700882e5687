"""The breakages that the world has to find fit the code as it is."""

from __future__ import annotations

import pytest

from tests.world.breakages import EQUIVALENT, KEPT, MUTANTS
from tests.world.mutants import ROOT, broken_by


@pytest.mark.parametrize("name", MUTANTS)
def test_a_breakage_stands_in_the_code_once(name: str) -> None:
    mutant = MUTANTS[name]
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 30
    assert EQUIVALENT.keys() | KEPT.keys() <= MUTANTS.keys()


@pytest.mark.release
@pytest.mark.processes
@pytest.mark.parametrize("name", KEPT)
def test_a_kept_schedule_finds_the_breakage(name: str) -> None:
    """Its labels count requests: a change of the code may move them, and then it finds nothing."""
    assert broken_by(name, ROOT / "tests" / "world" / "found" / f"{KEPT[name]}.json")
