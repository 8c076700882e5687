"""The byte budget."""

from __future__ import annotations

import pytest

from streamadv.errors import SettingError
from streamadv.run.run import byte_budget


def test_the_byte_budget_follows_the_server() -> None:
    assert byte_budget(None, {"maxmemory": 1000}) == 700
    assert byte_budget(None, {"maxmemory": 0, "total_system_memory": 1000}) == 500
    assert byte_budget(None, {}) == 1 << 30
    assert byte_budget(600, {"maxmemory": 1000}) == 600
    assert byte_budget(600, {"maxmemory": 0}) == 600
    with pytest.raises(SettingError, match="max_bytes is 800, more than"):
        byte_budget(800, {"maxmemory": 1000})
