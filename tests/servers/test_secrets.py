"""Passwords: where they must not appear, and who may not be reached without one."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import traceback
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.exceptions

import streamadv as sa
from streamadv import cli, metrics
from streamadv.errors import SettingError, StreamadvError
from streamadv.grouping.scorer import Scorer
from streamadv.producer import Producer
from streamadv.status import export_run
from streamadv.store.connection import AsyncConnection, Connection
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer.queue import TrainerQueue
from tests.support import join, ledger, producing, push_groups

#: Also as it stands in a URL, where @ and / are written as %xx.
SECRET = "Hush-4711 p@ss/wörd"
MARKS = ("Hush-4711", "ss/w", "ss%2Fw")


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(password=SECRET, data_dir=tmp_path / "data") as server:
        yield server


@pytest.fixture
def told(locked: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str) -> EmbeddedServer:
    """The environment knows server, run and, by a file, the password."""
    file = tmp_path / "password"
    file.write_text(f"{SECRET}\n")
    monkeypatch.setenv("STREAMADV_REDIS_URL", locked.open_url)
    monkeypatch.setenv("STREAMADV_REDIS_PASSWORD_FILE", str(file))
    monkeypatch.setenv("STREAMADV_RUN", run)
    return locked


def clean(text: str) -> bool:
    return not any(mark in text for mark in MARKS)


def test_the_server_asks_for_its_password_and_shows_it_nowhere(
    locked: EmbeddedServer, tmp_path: Path
) -> None:
    with redis.Redis.from_url(locked.open_url) as nobody, pytest.raises(redis.exceptions.AuthenticationError):
        nobody.ping()
    with redis.Redis.from_url(locked.url) as owner:
        assert owner.ping()
        assert clean(str(owner.config_get("*")) + str(owner.execute_command("ACL LIST")))
    assert clean(locked.open_url + repr(locked))
    assert clean(Path(f"/proc/{locked.pid}/cmdline").read_bytes().decode(errors="replace"))
    assert clean(Path(f"/proc/{locked.pid}/environ").read_bytes().decode(errors="replace"))
    for file in (tmp_path / "data").rglob("*"):
        assert file.is_dir() or clean(file.read_bytes().decode(errors="replace")), file


def test_what_people_and_machines_read_shows_no_password(
    told: EmbeddedServer, run: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = sa.redis_url()
    with producing(url, run) as producer:
        push_groups(producer, 1)
        joined = join(url, run)
        facts = export_run(url, run)
        port = metrics.serve(0, run=run)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            exposed = reply.read().decode()
        metrics.REGISTRY._parts.remove(facts)
        assert "streamadv_run_trajectories" in exposed
        said = exposed + repr(producer) + repr(joined) + repr(joined.connection) + repr(Connection(url))
        assert ledger(joined)["queued"] == 2
        joined.connection.close()
    for words in (
        *(["status"], ["status", "--json", "--check"], ["runs", "list"], ["dead", "list"]),
        *(["config"], ["config", "--json"], ["status", "--log-level", "debug"]),
    ):
        assert cli.main(words) == 0, words
    out, err = capsys.readouterr()
    assert "***" in out
    assert clean(said + out + err + caplog.text)


def test_errors_and_their_tracebacks_show_no_password(
    told: EmbeddedServer, run: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = sa.redis_url()
    texts = []

    def note(error: BaseException) -> None:
        texts.append("".join(traceback.format_exception(error)) + repr(error))

    with producing(url, run) as producer:
        wrong = url.replace("Hush", "Hush-Hush")
        for opened in (
            lambda: Connection(wrong).wait_until_ready(),
            lambda: Producer(wrong, run).open(),
            lambda: Scorer(wrong, run, "s"),
            lambda: TrainerQueue(wrong, run, commit="each_batch").next_batch(timeout=0),
            lambda: Connection(url + "?no_such_option=1"),
            lambda: Connection(told.open_url.replace("//", f"//u:{SECRET}@")),
        ):
            with pytest.raises(SettingError) as caught:
                opened()
            note(caught.value)
        told.kill()
        with pytest.raises(redis.exceptions.ConnectionError) as lost:
            Connection(url).push.ping()
        note(lost.value)
        with pytest.raises(StreamadvError) as silent:
            Connection(url).wait_until_ready(0)
        note(silent.value)
        told.start()
        push_groups(producer, 1)  # waits and warns until the server is back
    assert len(texts) == 8
    assert clean("".join(texts) + caplog.text + "".join(capsys.readouterr()))


async def test_the_asyncio_side_shows_none_either(told: EmbeddedServer) -> None:
    wrong = sa.redis_url().replace("Hush", "Hush-Hush")
    async with AsyncConnection(wrong) as connection:
        with pytest.raises(SettingError, match="user name and password") as caught:
            await connection.wait_until_ready()
    assert clean("".join(traceback.format_exception(caught.value)) + repr(connection))


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "192.0.2.1"])
def test_off_loopback_the_server_demands_a_password(
    bind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingError, match=f"--bind {bind} .*STREAMADV_REDIS_PASSWORD_FILE"):
        EmbeddedServer(bind=bind)
    assert cli.main(["server", "--bind", bind]) == 1
    assert "STREAMADV_REDIS_PASSWORD_FILE" in capsys.readouterr().err


def test_a_bind_address_is_an_ip_address() -> None:
    with pytest.raises(SettingError, match="--bind 'everywhere'"):
        EmbeddedServer(bind="everywhere", password="x")


def listening(port: int) -> set[str]:
    """Addresses of this machine that something listens at, as /proc/net has them."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            address, _, number = words[1].rpartition(":")
            if words[3] == "0A" and int(number, 16) == port:
                found.add(address)
    return found


LOOPBACK, ANY = "0100007F", "00000000"


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux only")
def test_server_and_metrics_listen_on_loopback_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer() as server:
        assert listening(int(server.url.rpartition(":")[2].split("/")[0])) == {LOOPBACK}
    assert listening(metrics.serve(0)) == {LOOPBACK}
    assert listening(metrics.serve(0, host="0.0.0.0")) == {ANY}
    with EmbeddedServer(bind="0.0.0.0", password=SECRET) as server:
        assert listening(int(server.open_url.rpartition(":")[2].split("/")[0])) == {ANY}
        assert server.open_url.startswith("redis://127.0.0.1:")
        with Connection(server.url) as connection:
            connection.wait_until_ready(5)


def test_metrics_name_a_wrong_address() -> None:
    with pytest.raises(SettingError, match=r"^metrics_host '192.0.2.1': .*address of this machine$"):
        metrics.serve(0, host="192.0.2.1")


@pytest.mark.processes
def test_the_server_command_has_its_password_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(SECRET)
    environment = {**os.environ, "STREAMADV_REDIS_PASSWORD_FILE": str(file)}
    command = [sys.executable, "-m", "streamadv", "server"]
    process: Any = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        url = process.stdout.readline().strip()
        assert clean(url)
        with redis.Redis.from_url(url, password=SECRET) as client:
            assert client.ping()
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
    assert clean(errors)
    assert process.returncode == 0
