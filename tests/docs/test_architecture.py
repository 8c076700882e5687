"""ARCHITECTURE.md begins with the way of a trajectory and names files that are there; keys.md has all keys."""

from __future__ import annotations

import re
from typing import Final

from streamadv.store.keys import MANY_KINDS, SINGLE_KINDS

from .story import ROOT

PACKAGE: Final = ROOT / "streamadv"
PAGE: Final = (ROOT / "ARCHITECTURE.md").read_text()
KEYS: Final = (ROOT / "docs/reference/keys.md").read_text()
FIRST_SCREEN: Final = 40
SCRIPTS: Final = {path.stem for path in (PACKAGE / "lua").rglob("*.lua") if path.parent.name != "lib"}


def test_the_files_it_names_are_there() -> None:
    named = set(re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/)+(?:\w+\.lua)?)`", PAGE))
    assert len(named) > 60
    assert [
        name for name in sorted(named) if not any((root / name).exists() for root in (PACKAGE, ROOT))
    ] == []


def test_the_scripts_it_names_are_there_and_its_table_has_all() -> None:
    assert set(re.findall(r"`(\w+)\.lua`", PAGE)) - SCRIPTS == set()
    rows = [line for line in PAGE.splitlines() if line.startswith("| `lua/")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == SCRIPTS


def test_the_way_of_a_trajectory_is_on_the_first_screen() -> None:
    screen = "\n".join(PAGE.splitlines()[:FIRST_SCREEN])
    assert [
        step for step in ("**Begin.**", "**Push.**", "**Name.**", "**Commit.**") if step not in screen
    ] == []
    assert screen.index("**Commit.**") < screen.index("`commit.lua`")


def test_the_page_of_keys_has_every_kind_and_names_scripts_that_are_there() -> None:
    rows = [line.split(" | ") for line in KEYS.splitlines() if line.startswith("| `")]
    named = {kind for row in rows for kind in re.findall(r"`…:(\w+)(?:`|:<)", row[0])}
    # "dead:<id>" is of the kind dead_group.
    assert named | {"void", "dead_group"} == {*SINGLE_KINDS, *MANY_KINDS}
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[3])} - SCRIPTS == set()
