"""Thousands of small batches: nothing grows. A moment of it in every test run, much more with `make soak`.

`STREAMADV_SOAK_MINUTES`, and `STREAMADV_SOAK_BATCHES` to go on until so many were trained.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .harness import run_soak

LONG = "STREAMADV_SOAK_MINUTES" in os.environ
SECONDS = 60 * float(os.environ.get("STREAMADV_SOAK_MINUTES", "0.2"))
BATCHES = int(os.environ.get("STREAMADV_SOAK_BATCHES", "0" if LONG else "400"))


@pytest.mark.timeout(SECONDS + 120 + BATCHES)
def test_nothing_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_soak(SECONDS, tmp_path, least_batches=BATCHES, costs=LONG)
    with capsys.disabled():
        if LONG:
            print("\n" + "\n".join(report.lines()))
    assert report.problems == []
    assert report.batches >= BATCHES
    assert report.ledger["trained"] > 0
