"""The id of a job, from what a launcher says."""

from __future__ import annotations

import pytest

from streamadv.batch.session import find_job

LAUNCHED = {
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "2",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCHELASTIC_RUN_ID", "abd"),
        ("TORCHELASTIC_RESTART_COUNT", "1"),
        ("MASTER_PORT", "29501"),
        ("WORLD_SIZE", "3"),  # a change of membership keeps all others while rank 0 stays
    ],
)
def test_each_start_under_torchrun_is_another_job(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for each, text in LAUNCHED.items():
        monkeypatch.setenv(each, text)
    before = find_job(1)
    assert before is not None
    monkeypatch.setenv("RANK", "1")
    assert find_job(1) == before  # on every rank
    monkeypatch.setenv(name, value)
    assert find_job(1) != before
