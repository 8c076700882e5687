"""The trainer queue: each rank plans, fetches and packs its share of a batch.

Read `queue.py` first, the object that a training loop uses, with `supply.py`, how the next batch comes, and `marks.py`,
what the loop says of its batches. Then `reader.py`, what one rank does for one batch: `results_log.py` (results are
read), `plan.py` (rows are shared among ranks and micro-batches), `fetch.py` (packets, also ahead, into `memory.py`),
`delivery.py` (the five steps from computed to delivered), `late_columns.py`, `cut.py`, and `microbatch.py`, what the
loop gets, with `prompt_response.py`. `references.py` and `delivered.py` make single trajectories for whoever asks.
`checkpoints.py` saves what the loop has learned, on all ranks `together.py`.
`arguments.py` checks what the queue is given, `sessions.py` keeps a rank's trainer session and `heartbeat.py` says that
it is alive, `patience.py` and `wait.py` are how it waits, `report.py` makes the metrics of a batch.
"""

from .. import extras

extras.require_torch("streamadv.trainer")

from .queue import TrainerQueue

__all__ = ["TrainerQueue"]
