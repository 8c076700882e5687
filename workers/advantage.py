"""The advantage worker process: computes the advantage chain of named batches."""

from __future__ import annotations

from contextlib import suppress

import torch

from streamadv import metrics
from streamadv.advantage.prepare import check_chains
from streamadv.advantage.worker import run_worker
from streamadv.algorithms.device import choose_device
from streamadv.processes.memory import keep_freed_memory
from streamadv.run.consumer import ADVANTAGE
from streamadv.settings import Settings
from streamadv.store.retry import RETRYABLE

from .process import join_run, leave, say_ready, stop_on_signals


def main(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT."""
    torch.set_num_threads(settings.torch_threads)  # another thread count may change the last bit of a sum
    keep_freed_memory()
    stop = stop_on_signals()
    metrics.begin_stage(ADVANTAGE, "advantage")
    choose_device(settings.device)
    run = join_run(settings, stop, ADVANTAGE)
    with suppress(*RETRYABLE):  # then the loop checks them when the server is back
        check_chains(run)
    say_ready(run)
    run_worker(run, stop, device=settings.device)
    leave()
