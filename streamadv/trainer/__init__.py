"""The trainer queue: each rank plans, fetches and packs its share of a batch.

In reading order:

- `queue.py`: the object that a training loop uses.
- `loop.py`: waits for the next batch and hands it out. `session.py`: a rank's trainer sessions, what the loop
  reports, and its heartbeat.
- `collect.py`: one rank's work for one batch. `plan.py` shares rows among ranks and micro-batches; `fetch.py` reads
  packets, also ahead; `delivery.py` takes the five steps from computed to delivered, with `late_columns.py`.
- `microbatch.py`: cuts what the loop receives, single trajectories on request. `report.py`: the metrics of a batch.
- `checkpoints.py`: saves what the loop has learned; `together.py` does it on all ranks.
"""

from .. import extras

extras.require("streamadv.trainer", *extras.TO_COMPUTE)

from .queue import TrainerQueue

__all__ = ["TrainerQueue"]
