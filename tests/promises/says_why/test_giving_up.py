"""A server that does not answer: commands that do one thing give up, those that run long say why they wait."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from streamadv import cli
from streamadv.store.embedded import EmbeddedServer
from tests.support import producing, push_groups

ONCE = (
    ["status"],
    ["dead", "list"],
    ["dead", "show", "g"],
    ["dead", "requeue", "--all"],
    ["dead", "purge", "--all"],
    ["runs", "list"],
    ["runs", "delete"],
)
UNKNOWN = "redis://no-such-host.invalid:6379/0"


@contextmanager
def refusing_writes(folder: Path) -> Iterator[tuple[str, redis.Redis]]:
    """A server whose snapshots fail: it refuses writes, and PING, with MISCONF until it makes none."""
    with EmbeddedServer(data_dir=folder) as server, redis.Redis.from_url(server.url) as client:
        shutil.rmtree(folder)
        client.config_set("save", "3600 1000000")
        client.bgsave()
        while client.info("persistence")["rdb_bgsave_in_progress"]:
            pass
        with pytest.raises(redis.exceptions.ResponseError, match="MISCONF"):
            client.ping()
        yield server.url, client
        client.config_set("save", "")


@pytest.fixture
def refusing() -> Iterator[str]:
    """URL of a port where nothing listens, and nothing else will."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{taken.getsockname()[1]}/0"


@pytest.mark.parametrize("words", ONCE, ids=" ".join)
def test_a_command_gives_up_in_one_line(
    words: list[str], refusing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, "--run", "r", "--wait", "0.2", "--redis", refusing]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"streamadv: error: no answer from {refusing} within 0.2 s")
    assert "start the server or correct the URL" in last


@pytest.mark.parametrize("words", ONCE, ids=" ".join)
def test_an_unknown_host_is_an_error_at_once(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--run", "r", "--wait", "3600", "--redis", UNKNOWN]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no-such-host.invalid" in line
    assert "correct the URL" in line


@pytest.mark.parametrize(
    "url",
    [UNKNOWN.replace("redis:", "redis+cluster:"), UNKNOWN.replace("redis:", "redis+sentinel:")[:-1] + "m"],
)
def test_so_it_is_behind_sentinels_and_in_a_cluster(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--wait", "3600", "--redis", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no-such-host.invalid" in line


def test_a_server_that_hangs_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"redis://127.0.0.1:{mute.getsockname()[1]}/0"
        assert cli.main(["status", "--wait", "0.2", "--redis", url]) == 1
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(f"streamadv: error: no answer from {url} within 0.2 s")
    )


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_wait_that_is_none_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["status", f"--wait={value}"])
    assert "--wait" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["worker", "grouper"],
        ["replay", os.devnull],
        *(
            pytest.param(words, marks=pytest.mark.release)
            for words in (["consume"], ["worker", "advantage"], ["demo"])
        ),
    ],
    ids=" ".join,
)
@pytest.mark.processes
@pytest.mark.slow
def test_a_command_that_runs_long_says_why_it_waits(words: list[str], refusing: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "streamadv", *words, "--redis", refusing], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        while "waiting for the server" not in (line := process.stderr.readline()):
            assert line, "it has ended"
        assert "start the server or correct the URL [server_away]" in line
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.server
def test_commands_that_read_work_while_the_server_refuses_writes(
    tmp_path: Path, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with refusing_writes(tmp_path / "data") as (url, client):
        client.config_set("save", "")
        with producing(url, run) as producer:
            push_groups(producer, 1)
        client.config_set("save", "3600 1000000")
        for words in (["status"], ["status", "--check"], ["runs", "list"], ["dead", "list"]):
            assert cli.main([*words, "--run", run, "--redis", url]) == 0, words
        capsys.readouterr()
        assert cli.main(["status", "--json", "--run", run, "--redis", url]) == 0
        assert "misconf" in json.loads(capsys.readouterr().out)["blocked"]
        assert cli.main(["runs", "delete", "--wait", "0.2", "--run", run, "--redis", url]) == 1
        assert "MISCONF" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("words", [["worker", "grouper"], ["replay", os.devnull]], ids=" ".join)
@pytest.mark.processes
@pytest.mark.server
def test_a_process_that_starts_while_the_server_refuses_writes_waits(
    words: list[str], tmp_path: Path, run: str
) -> None:
    with refusing_writes(tmp_path / "data") as (url, client):
        process = subprocess.Popen(
            [sys.executable, "-m", "streamadv", *words, "--run", run, "--redis", url],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            while "waiting for the server: MISCONF" not in (line := process.stderr.readline()):
                assert line, "it has ended"
            assert "[misconf]" in line
            client.config_set("save", "")
            if words[0] == "worker":
                while "ready: run" not in (line := process.stderr.readline()):
                    assert line, "it has ended"
                process.send_signal(signal.SIGTERM)
            assert process.wait(240) == 0
        finally:
            process.kill()
            process.communicate()


@pytest.mark.server
def test_status_names_what_a_server_lacks(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedServer(maxmemory="40mb") as server, redis.Redis.from_url(server.url) as client:
        with producing(server.url, run) as producer:
            push_groups(producer, 1)
        client.config_set("min-replicas-to-write", 1)
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        assert cli.main(["status", "--json", "--run", run, "--redis", server.url]) == 0
        assert {"maxmemory", "noreplicas"} <= set(json.loads(capsys.readouterr().out)["blocked"])
