"""docs/operate/upgrade.md: what a restored server and its checkpoints know; a backup may be made any time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from streamadv.producer import Producer
from streamadv.run import Run
from streamadv.store.embedded import EmbeddedServer
from streamadv.trainer.queue import TrainerQueue
from tests.docs.story import blocks_of
from tests.support import group_all, join, ledger, next_batch, problems, push_groups, pushed_run

pytestmark = [pytest.mark.server, pytest.mark.processes]

WAIT_S: Final = 240.0  # bounds a hang


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "data", appendfsync="always") as running:
        yield running


def back_up(server: EmbeddedServer, folder: Path) -> None:
    """Run the page's backup.py."""
    (code,) = [block.code for block in blocks_of("docs/operate/upgrade.md") if "backup.py" in block.title]
    (folder / "backup.py").write_text(code)
    command = [sys.executable, "backup.py", server.url, "data", "backup"]
    subprocess.run(command, cwd=folder, check=True, timeout=WAIT_S)


def restore(server: EmbeddedServer, folder: Path) -> Run:
    """The server dies with its disk, and comes back with the backup."""
    server.kill()
    shutil.rmtree(folder / "data")
    shutil.copytree(folder / "backup", folder / "data")
    server.start()
    return join(server.url, "exp1")


class Trainer:
    """A trainer of batches of two groups. `groups`: those in its weights."""

    def __init__(self, url: str, checkpoint: str | None = None) -> None:
        self.queue = TrainerQueue(url, "exp1", batch_groups=2, commit="manual", durability_window=0.0)
        self.groups: list[str] = []
        if checkpoint is not None:
            saved = json.loads(checkpoint)
            self.groups = saved["groups"]
            self.queue.load_state_dict(saved["queue"])

    def train(self, run: Run, batches: int) -> str:
        """The checkpoint after so many batches, committed."""
        for _ in range(batches):
            batch = next_batch(self.queue, run)
            if batch is None:
                break
            self.groups += {reference.group_id for reference in batch.references}
            self.queue.trained(batch)
        state: dict[str, Any] = self.queue.state_dict()
        self.queue.commit(state)
        return json.dumps({"queue": state, "groups": self.groups})


@pytest.mark.parametrize("going_on", ["from before the backup", "from the newest", "without a restart"])
def test_what_is_lost_and_what_is_trained_on_twice(
    server: EmbeddedServer, tmp_path: Path, going_on: str
) -> None:
    run = pushed_run(server.url, "exp1", 14)
    trainer = Trainer(server.url)
    second = trainer.train(run, 2)
    back_up(server, tmp_path)
    trainer.train(run, 2)
    sixth = trainer.train(run, 2)
    with Producer(server.url, "exp1") as producer:
        push_groups(producer, 2, prefix="late")
    group_all(run)
    run = restore(server, tmp_path)
    assert (ledger(run)["pushed"], ledger(run)["trained"]) == (28, 8)
    with Producer(server.url, "exp1") as producer:
        producer.finish()
    if going_on == "from before the backup":
        trainer = Trainer(server.url, second)
    elif going_on == "from the newest":
        trainer = Trainer(server.url, sixth)
    trainer.train(run, 16)
    twice = {group for group, times in Counter(trainer.groups).items() if times > 1}
    assert set(trainer.groups) == {f"g{number:04}" for number in range(14)}, "those pushed later are lost"
    # The newest commit is the sixth batch's; batch 3 may have been named before the backup.
    assert (
        twice == set()
        if going_on == "from before the backup"
        else twice <= {"g0004", "g0005", "g0006", "g0007"}
    )
    assert going_on == "from before the backup" or twice, "the page warns of it"
    assert ledger(run) == {
        "pushed": 28,
        "trained": 28,
        "dropped": {},
        "dead": {},
        "queued": 0,
        "in_flight": 0,
    }
    assert problems(run) == []


def test_a_backup_of_a_server_at_work_is_of_one_moment(server: EmbeddedServer, tmp_path: Path) -> None:
    with Producer(server.url, "exp1") as producer:
        begun, done = threading.Event(), threading.Event()

        def push() -> None:
            number = 0
            while not done.is_set():
                push_groups(producer, 4, prefix=f"batch{number}-")
                begun.set()
                number += 1

        pushing = threading.Thread(target=push)
        pushing.start()
        try:
            begun.wait(WAIT_S)
            back_up(server, tmp_path)
        finally:
            done.set()
            pushing.join(WAIT_S)
    pushed = ledger(join(server.url, "exp1"))["pushed"]
    run = restore(server, tmp_path)
    assert 0 < ledger(run)["pushed"] <= pushed
    group_all(run)
    assert problems(run) == []
