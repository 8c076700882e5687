"""`streamadv runs` and `status --watch` on a real server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from streamadv.cli import main
from streamadv.errors import ManifestMismatchError
from streamadv.grouping.grouper import run_grouper
from streamadv.status import read_status
from streamadv.store.embedded import EmbeddedServer
from streamadv.store.keys import RUNS, EntryKeys
from streamadv.trainer.queue import TrainerQueue
from tests.support import join, producing, push_groups, threads
from workers.process import warn_of_server


def call(url: str, run: str, *words: str) -> int:
    return main([*words, "--redis", url, "--run", run])


def test_the_list_has_a_heading_and_says_how_far_runs_are(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with producing(redis_url, run) as producer:
        push_groups(producer, 2)
    join(redis_url, f"{run}-empty")
    assert main(["runs", "list", "--redis", redis_url]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    names = [word.strip() for word in heading.split("  ") if word.strip()]
    assert names == ["RUN", "CREATED (UTC)", "ACTIVE", "VERSION", "PUSHED", "TRAINED", "QUEUED", "IN FLIGHT"]
    by_run = {line.split()[0]: line.split() for line in lines}
    assert by_run[run][-5:] == ["none", "4", "0", "4", "0"]
    assert by_run[f"{run}-empty"][-6:] == ["never", "none", "0", "0", "0", "0"]
    assert main(["runs", "list", "--json", "--redis", redis_url]) == 0
    (line,) = [each for each in map(json.loads, capsys.readouterr().out.splitlines()) if each["run"] == run]
    assert line["version"] is None
    assert line["quiet_s"] >= 0


def test_settings_say_where_they_come_from(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(redis_url, run, "runs", "create", "--max-bytes", "4gb", "--batch-groups", "8") == 0
    shown = capsys.readouterr().out
    assert "  max_bytes 4294967296 (4.0 GiB)\n" in shown
    assert "  redundancy 0 (default)\n" in shown
    assert "trainer" not in shown
    queue = TrainerQueue(redis_url, run, batch_groups=3, max_staleness=1, commit="each_batch")
    assert queue.epoch
    queue.close()
    assert call(redis_url, run, "runs", "show") == 0
    assert "  batch_groups 3\n  max_staleness 1\n  drop_after 2\n" in capsys.readouterr().out
    assert call(redis_url, run, "runs", "show", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["batch_groups"] == 8
    assert shown["trainer"] == {"batch_groups": 3, "max_staleness": 1, "drop_after": 2}


def test_settings_change_while_nobody_uses_the_run(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--max-bytes", "64mb", "--zero-variance-filter", "--difficulty-low", "0.2"]
    assert call(redis_url, run, "runs", "create", *given) == 0
    with producing(redis_url, run) as producer:
        push_groups(producer, 2)
        assert call(redis_url, run, "runs", "change", "--max-bytes", "32mb") == 1
        assert f"run {run} is in use by producer " in capsys.readouterr().err
        producer.finish()
    changed = ["--max-bytes", "32mb", "--no-zero-variance-filter", "--group-deadline-s", "60"]
    assert call(redis_url, run, "runs", "change", *changed) == 0
    assert "  max_bytes 33554432 (32.0 MiB)\n" in capsys.readouterr().out
    manifest = join(redis_url, run).manifest
    assert (manifest.max_bytes, manifest.zero_variance_filter) == (32 << 20, False)
    assert (manifest.group_deadline_s, manifest.difficulty_low) == (60.0, 0.2)
    for words, message in (
        (["--shards", "2"], "shards cannot be changed"),
        (["--scorers", "a"], "scorers cannot be changed"),
        (["--difficulty-high", "0.1"], "difficulty_low 0.2 is not below difficulty_high 0.1"),
        ([], "no setting is given"),
    ):
        assert call(redis_url, run, "runs", "change", *words) == 1
        assert message in capsys.readouterr().err
    assert join(redis_url, run).manifest == manifest


def test_who_joined_before_a_change_stops(redis_url: str, run: str) -> None:
    assert call(redis_url, run, "runs", "create", "--max-bytes", "64mb") == 0
    for size in ("32mb", "16mb"):
        joined = join(redis_url, run)
        assert call(redis_url, run, "runs", "change", "--max-bytes", size) == 0
        with pytest.raises(ManifestMismatchError, match=r"max_bytes is .* it was changed"):
            joined.refresh_if_changed()


@pytest.mark.server
def test_a_budget_above_the_servers_memory_is_refused_before_it_is_written(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with EmbeddedServer(maxmemory="64mb") as small:
        assert call(small.url, run, "runs", "create", "--max-bytes", "100mb") == 1
        assert "max_bytes is 104857600, more than 0.7 of the server's maxmemory" in capsys.readouterr().err
        assert call(small.url, run, "runs", "create", "--max-bytes", "40mb") == 0
        assert call(small.url, run, "runs", "change", "--max-bytes", "100mb") == 1
        assert join(small.url, run).manifest.max_bytes == 40 << 20


@pytest.mark.release
@pytest.mark.server
def test_a_server_that_may_lose_data_is_told_of(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    policy = {"maxmemory-policy": "allkeys-lru"}
    with EmbeddedServer(maxmemory="64mb", extra_options=policy) as evicting:
        join(evicting.url, run)
        assert call(evicting.url, run, "status") == 0
        shown = capsys.readouterr().out
        assert "  SERVER deletes keys when its memory is full (maxmemory-policy allkeys-lru)" in shown
        assert "  SERVER keeps nothing on disk (appendonly no)" in shown
        assert call(evicting.url, run, "status", "--check") == 1
        server = read_status(join(evicting.url, run)).server
        assert (server.maxmemory_policy, server.aof_enabled) == ("allkeys-lru", 0)
        evicting_client = join(evicting.url, run).connection.scripts
        evicting_client.config_set("maxmemory-policy", "noeviction")
        evicting_client.config_set("appendonly", "yes")
        capsys.readouterr()
        assert call(evicting.url, run, "status", "--check") == 0
        assert "SERVER" not in capsys.readouterr().out


@pytest.mark.server
@pytest.mark.parametrize(("stage", "lines"), [("grouper", 2), ("advantage", 1)])
def test_a_worker_warns_of_a_server_that_may_lose_data(
    run: str, stage: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedServer(maxmemory="64mb", extra_options={"maxmemory-policy": "allkeys-lru"}) as evicting:
        warn_of_server(join(evicting.url, run), stage)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == lines
    assert "the server deletes keys" in said[0]


def test_another_value_says_how_to_change_it(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(redis_url, run, "runs", "create", "--max-bytes", "64mb", "--redundancy", "1") == 0
    assert call(redis_url, run, "runs", "create", "--max-bytes", "32mb") == 1
    error = capsys.readouterr().err
    assert (
        f"run {run} has 67108864: leave it out, or stop the run's processes and use `streamadv runs" in error
    )
    assert call(redis_url, run, "runs", "create", "--redundancy", "2") == 1
    assert f"run {run} was created with 1: leave it out, or use another run name" in capsys.readouterr().err


def test_a_run_in_use_is_not_deleted(redis_url: str, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    joined = join(redis_url, run)
    with threads(lambda stop: run_grouper(joined, stop)):
        while not read_status(joined).streams["rollouts"].alive:
            pass  # until the grouper has joined
        assert call(redis_url, run, "runs", "delete") == 1
        assert f"run {run} is in use by grouper " in capsys.readouterr().err
    assert call(redis_url, run, "runs", "delete") == 0  # it has left


@pytest.mark.parametrize("broken", [{"schema_version": "1"}, {"salts": "no"}], ids=str)
def test_a_run_whose_manifest_cannot_be_read_is_deleted_by_force(
    redis_url: str, run: str, broken: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (run, f"{run}2"):
        with producing(redis_url, name, {"shards": 2}) as producer:
            push_groups(producer, 3)
    other = join(redis_url, f"{run}2")
    client = other.connection.scripts
    theirs = {key for key in client.scan_iter() if f"{{{other.name}".encode() in key}
    client.hset(EntryKeys(run).manifest, mapping=broken)
    assert call(redis_url, run, "runs", "delete") == 1
    assert call(redis_url, run, "runs", "delete", "--force") == 0
    assert f"deleted run {run}, whose manifest cannot be read: " in capsys.readouterr().out
    assert {key for key in client.scan_iter() if run.encode() in key} == theirs
    assert list(client.hkeys(RUNS)) == [other.name.encode()]
    assert call(redis_url, run, "runs", "delete", "--force") == 1
    assert "does not exist" in capsys.readouterr().err


def test_a_run_with_a_trainer_is_deleted_by_force_only(
    redis_url: str, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = TrainerQueue(redis_url, run, batch_groups=3, commit="each_batch")
    assert queue.epoch
    while read_status(join(redis_url, run)).trainer.silent_s is None:
        pass  # its heartbeat is a thread
    assert call(redis_url, run, "runs", "delete") == 1
    assert "is in use by its trainer (job " in capsys.readouterr().err
    assert call(redis_url, run, "runs", "delete", "--force") == 0
    assert "still alive, and free to make the run anew: its trainer (job " in capsys.readouterr().out
    queue.close()


@pytest.mark.processes
@pytest.mark.slow
def test_a_watch_ends_with_ctrl_c_in_silence(redis_url: str, run: str) -> None:
    join(redis_url, run)
    words = ["status", "--watch", "--redis", redis_url, "--run", run]
    watch = subprocess.Popen(
        [sys.executable, "-m", "streamadv", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert watch.stdout is not None
    heads = 0
    while heads < 2:  # repeated, as this is no terminal
        heads += watch.stdout.readline().startswith(f"run {run}: 1 shard")
    watch.send_signal(signal.SIGINT)
    _, errors = watch.communicate(timeout=240)
    assert (watch.returncode, errors) == (130, "")
