"""How many payload bytes a run may hold on a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..errors import SettingError

#: Share of maxmemory; the rest is for the scripts' own keys, results and buffers.
MAX_BYTES_SHARE: Final = 0.7
#: Default if the server tells neither maxmemory nor the machine's memory.
FALLBACK_MAX_BYTES: Final = 1 << 30


def byte_budget(max_bytes: int | None, memory: Mapping[str, Any]) -> int:
    """Bytes that the payloads of a run may take on one server, live and reserved together.

    max_bytes: the run's setting; None = 0.7 x maxmemory, half of the machine's memory without maxmemory, 1 GiB where
    the server tells neither. memory: the server's `INFO memory`. Raises SettingError for a setting above 0.7 x
    maxmemory.
    """
    maxmemory = int(memory.get("maxmemory", 0))
    limit = int(maxmemory * MAX_BYTES_SHARE)
    if max_bytes is None:
        return limit or int(memory.get("total_system_memory", 0)) // 2 or FALLBACK_MAX_BYTES
    if limit and max_bytes > limit:
        raise SettingError(
            f"max_bytes is {max_bytes}, more than {MAX_BYTES_SHARE} of the server's maxmemory ({maxmemory}): "
            f"set it to {limit} or less, or raise maxmemory"
        )
    return max_bytes
