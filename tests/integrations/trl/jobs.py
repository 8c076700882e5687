"""Training jobs in processes of their own, on CPU: ranks that compute a gradient, and runs that are killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from streamadv.integrations.trl import QueueGRPOTrainer, newest_checkpoint, queue_for
from streamadv.store.embedded import free_port

from .models import batch_of, config, policy, rows, tokenizer

ROWS = rows((6, 9, 4, 7, 12, 5))
#: What each of two ranks has of them: another number of rows each time, once none.
PARTS = (
    ([ROWS[:2], ROWS[2:3], ROWS[3:4]], [ROWS[4:5], [], ROWS[5:]]),
    ([ROWS[:3], ROWS[3:], []], [[], [], []]),
)
TIMEOUT_S = 150
NOWHERE = "redis://localhost:1"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def run_job(function: Callable[..., None], *arguments: Any, ranks: int = 1, logs: Path) -> list[int | None]:
    """`function(*arguments)` on so many ranks; their exit statuses."""
    port = free_port()
    started = [
        _context.Process(target=_body, args=(function, arguments, rank, ranks, port, logs / f"log-{rank}"))
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(TIMEOUT_S)
        process.kill()
        process.join()
    statuses = [process.exitcode for process in started]
    for rank, status in enumerate(statuses):
        assert status in (0, -signal.SIGKILL), (logs / f"log-{rank}").read_text()[-8000:]
    return statuses


def _body(
    function: Callable[..., None], arguments: tuple[Any, ...], rank: int, ranks: int, port: int, log: Path
) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    status = 1
    try:
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads may be at work


def trainer(
    folder: Path, url: str, run: str, kind: type[QueueGRPOTrainer] = QueueGRPOTrainer, **options: Any
) -> QueueGRPOTrainer:
    backend = {"ddp_backend": "gloo"} if "WORLD_SIZE" in os.environ else {}
    args = config(folder / "out", **backend, **options)
    queue = queue_for(args, url, run=run, batch_groups=2, max_staleness=None, tokens_per_micro_batch=20)
    return kind(policy(), args, queue, processing_class=tokenizer(), weights=folder / "weights")


def gradients(loss_types: tuple[str, ...], folder: Path) -> None:
    """Writes loss and gradient of each loss type and cut, as this rank has them."""
    made = {}
    for loss_type in loss_types:
        for number, parts in enumerate(PARTS):
            one = trainer(folder, NOWHERE, "none", loss_type=loss_type)
            model = one.accelerator.prepare(one.model)
            model.train()
            loss = one.training_step(model, batch_of(parts[one.args.process_index], ROWS))
            total = one.accelerator.reduce(loss, reduction="mean")
            gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
            made[f"{loss_type} {number}"] = (float(total), gradient)
    torch.save(made, folder / f"gradients-{one.args.process_index}")


class Recorded(QueueGRPOTrainer):
    """Its checkpoints hold the ids of the groups that it was trained on. It can be told when to die."""

    die = ("", 0)  # where, and at which version
    groups: tuple[str, ...] = ()

    def _die_at(self, where: str, version: int) -> None:
        if self.die == (where, version):
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, *arguments: Any) -> torch.Tensor:
        loss = super().training_step(*arguments)
        assert self.batch is not None
        self._die_at("in the step", self.batch.version)
        self.groups += tuple(sorted({reference.group_id for reference in self.batch.references}))
        return loss

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "groups.json").write_text(json.dumps(self.groups))
        commit = self.queue.commit

        def dying_commit(state: dict[str, Any]) -> None:
            self._die_at("before the commit", state["version"])
            commit(state)
            self._die_at("after the commit", state["version"])

        self.queue.commit = dying_commit  # type: ignore[method-assign]
        super()._save_checkpoint(model, trial)


def train(url: str, run: str, steps: int, folder: Path, die: tuple[str, int] = ("", 0)) -> None:
    """Trains, and goes on from the newest checkpoint if there is one."""
    one = trainer(folder, url, run, Recorded, max_steps=steps, save_strategy="steps", save_steps=2)
    assert isinstance(one, Recorded)
    one.die = die
    checkpoint = newest_checkpoint(folder / "out")
    if checkpoint is not None:
        one.groups = tuple(json.loads((Path(checkpoint) / "groups.json").read_text()))
    one.train(resume_from_checkpoint=checkpoint)
    torch.save(one.model.lm_head.weight.detach(), folder / f"weight-{one.args.process_index}")
    one.queue.close()
