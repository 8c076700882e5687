"""The breakages that the world has to find fit the code as it is."""

from __future__ import annotations

import pytest

from tests.world.breakages import EQUIVALENT, MUTANTS
from tests.world.mutants import ROOT


@pytest.mark.parametrize("name", MUTANTS)
def test_a_breakage_stands_in_the_code_once(name: str) -> None:
    mutant = MUTANTS[name]
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 30
    assert EQUIVALENT.keys() <= MUTANTS.keys()
