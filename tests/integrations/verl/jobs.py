"""Jobs of verl in processes of their own, on CPU.

Everything of verl's trainer runs but what needs a GPU: `_setup`, in which it starts its workers. `Workers` stands in
for the actor: it keeps, in its checkpoints, which rows it was trained on.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.rollout.replica import TokenOutput
from verl.workers.utils.losses import ppo_loss

from streamadv.integrations.verl.agent_loop import QueueAgentLoopManager
from streamadv.integrations.verl.trainer import QueueSeparateAsync

from .settings import config_of

TIMEOUT_S = 600
#: The options, as `config_of` takes them.
KWARGS = "trainer__v1__sampler__sampler_kwargs"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def run_job(function: Callable[..., None], *arguments: Any, log: Path) -> int | None:
    """The exit status of `function(*arguments)` in a process."""
    process = _context.Process(target=_body, args=(function, arguments, log))
    process.start()
    process.join(TIMEOUT_S)
    is_late = process.is_alive()
    process.kill()
    process.join()
    assert not is_late, f"still at work after {TIMEOUT_S} s: {log.read_text()[-8000:]}"
    assert process.exitcode in (0, -signal.SIGKILL), log.read_text()[-8000:]
    return process.exitcode


def _body(function: Callable[..., None], arguments: tuple[Any, ...], log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    status = 1
    try:
        start_ray()
        function(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        ray.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # threads may be at work


def start_ray() -> None:
    """A cluster of this process. TransferQueue's actors want more processors than a small machine has."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # a busy machine leaves nothing to the nicest
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )


class Workers:
    """The actor's workers: verl's loss on the rows that they read from TransferQueue."""

    def __init__(self, config: Any) -> None:
        self._dispatch_info = {"actor": [0]}
        self._config = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.rows: list[str] = []
        self.seen: dict[str, dict[str, Any]] = {}  # fields of the rows of the last update

    def compute_log_prob(self, batch: Any) -> Any:
        data = tq.kv_batch_get(batch.keys, batch.partition_id, ["input_ids"])
        ids = data["input_ids"].unbind()
        made = {
            "log_probs": [-2.0 - 0.01 * row for row in ids],
            "entropy": [torch.ones(len(row)) for row in ids],
        }
        fields = {
            name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in made.items()
        }
        tq.kv_batch_put(batch.keys, batch.partition_id, TensorDict(fields, batch_size=[len(batch)]))
        return batch

    def update_actor(self, batch: Any) -> dict[str, Any]:
        data = tq.kv_batch_get(batch.keys, batch.partition_id)
        self.seen = {
            key: {name: data[name][number] for name in data.keys()}  # noqa: SIM118  a TensorDict is no dict
            for number, key in enumerate(batch.keys)
        }
        self.rows += [
            key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")
        ]
        output = {"log_probs": data["input_ids"].float() * -0.01 - 2.0}
        tokens = int(data["response_mask"].values().sum())
        assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(batch))
        loss, _ = ppo_loss(self._config, output, data)
        assert torch.isfinite(loss)
        return {"metrics": {"mfu": [0.0], "pg_loss": [float(loss)]}}

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "rows.json").write_text(json.dumps(self.rows))

    def load_checkpoint(self, local_path: str, **_: Any) -> None:
        self.rows = json.loads((Path(local_path) / "rows.json").read_text())

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class OnCpu(QueueSeparateAsync):
    """The trainer with stand-ins for what needs a GPU. It can be told when to die."""

    die = ("", 0)  # where, and at which step

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.actor_rollout_wg = Workers(self.config)
        self.checkpoint_manager = self.standalone_checkpoint_manager = Nothing()
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.current_mode = None
        self._load_checkpoint()

    def _get_n_gpus_for_throughput(self) -> int:
        return 1

    def _start_profiling(self) -> None: ...
    def _stop_profiling(self) -> None: ...

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._update_actor(batch, metrics)
        self._die_at("in the step")
        return batch

    def _save_checkpoint(self) -> None:
        commit = self.replay_buffer.queue.commit

        def dying_commit(state: dict[str, Any]) -> None:
            self._die_at("before the commit")
            commit(state)
            self._die_at("after the commit")

        self.replay_buffer.queue.commit = dying_commit
        super()._save_checkpoint()

    def _die_at(self, where: str) -> None:
        if self.die == (where, self.global_steps):
            os.kill(os.getpid(), signal.SIGKILL)


class Engine:
    """Says the digits of the prompt, with the version of its weights; every seventh request fails."""

    def __init__(self) -> None:
        self.requests = 0

    async def generate(
        self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        self.requests += 1
        request = self.requests
        await asyncio.sleep(0)
        if request % 7 == 0:
            raise RuntimeError("the engine is out of memory")
        number = 1 + request % 4
        tokens = [5 + (prompt_ids[1] + turn) % 10 for turn in range(number)]
        versions = {"min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(
            token_ids=tokens, log_probs=[-0.5] * number, extra_fields={**versions, "global_steps": 0}
        )


class Judge:
    """Scores rollouts: how many of the tokens are as the first one."""

    async def compute_score(self, data: Any) -> dict[str, Any]:
        responses = data.batch["responses"][-1]
        score = float((responses == responses[0]).float().mean())
        return {"reward_score": score, "reward_extra_info": {"acc": score}}


class Nothing:
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: {}


def trainer(folder: Path, url: str, run: str, kind: type[OnCpu] = OnCpu, **changed: Any) -> OnCpu:
    """A trainer that has loaded its newest checkpoint, and TransferQueue."""
    config = config_of(folder, url, run, **changed)
    assert issubclass(kind, get_trainer_cls(config.trainer.v1.trainer_mode))
    config.transfer_queue.enable = True
    tq.init(config.transfer_queue)
    made = kind(config)
    made.init()
    return made


def train(
    folder: Path, url: str, run: str, steps: int, die: tuple[str, int] = ("", 0), **changed: Any
) -> None:
    """Trains on what is in the run, and goes on from the newest checkpoint if there is one."""
    options = {
        f"+{KWARGS}__generate": False,
        f"+{KWARGS}__max_staleness": "null",
        "trainer__total_training_steps": steps,
    }
    made = trainer(folder, url, run, **{**options, **changed})
    made.die = die
    made.fit(None)
    tq.close()


def play(folder: Path, url: str, run: str, steps: int, die: tuple[str, int] = ("", 0)) -> None:
    """Trains on what verl's agent loops play; before the first step verl validates."""
    made = trainer(folder, url, run, trainer__total_training_steps=steps, trainer__val_before_train=True)
    made.die = die
    judge = ray.remote(Judge).remote()
    manager = QueueAgentLoopManager.create(
        config=made.config, llm_client=Engine(), teacher_client=None, reward_loop_worker_handles=[judge]
    )
    validate = made._validate

    def noted() -> Any:
        figures = validate()
        (folder / "validated.json").write_text(json.dumps(sorted(figures)))
        return figures

    made._validate = noted
    made.fit(manager)
    left = (tq.kv_list("train") or {}).get("train", {})
    (folder / "left.json").write_text(
        json.dumps([key for key, tag in left.items() if not tag.get("is_prompt")])
    )
    tq.close()
