"""The advantage worker process: computes the advantage chain of named batches."""

from __future__ import annotations

import torch

from streamadv import metrics
from streamadv.advantage.worker import run_worker
from streamadv.processes.malloc import keep_freed_memory
from streamadv.run.consumer import ADVANTAGE
from streamadv.run.manifest import RunSettings
from streamadv.settings import Settings

from .process import join_run, leave, stop_on_signals


def main(settings: Settings, wanted: RunSettings | None = None) -> int:
    """Run until SIGTERM or SIGINT."""
    torch.set_num_threads(settings.torch_threads)  # another thread count may change the last bit of a sum
    keep_freed_memory()
    stop = stop_on_signals()
    metrics.begin_stage(ADVANTAGE, "advantage")
    run = join_run(settings, wanted, stop, ADVANTAGE)
    run_worker(run, stop, device=settings.device)
    leave()
