"""Says at the end how many cases each surface has had."""

from __future__ import annotations

from typing import Any

from .mutations import SEED, ran


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if ran:
        terminalreporter.write_line(f"fuzzing, seed {SEED}: {sum(ran.values())} cases")
        for surface, number in ran.items():
            terminalreporter.write_line(f"  {number:>7}  {surface}")
