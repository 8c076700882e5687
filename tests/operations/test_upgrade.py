"""docs/operate/upgrade.md with two releases: the package as it is, and a copy that says that it is a later one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamadv.producer import Producer
from streamadv.store.connection import Connection
from streamadv.store.embedded import free_port
from streamadv.trainer.queue import TrainerQueue
from streamadv.trajectory.packet import SCHEMA_VERSION
from streamadv.version import __version__
from tests.clusters import until
from tests.support import compute_all, join, ledger, problems, push_groups

pytestmark = [pytest.mark.server, pytest.mark.processes]

ROOT: Final = Path(__file__).parents[2]
LATER: Final = "99.0.0"
WAIT_S: Final = 240.0  # bounds a hang


def release(folder: Path, schema_version: int = SCHEMA_VERSION) -> Path:
    """A release of version LATER with this schema version: the folder to import it from."""
    half_written = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")  # by other processes
    for package in ("streamadv", "workers"):
        shutil.copytree(ROOT / package, folder / package, ignore=half_written)  # with what is compiled
    (folder / "streamadv" / "version.py").write_text(f'__version__ = "{LATER}"\n')
    payload = folder / "streamadv" / "trajectory" / "packet.py"
    text, changed = re.subn(
        r"^SCHEMA_VERSION: Final = \d+$",
        f"SCHEMA_VERSION: Final = {schema_version}",
        payload.read_text(),
        flags=re.MULTILINE,
    )
    assert changed == 1
    payload.write_text(text)
    return folder


def command(place: Path, url: str, run: str, *words: str) -> subprocess.Popen[str]:
    """A command of the release at `place`."""
    return subprocess.Popen(
        [sys.executable, "-m", "streamadv", *words, "--redis", url, "--run", run],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(place)},
        cwd=place,
    )


@contextmanager
def grouper(place: Path, url: str, run: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """A grouper that has joined the run, and ends with SIGTERM if it is still there."""
    process = command(place, url, run, "worker", "grouper", "--metrics-port", str(port))
    try:
        assert process.stderr is not None
        assert any("ready: run" in line for line in process.stderr)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)


def versions(*ports: int) -> set[str]:
    """What `count by (version) (streamadv_build_info)` shows of these processes."""
    found = set()
    for port in ports:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
            for family in text_string_to_metric_families(answer.read().decode()):
                found |= {
                    sample.labels["version"]
                    for sample in family.samples
                    if sample.name == "streamadv_build_info"
                }
    return found


def until_grouped(url: str, run: str, groups: int) -> None:
    """Until groupers have read so many groups of two."""
    joined = join(url, run)
    until(lambda: joined.connection.scripts.xlen(joined.home.keys.groups) >= groups, f"{groups} groups")


@pytest.mark.slow
def test_releases_with_one_schema_version_replace_each_other(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    ports = [free_port(), free_port()]
    with Producer(redis_url, run) as producer, grouper(ROOT, redis_url, run, ports[0]) as old:
        push_groups(producer, 4)
        until_grouped(redis_url, run, 4)
        with grouper(release(tmp_path), redis_url, run, ports[1]):
            assert versions(*ports) == {__version__, LATER}, "a mixed fleet"
            push_groups(producer, 4, prefix="mixed")
            old.send_signal(signal.SIGTERM)
            old.wait(WAIT_S)
            assert old.returncode == 0
            push_groups(producer, 4, prefix="new")
            producer.finish()
            until_grouped(redis_url, run, 12)
            assert versions(ports[1]) == {LATER}
    joined = join(redis_url, run)
    queue = TrainerQueue(redis_url, run, batch_groups=12, commit="each_batch")
    queue.open()
    compute_all(joined)
    assert ledger(joined)["pushed"] == 24
    assert ledger(joined)["dropped"] == {}
    assert problems(joined) == []
    queue.close()


@pytest.mark.release
@pytest.mark.slow
def test_a_release_with_another_schema_version_refuses_the_run_and_serves_another(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    later = release(tmp_path, SCHEMA_VERSION + 1)
    with Producer(redis_url, run) as producer:
        push_groups(producer, 2)
    with Connection(redis_url) as connection:
        before = {key: connection.scripts.dump(key) for key in connection.scripts.keys("*")}
        page = (ROOT / "docs/operate/upgrade.md").read_text()
        said = re.search(r"^run exp1 has schema version .*$", page, re.MULTILINE)
        assert said is not None
        numbers = f"schema version {SCHEMA_VERSION}, this release reads {SCHEMA_VERSION + 1}"
        expected = re.sub(r"schema version \d+, this release reads \d+", numbers, said[0])
        expected = re.sub(r"a release of version \d+", f"a release of version {SCHEMA_VERSION}", expected)
        expected = expected.replace("exp1", run)
        for words in (("worker", "grouper"), ("runs", "show")):
            refused = command(later, redis_url, run, *words)
            _, error = refused.communicate(timeout=WAIT_S)
            assert refused.returncode == 1
            assert error.strip().endswith(expected)
            assert "Traceback" not in error
        assert {key: connection.scripts.dump(key) for key in connection.scripts.keys("*")} == before
    with grouper(later, redis_url, f"{run}-2", free_port()), grouper(ROOT, redis_url, run, free_port()):
        until_grouped(redis_url, run, 2)
