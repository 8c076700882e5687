"""verl's own command line finds the trainer by VERL_USE_EXTERNAL_MODULES, and refuses what cannot hold."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo.v1 import get_trainer_cls

from streamadv.errors import SettingError
from streamadv.integrations.verl.options import options_of
from streamadv.integrations.verl.trainer import QueueColocateAsync
from tests.docs.story import ROOT, blocks_of

from .jobs import KWARGS
from .settings import config_of, overrides

NOWHERE = "redis://localhost:1"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_command_of_the_page_runs_up_to_where_verl_reserves_gpus(tmp_path: Path) -> None:
    """The trainer is registered, its configuration valid, it is made with its sampler, tokenizer and data."""
    page = next(block for block in blocks_of("docs/how-to/verl.md") if "main_ppo" in block.first_line)
    given = shlex.split(page.code.replace("\\\n", " "))
    own = {
        **dict(pair.split("=", 1) for pair in overrides(tmp_path, NOWHERE, "none")),
        **dict(pair.split("=", 1) for pair in given[given.index("verl.trainer.main_ppo") + 1 :]),
        "+ray_kwargs.ray_init.include_dashboard": "False",
        "+ray_kwargs.ray_init.object_store_memory": str(100 * 2**20),
        "ray_kwargs.ray_init.num_cpus": "16",
    }
    made = subprocess.run(
        [
            sys.executable,
            *given[1:3],
            *(f"{name}={value}" for name, value in own.items()),
            f"hydra.run.dir={tmp_path}",
        ],
        cwd=ROOT,
        env={**os.environ, "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert made.returncode != 0
    assert "self.resource_pool_manager.create_resource_pool()" in made.stdout, made.stdout[-8000:]
    assert "Total available GPUs" in made.stdout, made.stdout[-8000:]


def test_options_follow_verls_settings(tmp_path: Path) -> None:
    options = options_of(
        config_of(
            tmp_path,
            NOWHERE,
            "exp1",
            trainer__v1__separate_async__num_warmup_batches=1.5,
            **{f"+{KWARGS}__chain": "verl/grpo", f"+{KWARGS}__min_groups": 1},
        ),
        "separate_async",
    )
    assert (options.url, options.run, options.advantages, options.generate) == (
        NOWHERE,
        "exp1",
        "streamadv",
        True,
    )
    assert (options.window, options.updates_per_sync) == (10, 2)
    assert options.queue == {
        "batch_groups": 2,
        "max_staleness": 6,
        "prefetch": 2,
        "commit": "manual",
        "chain": "verl/grpo",
        "min_groups": 1,
    }


def test_a_colocated_trainer_syncs_after_each_batch(tmp_path: Path) -> None:
    options = options_of(config_of(tmp_path, NOWHERE, "exp1"), "colocate_async")
    assert (options.window, options.updates_per_sync, options.queue["batch_groups"]) == (8, 1, 4)
    assert get_trainer_cls("streamadv_colocate_async") is QueueColocateAsync


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {f"+{KWARGS}__batch_size": 8},
            "sampler_kwargs: 'batch_size' is unknown, use advantages, batch_groups",
        ),
        ({f"+{KWARGS}__advantages": "ours"}, "advantages is 'ours', needs streamadv or verl"),
        ({f"+{KWARGS}__prefetch": 0}, "prefetch is 0, needs at least parameter_sync_step - 1"),
        ({"data__train_batch_size": 3}, "data.train_batch_size is 3, needs a multiple of"),
        ({"trainer__save_freq": -1}, "trainer.save_freq is -1: without checkpoints nothing is committed"),
        ({"actor_rollout_ref__actor__checkpoint__async_save": True}, "actor.checkpoint.async_save is set"),
        ({"algorithm__adv_estimator": "gae"}, "algorithm.adv_estimator is gae, with a critic"),
        ({"algorithm__use_kl_in_reward": True}, "algorithm.use_kl_in_reward is set"),
        ({"algorithm__filter_groups__enable": True}, "algorithm.filter_groups is enabled"),
        ({"reward__reward_model__enable": True}, "reward.reward_model shares the trainer's devices"),
        ({"distillation__enabled": True}, "distillation is enabled"),
        (
            {"trainer__v1__separate_async__hybrid_rollout__enable_switch": True},
            "hybrid_rollout.enable_switch",
        ),
        ({"skip__rollout_tq__enable": True}, "skip.rollout_tq is enabled"),
    ],
)
def test_what_cannot_hold_is_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=message):
        options_of(config_of(tmp_path, NOWHERE, "none", **changed), "separate_async")


@pytest.mark.parametrize(
    "changed",
    [
        {"trainer__save_freq": -1, f"+{KWARGS}__commit": "each_batch"},
        {"algorithm__adv_estimator": "gae", f"+{KWARGS}__advantages": "verl"},
        {"algorithm__use_kl_in_reward": True, f"+{KWARGS}__advantages": "verl"},
    ],
)
def test_the_remedies_hold(changed: dict[str, Any], tmp_path: Path) -> None:
    options_of(config_of(tmp_path, NOWHERE, "none", **changed), "separate_async")
