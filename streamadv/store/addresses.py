"""Where an embedded server listens: safe addresses and free ports."""

from __future__ import annotations

import errno
import ipaddress
import random
import socket
from typing import Final

from ..errors import ServerError, SettingError

LOOPBACK: Final = "127.0.0.1"
EVERYWHERE: Final = ("0.0.0.0", "::")

# Below the range that outgoing connections take their port from (32768 up on Linux, 49152 up elsewhere):
# a client that retries a dead server's port inside that range can be given this very port as its own, connect
# to itself, and keep the server from binding again.
PORTS: Final = range(16384, 32768)


def check_bind(bind: str, password: str | None) -> None:
    """Raise SettingError unless `bind` is an IP address of this machine alone, or there is a password."""
    try:
        loopback = ipaddress.ip_address(bind).is_loopback
    except ValueError:
        raise SettingError(f"--bind {bind!r}: give an IP address, such as 0.0.0.0 for all") from None
    if not loopback and password is None:
        raise SettingError(
            f"--bind {bind} opens the server to the network: give it a password (STREAMADV_REDIS_PASSWORD_FILE), "
            f"or leave it at {LOOPBACK}"
        )


def check_free(port: int, bind: str) -> None:
    """Raise ServerError when another process listens at the port."""
    with socket.socket(socket.AF_INET6 if ":" in bind else socket.AF_INET) as probe:
        # As the server does, so that closing connections of an earlier server are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ServerError(f"--port {port} is in use: choose another one") from None


def free_port() -> int:
    """A port of PORTS that nobody listens at now. Raises ServerError when there is none."""
    for port in random.SystemRandom().sample(PORTS, 64):
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise ServerError(
        f"no free port on {LOOPBACK} between {PORTS.start} and {PORTS.stop - 1}: give one with --port"
    )
