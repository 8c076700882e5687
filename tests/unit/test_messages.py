"""Sizes as people write and read them."""

from __future__ import annotations

import pytest

from streamadv.errors import SettingError
from streamadv.messages import counted, parse_size, seconds_text, size_text
from streamadv.run.manifest import RunSettings


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4194304", 4 << 20),
        ("512mb", 512 << 20),
        ("4GB", 4 << 30),
        ("4GiB", 4 << 30),
        ("4g", 4 << 30),
        ("2k", 2048),
        ("17b", 17),
    ],
)
def test_a_size_is_read(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "gb", "-1", "4xb", "1.5gb", "4 gb", "9" * 19])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="512mb"):
        parse_size(text)


def test_settings_of_a_run_take_sizes() -> None:
    settings = RunSettings.model_validate({"max_bytes": "4gb", "dead_bytes": 7})
    assert (settings.max_bytes, settings.dead_bytes) == (4 << 30, 7)
    with pytest.raises(SettingError, match="512mb"):
        RunSettings.model_validate({"max_bytes": "much"})


def test_figures_are_written_for_people() -> None:
    assert [size_text(each) for each in (17, 4 << 20, 3 << 29)] == ["17 bytes", "4.0 MiB", "1.5 GiB"]
    assert [counted(each, "entry", "entries") for each in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
    assert [seconds_text(each) for each in (0.42, 90, 300, 7200, 200_000)] == [
        "0.4 s",
        "90 s",
        "5 min",
        "2 h",
        "2 d",
    ]
