"""A scripted trainer: its weights are the list of trajectories it was trained on, saved with the queue's state.

Each life writes its checkpoints under its own epoch, and a new one goes on from the newest of all: what an older
life, paused and fenced, still writes is no longer in the lineage once a newer one has saved.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any, Final

from streamadv.errors import BatchLostError, EpochFencedError
from streamadv.run import heartbeats
from streamadv.trainer.queue import TrainerQueue

from .checks import Identity
from .setup import Setup
from .victim import SAVE_COMMIT, Hook

FENCED: Final = 3  # exit status: another trainer has taken over
LOST: Final = 4  # exit status: a named batch is gone, to be started again from the checkpoint


def newest_checkpoint(folder: Path) -> dict[str, Any] | None:
    """What the lineage consists of."""
    files = sorted(folder.glob("checkpoint-*.json"))
    return json.loads(files[-1].read_text()) if files else None


def read_deliveries(folder: Path) -> list[tuple[int, int, list[Identity]]]:
    """Every delivered batch: epoch, version, members."""
    file = folder / "deliveries.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = []
    for line in lines:
        epoch, version, members = json.loads(line)
        found.append((epoch, version, [(group_id, index) for group_id, index in members]))
    return found


def run_trainer(setup: Setup, reached: Hook) -> int:
    """Train until the run has ended."""
    vars(heartbeats)["PRODUCER_TIMEOUT_S"] = setup.producer_timeout_s
    try:
        return _train(setup, reached)
    except EpochFencedError:
        return FENCED
    except BatchLostError as error:
        print(error, flush=True)
        return LOST


def _train(setup: Setup, reached: Hook) -> int:
    queue = TrainerQueue(
        setup.url,
        setup.run,
        batch_groups=setup.batch_groups,
        max_staleness=setup.max_staleness,
        chain=setup.chain,
        pushed=("values",),
        late={"ref_log_probs": lambda micro_batch: -micro_batch.input_ids.float()},  # what is kept has it
        commit="manual",
        settings=setup.run_settings,
    )
    weights: list[Any] = []
    assert queue.epoch  # an older trainer, should it still be there, commits nothing from here on
    found = newest_checkpoint(setup.path)
    if found is not None:
        weights = found["weights"]
        queue.load_state_dict(found["state"])
    chance = random.Random(f"{setup.seed}/{queue.epoch}")
    for batch in queue:
        members = [(each.group_id, each.rollout_index) for each in batch.references]
        with (setup.path / "deliveries.jsonl").open("a") as file:
            file.write(json.dumps([queue.epoch, batch.version, members]) + "\n")
        weights += members
        queue.trained(batch)
        if chance.random() < 0.4:
            _save(setup, queue, weights, reached)
    _save(setup, queue, weights, reached)
    queue.close()
    return 0


def _save(setup: Setup, queue: TrainerQueue, weights: list[Any], reached: Hook) -> None:
    state = queue.state_dict()
    target = setup.path / f"checkpoint-{queue.epoch:06d}.json"
    partial = target.with_suffix(".partial")
    with partial.open("w") as file:
        json.dump({"weights": weights, "state": state}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)
    reached(SAVE_COMMIT)
    queue.commit(state)
