"""The plan of docs/reference/scaling.md is that of its measurements, and of `streamadv bench scaling`."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, Final

import pytest

from benchmarks.scaling import LONG, PARTS, SHORT, UTILISATION, Costs, Linear

from .story import ROOT, blocks_of

PAGE: Final = "docs/reference/scaling.md"
Plan = Callable[..., dict[str, float]]


@pytest.fixture(scope="module")
def sizing() -> dict[str, Any]:
    """The names of plan.py."""
    (code,) = [block.code for block in blocks_of(PAGE) if 'title="plan.py"' in block.title]
    names: dict[str, Any] = {}
    with redirect_stdout(StringIO()):
        exec(code, names)
    return names


def rows() -> dict[str, list[str]]:
    """Cells of the tables of the page by the first one."""
    lines = [line for line in (ROOT / PAGE).read_text().splitlines() if line.startswith("| ")]
    return {
        cells[0]: cells[1:] for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    }


def line_of(name: str) -> tuple[float, float]:
    """a and b of a line "a + b T" of the page."""
    a, b = re.fullmatch(r"([\d.]+) \+ ([\d.]+) T", rows()[name][0]).groups()  # type: ignore[union-attr]
    return float(a), float(b)


def test_the_lines_go_through_what_was_measured() -> None:
    short, long = rows()["1 primary, 512 tokens"], rows()["1 primary, 32,768"]
    numbers = [[float(cell.replace(",", "")) for cell in row] for row in (short, long)]
    for place, part in enumerate(["producer", "server", "grouper", "advantage", "trainer"], start=1):
        measured = Linear.through(*(row[place] for row in numbers))
        a, b = line_of(part)
        assert a == pytest.approx(measured.each, abs=1), part
        assert b == pytest.approx(measured.per_token, abs=0.0006), part


def test_the_plan_has_the_measured_lines(sizing: dict[str, Any]) -> None:
    assert sizing["COSTS"] == {part: line_of(part) for part in PARTS}
    assert f"{sizing['NAMING']} of it does not shrink" in rows()["trainer"][1]
    assert pytest.approx(line_of("bytes in")[1], abs=0.5) == sizing["BYTES"]
    assert sizing["LOAD"] == UTILISATION


def test_the_plan_agrees_with_the_table_of_what_a_rate_needs(sizing: dict[str, Any]) -> None:
    for rate, title in ((1e6, "10^6"), (1e8, "10^8"), (1e10, "10^10")):
        planned = sizing["plan"](rate, group_size=8, tokens=4096, batch_groups=64)
        names = ("producer", "server", "grouper", "advantage", "trainer", "runs")
        told = [float(cell.replace(",", "")) for cell in rows()[title][1 : 1 + len(names)]]
        # The table was made from figures before they were rounded for the page.
        assert [planned[name] for name in names] == pytest.approx(told, rel=0.05), title


def test_the_plan_agrees_with_that_of_the_benchmark(sizing: dict[str, Any]) -> None:
    costs = Costs(
        {part: Linear(*sizing["COSTS"][part]) for part in PARTS}, sizing["NAMING"], Linear(0, 0), Linear(0, 0)
    )
    for rate in (1e5, 1e7, 1e9):
        for tokens in (SHORT, 4096, LONG):
            planned = sizing["plan"](rate, group_size=8, tokens=tokens, batch_groups=64)
            expected = costs.plan(rate, tokens)
            assert planned["server"] == max(1, expected["shards"])
            for name in ("producer", "grouper", "advantage", "trainer", "runs"):
                assert planned[name] == expected[name], name
