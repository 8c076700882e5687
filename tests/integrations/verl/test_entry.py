"""verl's own command line finds the trainer by VERL_USE_EXTERNAL_MODULES, and refuses what cannot hold."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from streamadv.algorithms import build_chain
from streamadv.errors import SettingError
from streamadv.integrations.verl.algorithm import UNFED, chain_of
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
    page = next(block for block in blocks_of("docs/train/verl.md") if "main_ppo" in block.first_line)
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
        "tokens_per_micro_batch": None,
    }


def test_a_colocated_trainer_syncs_after_each_batch(tmp_path: Path) -> None:
    options = options_of(config_of(tmp_path, NOWHERE, "exp1"), "colocate_async")
    assert (options.window, options.updates_per_sync, options.queue["batch_groups"]) == (8, 1, 4)
    assert get_trainer_cls("streamadv_colocate_async") is QueueColocateAsync


def chain_with(folder: Path, **changed: Any) -> Any:
    config = config_of(
        folder, NOWHERE, "none", **{f"algorithm__{name}": each for name, each in changed.items()}
    )
    return options_of(config, "separate_async").queue["chain"]


def test_the_chain_is_that_of_verls_estimator_and_its_settings(tmp_path: Path) -> None:
    assert chain_with(tmp_path) == "verl/grpo"
    assert chain_with(tmp_path, norm_adv_by_std_in_grpo=False) == "verl/dr_grpo"
    assert chain_with(tmp_path, adv_estimator="rloo") == "verl/rloo"
    assert chain_with(tmp_path, adv_estimator="rloo", norm_adv_by_std_in_grpo=False) == "verl/rloo"
    assert chain_with(tmp_path, adv_estimator="grpo_passk", norm_adv_by_std_in_grpo=False) == {
        "preset": "verl/grpo_passk",
        "norm_by_std": False,
    }
    assert chain_with(tmp_path, adv_estimator="reinforce_plus_plus", gamma=0.9) == {
        "preset": "verl/reinforce_plus_plus",
        "gamma": 0.9,
    }
    config = config_of(
        tmp_path,
        NOWHERE,
        "none",
        **{
            "algorithm__adv_estimator": "gdpo",
            "+algorithm__gdpo_reward_keys": "[acc,format]",
            "+algorithm__gdpo_reward_weights": "[1.0,0.5]",
        },
    )
    assert options_of(config, "separate_async").queue["chain"] == {
        "preset": "verl/gdpo",
        "weights": {"acc": 1.0, "format": 0.5},
    }


@pytest.mark.parametrize(
    "name", [each.value for each in AdvantageEstimator if each != AdvantageEstimator.GAE]
)
def test_each_estimator_of_verl_has_a_chain(name: str, tmp_path: Path) -> None:
    config = config_of(tmp_path, NOWHERE, "none", algorithm__adv_estimator=name)
    build_chain(chain_of(config.algorithm))


@pytest.mark.parametrize("name", [each.value for each in AdvantageEstimator])
def test_estimators_that_verls_asynchronous_trainers_do_not_feed_are_refused(
    name: str, tmp_path: Path
) -> None:
    """Each of verl's estimators on the fields that its `_compute_advantage` reads: those that fail, and no others."""
    changed = {"algorithm__adv_estimator": name, f"+{KWARGS}__advantages": "verl"}
    if name == "gdpo":
        changed["+algorithm__gdpo_reward_keys"] = "[acc,format]"
    config = config_of(tmp_path, NOWHERE, "none", **changed)
    read = inspect.getsource(PPOTrainer._compute_advantage)
    names = re.search(r'fields = \[("[^]]*)\]', read)
    assert names is not None
    tensors = {field: torch.rand(4, 3) for field in re.findall(r'"(\w+)"', names[1]) if field != "uid"}
    tensors["response_mask"] = torch.ones(4, 3, dtype=torch.int64)
    data = DataProto.from_dict(
        tensors={
            **tensors,
            "token_level_rewards": tensors["rm_scores"],
            "token_level_scores": tensors["rm_scores"],
        },
        non_tensors={"uid": np.array(["a", "a", "b", "b"], dtype=object)},
    )
    try:
        compute_advantage(data, adv_estimator=name, num_repeat=2, config=config.algorithm)
        is_fed = True
    except (AssertionError, KeyError, TypeError, ValueError):
        is_fed = False
    if is_fed:
        options_of(config, "separate_async")
    else:
        with pytest.raises(SettingError, match=f"algorithm.adv_estimator is {name}"):
            options_of(config, "separate_async")
    assert is_fed == (name not in UNFED)


