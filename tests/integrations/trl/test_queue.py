"""A GRPOTrainer trains on what producers push; its checkpoints decide what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import streamadv as sa
from streamadv import weights
from streamadv.errors import SettingError
from streamadv.integrations.trl import QueueGRPOTrainer, newest_checkpoint, queue_for
from tests.support import join, ledger, problems, working

from .models import config, policy, tokenizer

SIZE = 4


def push(producer: sa.Producer, groups: int) -> None:
    """Groups of random responses; the reward is the share of 5s."""
    random = np.random.default_rng(groups)
    for _ in range(groups):
        with producer.group(SIZE) as group:
            for rollout in group:
                ids = random.integers(3, 13, 2 + int(random.integers(3, 8)))
                mask = np.r_[0, 0, np.ones(len(ids) - 2)]
                log_probs = -2.5 * mask
                rollout.push(
                    input_ids=ids,
                    response_mask=mask.astype(bool),
                    rollout_log_probs=log_probs,
                    reward=float((ids[2:] == 5).mean() + 0.01 * len(ids)),
                )


def trainer(url: str, run: str, folder: Path, **options: Any) -> QueueGRPOTrainer:
    args = config(folder / "out", save_strategy="steps", save_steps=2, **options)
    queue = queue_for(
        args, url, run=run, batch_groups=2, max_staleness=None, tokens_per_micro_batch=20, chain="grpo"
    )
    return QueueGRPOTrainer(
        policy(), args, queue, weights=folder / "weights", keep_every=2, processing_class=tokenizer()
    )


@pytest.mark.server
def test_batches_are_trained_on_and_committed_with_checkpoints(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 20)
        with working(join(redis_url, run)):
            made = trainer(redis_url, run, tmp_path, max_steps=10)
            before = made.model.lm_head.weight.detach().clone()
            made.train()
    joined = join(redis_url, run)
    assert ledger(joined)["trained"] == 10 * 2 * SIZE
    assert problems(joined) == []
    checkpoint = Path(newest_checkpoint(tmp_path / "out") or "")
    assert checkpoint.name == "checkpoint-10"
    assert json.loads((checkpoint / "streamadv.json").read_text())["version"] == 10
    assert not torch.equal(made.model.lm_head.weight, before)
    published = policy(seed=1)
    assert weights.Loader(tmp_path / "weights").refresh(published) == 10
    assert weights.versions(tmp_path / "weights") == [0, *range(2, 11)]
    torch.testing.assert_close(published.lm_head.weight, made.model.lm_head.weight)
    logged = made.state.log_history[0]
    assert logged["critic/score/mean"] > 0
    assert {"loss", "entropy", "grad_norm"} <= logged.keys()
    last = made.state.log_history[-1]
    assert last["train_samples_per_second"] == pytest.approx(10 * 2 * SIZE / last["train_runtime"], abs=1e-3)
    made.queue.close()


class _AsksForACheckpoint(TrainerCallback):
    """SIGTERM while the optimizer steps: the checkpoint is saved by transformers' own callback after the step."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if state.global_step == 2:
            (jit,) = (
                each
                for each in self.trainer.callback_handler.callbacks
                if isinstance(each, JITCheckpointCallback)
            )
            jit.jit_manager.is_checkpoint_requested = True


@pytest.mark.server
def test_a_checkpoint_of_another_callback_has_the_batch_of_its_step(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 12)
        with working(join(redis_url, run)):
            made = trainer(redis_url, run, tmp_path, max_steps=6, enable_jit_checkpoint=True)
            asks = _AsksForACheckpoint()
            asks.trainer = made
            made.add_callback(asks)
            made.train()
            made.queue.close()
    checkpoint = Path(newest_checkpoint(tmp_path / "out") or "")
    assert checkpoint.name == "checkpoint-3"
    assert json.loads((checkpoint / "streamadv.json").read_text())["version"] == 3


@pytest.mark.server
def test_training_ends_with_the_run_and_saves_what_it_has_trained(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 6)
        producer.finish()
        with working(join(redis_url, run)):
            made = trainer(redis_url, run, tmp_path, max_steps=100)
            made.train()
    assert made.state.global_step == 3
    assert newest_checkpoint(tmp_path / "out") == str(tmp_path / "out" / "checkpoint-3")
    assert ledger(join(redis_url, run))["trained"] == 6 * SIZE
    made.queue.close()


@pytest.mark.server
def test_a_checkpoint_without_the_state_of_a_queue_is_refused(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    made = trainer(redis_url, run, tmp_path)
    (tmp_path / "out" / "checkpoint-1").mkdir(parents=True)
    with pytest.raises(SettingError, match=r"its streamadv.json cannot be read"):
        made.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    with pytest.raises(SettingError, match="resume_from_checkpoint is True: no checkpoint"):
        made.train(resume_from_checkpoint=True)
    assert newest_checkpoint(tmp_path / "out") is None
    made.queue.close()


def test_a_log_over_several_batches_has_the_largest_the_sum_and_the_newest(tmp_path: Path) -> None:
    args = config(tmp_path, logging_steps=2)
    made = QueueGRPOTrainer(
        policy(), args, queue_for(args, "redis://localhost:1", run="none"), processing_class=tokenizer()
    )
    figures = {
        "response_length/max": (7.0, 3.0),
        "response_length/min": (2.0, 1.0),
        "ledger/trained": (8.0, 16.0),
        "trajectories/pushed": (8.0, 4.0),
        "groups/kept_ratio": (1.0, 0.5),
        "critic/score/mean": (0.25, 0.75),
    }
    for name, values in figures.items():
        made._figures[name] += values
    logs = {"loss": 1.0}
    made.log(logs)
    assert {name: logs[name] for name in figures} == {
        "response_length/max": 7.0,
        "response_length/min": 1.0,
        "ledger/trained": 16.0,
        "trajectories/pushed": 12.0,
        "groups/kept_ratio": 0.75,
        "critic/score/mean": 0.5,
    }


@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]])
def test_published_weights_of_adapters_are_merged_under_the_names_of_the_model(
    modules_to_save: list[str] | None, tmp_path: Path
) -> None:
    args = config(tmp_path / "out")
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, modules_to_save=modules_to_save
    )
    made = QueueGRPOTrainer(
        policy(),
        args,
        queue_for(args, "redis://localhost:1", run="none"),
        weights=tmp_path / "weights",
        processing_class=tokenizer(),
        peft_config=lora,
    )
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    ids = torch.arange(3, 12)[None]
    made.model.eval()
    with torch.no_grad():
        wanted = made.model(input_ids=ids).logits
    for version in range(3):
        made._publish(version)
    engine = policy(seed=1).eval()
    assert weights.Loader(tmp_path / "weights").refresh(engine) == 2
    with torch.no_grad():
        torch.testing.assert_close(engine(input_ids=ids).logits, wanted, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in made.model.state_dict().items())


def test_adapters_that_are_no_weights_are_refused_where_weights_are_published(tmp_path: Path) -> None:
    args = config(tmp_path / "out")
    with pytest.raises(SettingError, match="weights is a folder: this kind of adapter cannot be merged"):
        QueueGRPOTrainer(
            policy(),
            args,
            queue_for(args, "redis://localhost:1", run="none"),
            weights=tmp_path / "weights",
            processing_class=tokenizer(),
            peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        )
