"""`streamadv bench memory`: server bytes per payload byte, and what is left when everything has been committed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from .alone import Alone
from .lines import GROUP_SIZE, KINDS, Line

#: Payload of a measurement, at least.
LEAST_BYTES: Final = 32 << 20
SIZES: Final = (512, 4096, 5000, 32768)

COLUMNS: Final = {
    "payload MB": "payload_megabytes",
    "server MB": "server_megabytes",
    "per byte": "ratio_to_payload",
    "left B/group": "left_bytes_per_group",
}


def measure_memory(url: str, tokens: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One record for each size. Left over are tombstones of ended groups, and what the allocator keeps."""
    for size in tokens:
        line = Line("grpo", size)
        payload = line.size(KINDS["grpo"].columns)
        batches = -(-LEAST_BYTES // (payload * GROUP_SIZE * line.batch_groups))
        with Alone(url, line, batches=batches) as alone:
            alone.round()  # streams, consumer groups, connections and scripts are there from now on
            count = alone.groups * GROUP_SIZE
            base = _used(alone)
            alone.push()
            held = _used(alone) - base
            alone.group()
            alone.name_batches()
            alone.compute()
            alone.train()
            left = _used(alone) - base
        yield {
            "name": f"{size} tokens",
            "tokens": size,
            "trajectories": count,
            "payload_megabytes": count * payload / 1e6,
            "server_megabytes": held / 1e6,
            "ratio_to_payload": held / (count * payload),
            "left_bytes_per_group": left / (count / GROUP_SIZE),
        }


def _used(alone: Alone) -> int:
    """Bytes in use by the server, without the buffers of its clients."""
    client = alone.connection.scripts
    while True:
        info: Any = client.info("memory")
        if not info["lazyfree_pending_objects"]:  # what was unlinked is freed in the background
            break
    clients: Any = client.client_list()  # counted now; INFO adds them up only now and then
    return int(info["used_memory"]) - sum(int(each["tot-mem"]) for each in clients)