def test_a_row_is_at_most_as_long_as_a_micro_batch_of_verl(tmp_path: Path) -> None:
    limits = {
        "actor_rollout_ref__actor__use_dynamic_bsz": True,
        "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 4096,
        "actor_rollout_ref__rollout__log_prob_max_token_len_per_gpu": 2048,
        "actor_rollout_ref__actor__ulysses_sequence_parallel_size": 2,
    }
    options = options_of(config_of(tmp_path, NOWHERE, "none", **limits), "separate_async")
    assert options.queue["tokens_per_micro_batch"] == 4096


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
        ({f"+{KWARGS}__generate": "nope"}, "sampler_kwargs.generate is 'nope', needs true or false"),
        ({f"+{KWARGS}__max_staleness": "abc"}, "sampler_kwargs: max_staleness is 'abc'"),
        ({f"+{KWARGS}__commit": "sometimes"}, "sampler_kwargs: commit is 'sometimes'"),
        ({f"+{KWARGS}__chain": "verl/nope"}, "sampler_kwargs: .*'verl/nope' is unknown"),
        (
            {f"+{KWARGS}__chain": "verl/rloo"},
            "chain is 'verl/rloo', algorithm.adv_estimator and norm_adv_by_std_in_grpo say verl/grpo: leave the",
        ),
        (
            {"algorithm__norm_adv_by_std_in_grpo": False, f"+{KWARGS}__chain": "verl/grpo"},
            "say verl/dr_grpo",
        ),
        ({"algorithm__adv_estimator": "mine"}, "adv_estimator is 'mine': the queue has no preset"),
        ({"algorithm__adv_estimator": "remax"}, "adv_estimator is remax: .* play no baseline rollouts"),
        (
            {"trainer__v1__sampler__max_off_policy_threshold": 1},
            "max_off_policy_threshold is 1 and has no effect: .*drop_after",
        ),
        (
            {"trainer__v1__sampler__max_off_policy_strategy": "wait"},
            "max_off_policy_strategy is 'wait' and has no effect",
        ),
        ({"trainer__save_freq": -1}, "trainer.save_freq is -1: without checkpoints nothing is committed"),
        ({"actor_rollout_ref__actor__checkpoint__async_save": True}, "actor.checkpoint.async_save is set"),
        ({"algorithm__adv_estimator": "gae"}, "algorithm.adv_estimator is gae, with a critic"),
        (
            {
                "algorithm__adv_estimator": "reinforce_plus_plus_baseline",
                "algorithm__rollout_correction__rollout_rs": "token_k1",
            },
            "rollout_correction.rollout_rs is 'token_k1': reinforce_plus_plus_baseline depends on it, .*=verl",
        ),
        (
            {
                "algorithm__adv_estimator": "gdpo",
                "algorithm__rollout_correction__rollout_rs": "token_k1",
            },
            "rollout_rs is 'token_k1': gdpo depends on it, .* first; leave it out",
        ),
        (
            {"algorithm__adv_estimator": "optimal_token_baseline"},
            "adv_estimator is optimal_token_baseline: it needs .*sum_pi_squared.* use another one",
        ),
        (
            {"algorithm__adv_estimator": "tir_optimal_token_baseline", f"+{KWARGS}__advantages": "verl"},
            "adv_estimator is tir_optimal_token_baseline: it needs .*sum_pi_squared.* use another one",
        ),
        (
            {"algorithm__adv_estimator": "gdpo", f"+{KWARGS}__advantages": "verl"},
            "adv_estimator is gdpo: .* give no estimator named rewards; leave .*advantages out",
        ),
        (
            {f"+{KWARGS}__chain": "gae"},
            "sampler_kwargs: chain step estimator needs column values, which verl computes after the chain: use",
        ),
        (
            {
                "algorithm__adv_estimator": "gdpo",
                "+algorithm__gdpo_reward_keys": "[acc,format]",
                "+algorithm__gdpo_reward_weights": "[1.0]",
            },
            "gdpo_reward_weights are 1, gdpo_reward_keys 2: give a weight for each",
        ),
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
        {"algorithm__adv_estimator": "mine", f"+{KWARGS}__advantages": "verl"},
        {"algorithm__adv_estimator": "mine", f"+{KWARGS}__chain": "gigpo"},
        {"algorithm__adv_estimator": "remax", f"+{KWARGS}__generate": False},
        {"algorithm__adv_estimator": "rloo", "algorithm__rollout_correction__rollout_rs": "token_k1"},
        {
            "algorithm__adv_estimator": "opo",
            "algorithm__rollout_correction__rollout_rs": "token_k1",
            "algorithm__rollout_correction__bypass_mode": True,
        },
        {
            "algorithm__adv_estimator": "opo",
            "algorithm__rollout_correction__rollout_rs": "token_k1",
            f"+{KWARGS}__advantages": "verl",
        },
    ],
)
def test_the_remedies_hold(changed: dict[str, Any], tmp_path: Path) -> None:
    options_of(config_of(tmp_path, NOWHERE, "none", **changed), "separate_async")
