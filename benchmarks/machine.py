"""Where it was measured: the machine and the server, without torch."""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import ResponseError

from streamadv.store.connection import Connection
from streamadv.store.embedded import EmbeddedServer


@contextmanager
def measured_server(url: str | None, aof: str, binary: str | None) -> Iterator[str]:
    """The URL of the given server, or of an embedded one with this AOF mode: no, everysec or always."""
    if url is not None:
        yield url
        return
    with tempfile.TemporaryDirectory(prefix="streamadv-bench-") as folder:
        data_dir = None if aof == "no" else folder
        sync = "everysec" if aof == "no" else aof
        with EmbeddedServer(data_dir, appendfsync=sync, binary=binary) as server:
            yield server.url


def describe_server(url: str) -> dict[str, Any]:
    """Machine of the clients, versions, server, and whether and how often that writes to disk."""
    with Connection(url) as connection:
        connection.wait_until_ready(5.0)
        info: Any = connection.scripts.info()
        name = "valkey" if "valkey_version" in info else "redis"
        aof = "no"
        if info["aof_enabled"]:
            try:
                aof = str(connection.scripts.config_get("appendfsync")["appendfsync"])
            except ResponseError:  # not permitted
                aof = "yes"
    return {
        **describe_processor(),
        "redis_py": redis.__version__,
        "hiredis": importlib.util.find_spec("hiredis") is not None,
        "server": f"{name} {info[f'{name}_version']}",
        "allocator": info["mem_allocator"],
        "aof": aof,
        "date": datetime.now(UTC).date().isoformat(),
    }


def describe_processor() -> dict[str, Any]:
    """Processor, cores, how busy they are, and the Python."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
