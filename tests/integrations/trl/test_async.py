"""AsyncGRPOTrainer on a queue: rows are counted, so a checkpoint in the middle of a batch loses and repeats none."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.async_grpo_trainer import RolloutWorkerProtocol
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

import streamadv as sa
from streamadv.integrations.transformers import newest_checkpoint
from streamadv.integrations.trl.async_grpo import (
    WITHOUT_EFFECT,
    QueueAsyncGRPOTrainer,
    QueueRolloutWorker,
)
from tests.support import join, ledger, problems, working

from .async_jobs import ROWS_A_STEP, train_async
from .jobs import TIMEOUT_S, run_job
from .test_queue import SIZE, push


def test_the_worker_has_the_protocol_of_this_trl() -> None:
    methods = {
        name: function
        for name, function in inspect.getmembers(RolloutWorkerProtocol, inspect.isfunction)
        if not name.startswith("_")
    }
    assert set(methods) == {"start", "stop", "update_model_version", "check_health"}
    for name, method in methods.items():
        ours = inspect.signature(getattr(QueueRolloutWorker, name))
        assert list(ours.parameters) == list(inspect.signature(method).parameters), name
    assert set(inspect.get_annotations(RolloutWorkerProtocol)) == {"rollout_buffer", "metrics_queue"}
    assert [field.name for field in fields(RolloutSample)] == [
        *("prompt", "completion", "input_ids", "completion_mask", "old_log_probs", "advantage"),
        *("model_version", "group_id", "metrics", "enqueued_at"),
    ]


#: Settings of AsyncGRPOConfig beside transformers' own that hold, or are refused by name.
HOLD = (
    *("dtype", "epsilon", "epsilon_high", "model_init_kwargs", "num_generations", "router_aux_loss_coef"),
    *("temperature", "token_budget", "trust_remote_code", "vllm_server_base_url", "vllm_server_timeout"),
    *("weight_sync_steps", "weight_sync_timeout"),
)


def test_every_setting_is_in_one_table() -> None:
    of_transformers = {field.name for field in fields(TrainingArguments)}
    names = {field.name for field in fields(AsyncGRPOConfig)} - of_transformers
    assert sorted([*HOLD, *WITHOUT_EFFECT]) == sorted(names)


def test_settings_of_the_worker_that_the_queue_replaces_are_named_in_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = AsyncGRPOConfig(output_dir=str(tmp_path), max_steps=1, token_budget=0, use_cpu=True, bf16=False)
    for name in WITHOUT_EFFECT:
        setattr(args, name, "set")
    monkeypatch.setattr(AsyncGRPOTrainer, "__init__", None)  # what follows needs a model
    with pytest.raises(TypeError):
        QueueAsyncGRPOTrainer("model", args, None)
    assert f"settings of AsyncGRPOConfig have no effect: {', '.join(WITHOUT_EFFECT)}" in caplog.messages


@pytest.mark.server
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_a_trainer_killed_in_the_middle_of_a_batch_trains_on_every_row_once(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    """Steps of 6 rows, batches of 8, checkpoints after 3 and 6 steps."""
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 32)
        with working(join(redis_url, run)):
            assert run_job(train_async, redis_url, run, 8, tmp_path, 5, logs=tmp_path) == [-9]
            state = json.loads((tmp_path / "out" / "checkpoint-3" / "streamadv.json").read_text())
            assert (state["version"], state["trl_rows"][0]) == (2, 2)
            assert run_job(train_async, redis_url, run, 8, tmp_path, logs=tmp_path) == [0]
    checkpoint = Path(newest_checkpoint(tmp_path / "out") or "")
    assert checkpoint.name == "checkpoint-8"
    rows = [tuple(row) for row in json.loads((checkpoint / "rows.json").read_text())]
    assert len(rows) == len(set(rows)) == 8 * ROWS_A_STEP
    joined = join(redis_url, run)
    assert ledger(joined)["trained"] == 6 * 2 * SIZE
    assert problems(joined) == []
