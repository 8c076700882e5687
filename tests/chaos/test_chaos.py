"""All processes of a run under fire: a moment of it in every test run, much more with `make chaos`.

`STREAMADV_CHAOS_SECONDS` (split over the kinds of server), `STREAMADV_CHAOS_SEED`, `STREAMADV_CHAOS_SCALE` (so many
times more members a group), and `STREAMADV_CHAOS_REDIS_URL` for a server of one's own, which is not killed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from .harness import GROUPS, SERVERS, run_chaos

LONG = "STREAMADV_CHAOS_SECONDS" in os.environ
SECONDS = float(os.environ.get("STREAMADV_CHAOS_SECONDS", "4"))
SEED = int(os.environ.get("STREAMADV_CHAOS_SEED", "1"))
SCALE = int(os.environ.get("STREAMADV_CHAOS_SCALE", "1"))
URL = os.environ.get("STREAMADV_CHAOS_REDIS_URL")
KINDS = (URL,) if URL else (*SERVERS, *GROUPS) if LONG else ("always",)


@pytest.mark.timeout(SECONDS + 240)
@pytest.mark.release
@pytest.mark.parametrize("server", KINDS)
def test_nothing_is_lost_and_nothing_trained_twice(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_chaos(SEED, SECONDS / len(KINDS), server, tmp_path, SCALE)
    with capsys.disabled():
        if LONG:
            print(f"\n{json.dumps(vars(report), indent=1)}")
    assert report.problems == []
    assert report.lost == report.trained_twice == 0
    assert report.trained > 0
    assert report.kills > 0
