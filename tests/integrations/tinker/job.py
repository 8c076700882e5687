"""A trainer in a process of its own: `python -m tests.integrations.tinker.job URL RUN FOLDER CALL COUNT`."""

from __future__ import annotations

import sys
from pathlib import Path

from tinker import AdamParams

import streamadv as sa
from streamadv.integrations.tinker import train

from .standin import Client


def main(url: str, run: str, folder: str, call: str, count: str) -> None:
    states = Path(folder) / "states"
    states.mkdir(exist_ok=True)
    client = Client(states, (call, int(count)))
    queue = sa.TrainerQueue(url, run, batch_groups=2, tokens_per_micro_batch=40, max_staleness=None)
    adam = AdamParams(learning_rate=0.05)
    train(queue, client, Path(folder) / "checkpoints", adam=adam, save_every=3)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
