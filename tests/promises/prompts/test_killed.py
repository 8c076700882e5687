"""Producers and the trainer are killed at random: each prompt of each epoch is trained once, or given up.

Real processes: three producers and a trainer that saves checkpoints. Its weights are the list of what it trained on.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from streamadv.prompts.spec import identity
from streamadv.prompts.stored import read, read_sets
from streamadv.status.prompts import progress_of
from tests.support import join, problems, working

EPOCHS = int(os.environ.get("STREAMADV_PROMPTS_EPOCHS", "3"))
COUNT = int(os.environ.get("STREAMADV_PROMPTS_COUNT", "100"))
SEED = int(os.environ.get("STREAMADV_PROMPTS_SEED", "0"))
KILLS = int(os.environ.get("STREAMADV_PROMPTS_KILLS", "12"))
SIZE = 4

PRODUCER = """
import random, sys
import streamadv as sa
from streamadv.producer import logic
logic.HEARTBEAT_S = 1.0
url, run, name, count, epochs = *sys.argv[1:4], *map(int, sys.argv[4:6])
prompts = sa.Prompts(list(range(count)), epochs=epochs)

def play(rollout, prompt):
    if random.random() < 0.05:
        raise RuntimeError("the environment is broken")
    columns = dict(input_ids=[prompt, 2, 3], response_mask=[0, 1, 1], rollout_log_probs=[-1.0] * 3)
    rollout.push(**columns, reward=random.random())

settings = sa.RunSettings(batch_groups=4, max_staleness=1)
with sa.Producer(url, run, name=name, settings=settings) as producer:
    for prompt, group in producer.prompts(prompts, 4):
        group.run(play, prompt, threads=1)
"""
TRAINER = """
import json, sys
from streamadv.trainer.queue import TrainerQueue
url, run, folder = sys.argv[1:4]
with TrainerQueue(url, run, batch_groups=4, max_staleness=1, chain={"estimator": "reinforce"}) as queue:
    path = queue.resume(folder)
    weights = json.loads((path / "weights.json").read_text()) if path else []
    def save():
        with queue.checkpoint(folder) as path:
            (path / "weights.json").write_text(json.dumps(weights))
    while (batch := queue.next_batch()) is not None:
        weights += sorted({each.group_id for each in batch.references})
        queue.trained(batch)
        if batch.version % 3 == 2:
            save()
    save()
"""


class Processes:
    """The processes of a run, which are started again after they were killed."""

    def __init__(self, url: str, run: str, folder: Path) -> None:
        self.commands = {
            f"engine-{number}": [PRODUCER, url, run, f"engine-{number}", str(COUNT), str(EPOCHS)]
            for number in range(3)
        }
        self.commands["trainer"] = [TRAINER, url, run, str(folder)]
        self.log = (folder.parent / "processes.log").open("ab")
        self.alive = {name: self._start(name) for name in self.commands}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", *self.commands[name]], stderr=self.log, stdout=self.log
        )

    def kill(self, name: str) -> None:
        if self.alive[name].poll() is None:
            self.alive[name].kill()
            self.alive[name].wait()
            self.alive[name] = self._start(name)

    def wait(self, seconds: float) -> dict[str, int]:
        """Exit statuses, once all have ended."""
        until = time.monotonic() + seconds
        return {name: each.wait(max(1.0, until - time.monotonic())) for name, each in self.alive.items()}

    def end(self) -> None:
        for each in self.alive.values():
            with suppress(ProcessLookupError):
                each.kill()
            each.wait()
        self.log.close()


@pytest.mark.processes
@pytest.mark.release
@pytest.mark.timeout(900)
def test_each_prompt_ends_once_whoever_is_killed(redis_url: str, run: str, tmp_path: Path) -> None:
    source = random.Random(SEED)
    folder = tmp_path / "checkpoints"
    joined = join(redis_url, run)
    processes = Processes(redis_url, run, folder)
    try:
        with working(joined):
            for _ in range(KILLS):
                time.sleep(source.uniform(0.5, 3.0))  # no wait for anything: kills come when they come
                processes.kill(source.choice(list(processes.commands)))
            statuses = processes.wait(600)
    finally:
        processes.end()
    assert set(statuses.values()) == {0}, (tmp_path / "processes.log").read_text()[-3000:]
    newest = max(folder.iterdir(), key=lambda path: int(path.name))
    weights = json.loads((newest / "weights.json").read_text())
    trained = Counter(map(identity, weights))
    assert set(trained.values()) == {1}
    (progress,) = progress_of(read(joined, read_sets(joined)[0]))
    assert progress.trained == len(trained)
    assert (progress.in_play, progress.left) == (0, 0)
    assert progress.trained + sum(progress.given_up.values()) == COUNT * EPOCHS
    assert set(progress.given_up) <= {"incomplete", "stale"}  # what a killed producer had begun may be old
    assert not problems(joined)
    print(f"{COUNT} prompts, {EPOCHS} epochs, {KILLS} kills: {progress}")
