"""Rows reach verl's workers through TransferQueue as they were pushed, with the advantages of the queue's chain."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.tensordict_utils import get_tensordict

import streamadv as sa
from streamadv.errors import SettingError
from streamadv.integrations.verl.rows import uid_of
from streamadv.integrations.verl.sampler import QueueSampler
from streamadv.trainer.checkpoints import read_state, write_state
from tests.support import join, ledger, problems, working

from .jobs import KWARGS, OnCpu, trainer
from .settings import SIZE
from .test_jobs import push

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.server, pytest.mark.timeout(300)]


def step(folder: Path, url: str, run: str, kind: type[OnCpu] = OnCpu, **changed: Any) -> OnCpu:
    """A trainer that has made one step: a batch of 4 groups."""
    made = trainer(
        folder,
        url,
        run,
        kind,
        **{
            f"+{KWARGS}__generate": False,
            "trainer__v1__separate_async__parameter_sync_step": 1,
            "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
            **changed,
        },
    )
    made.global_steps, made.timing_raw = 1, {}
    made.on_step_begin()
    batch = made.step({}, made.timing_raw)
    tq.kv_clear(keys=batch.keys, partition_id="train")
    made.replay_buffer.close()
    return made


def by_key(pushed: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {f"{uid_of(one['group_id'])}_{one['rollout_index']}_0": one for one in pushed}


def test_rows_are_bit_for_bit_what_was_pushed(plane: None, redis_url: str, run: str, tmp_path: Path) -> None:
    with sa.Producer(redis_url, run=run) as producer:
        pushed = by_key(push(producer, 4, prefix="group_%"))
        with working(join(redis_url, run)):
            made = step(tmp_path, redis_url, run)
    seen = made.actor_rollout_wg.seen
    assert seen.keys() == pushed.keys()
    for key, row in seen.items():
        one = pushed[key]
        cut = int(np.flatnonzero(one["response_mask"])[0])
        assert row["input_ids"].tolist() == one["input_ids"].tolist()
        assert row["prompts"].tolist() == one["input_ids"][:cut].tolist()
        assert row["responses"].tolist() == one["input_ids"][cut:].tolist()
        assert (
            row["response_mask"].tolist() == row["loss_mask"].tolist() == one["response_mask"][cut:].tolist()
        )
        assert row["rollout_log_probs"].numpy().tobytes() == one["rollout_log_probs"][cut:].tobytes()
        assert row["routed_experts"].numpy().tobytes() == one["routed_experts"].tobytes()
        assert row["rm_scores"].sum() == row["rm_scores"][-1] == np.float32(one["reward"])
        assert row["position_ids"].tolist() == list(range(len(one["input_ids"])))
    joined = join(redis_url, run)
    assert ledger(joined)["in_flight"] == 4 * SIZE
    assert problems(joined) == []


def test_advantages_are_those_of_the_queues_chain(
    plane: None, redis_url: str, run: str, tmp_path: Path
) -> None:
    """verl would divide them by the standard deviation."""
    with sa.Producer(redis_url, run=run) as producer:
        pushed = by_key(push(producer, 4))
        with working(join(redis_url, run)):
            made = step(tmp_path, redis_url, run, **{f"+{KWARGS}__chain": "dr_grpo"})
    rewards: dict[str, list[float]] = {}
    for one in pushed.values():
        rewards.setdefault(one["group_id"], []).append(one["reward"])
    for key, row in made.actor_rollout_wg.seen.items():
        one = pushed[key]
        expected = one["reward"] - np.mean(rewards[one["group_id"]])
        wanted = np.where(row["response_mask"].numpy(), np.float32(expected), 0)
        np.testing.assert_allclose(row["advantages"].numpy(), wanted, rtol=1e-6)
        np.testing.assert_array_equal(row["returns"].numpy(), row["advantages"].numpy())


def test_advantages_may_be_verls(plane: None, redis_url: str, run: str, tmp_path: Path) -> None:
    with sa.Producer(redis_url, run=run) as producer:
        pushed = by_key(push(producer, 4))
        with working(join(redis_url, run)):
            made = step(
                tmp_path, redis_url, run, **{f"+{KWARGS}__advantages": "verl", f"+{KWARGS}__chain": "rloo"}
            )
    rewards: dict[str, list[float]] = {}
    for one in pushed.values():
        rewards.setdefault(one["group_id"], []).append(one["reward"])
    for key, row in made.actor_rollout_wg.seen.items():
        one, group = pushed[key], rewards[pushed[key]["group_id"]]
        grpo = (one["reward"] - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
        np.testing.assert_allclose(row["advantages"].numpy(), grpo * row["response_mask"].numpy(), rtol=1e-4)


def test_verls_correction_makes_weights_and_padding_has_no_advantage(
    plane: None, redis_url: str, run: str, tmp_path: Path
) -> None:
    """A rollout of two rows beside one without a trainable token makes 17 rows, to a multiple of 16."""
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 3)
        with producer.group(SIZE) as group:
            row = {
                "input_ids": [5, 6, 7, 8],
                "response_mask": [0, 0, 1, 1],
                "rollout_log_probs": [0, 0, -9, -1],
            }
            first_token = {"input_ids": [5, 6], "response_mask": [1, 0], "rollout_log_probs": [-1, 0]}
            for number, rollout in enumerate(group):
                rows = {1: {"rows": [row, row, row]}, 2: first_token}.get(number, row)
                rollout.push(reward=number, **rows)
        with working(join(redis_url, run)):
            made = step(tmp_path, redis_url, run, algorithm__rollout_correction__rollout_is="token")
    seen = made.actor_rollout_wg.seen
    own = {key: row for key, row in seen.items() if not key.startswith("pad")}
    assert (len(own), len(seen)) == (3 * SIZE + 5, 32)
    assert {key.partition("_")[2] for key in own if key.startswith(group.group_id)} == {
        *("0_0", "1_0", "1_1", "1_2", "3_0")
    }
    for key, row in seen.items():
        if key not in own:
            assert row["advantages"].tolist() == row["response_mask"].tolist() == [0]
            continue
        weights = np.exp(np.clip(row["old_log_probs"].numpy() - row["rollout_log_probs"].numpy(), -20, 20))
        expected = np.minimum(weights, 2.0) * row["response_mask"].numpy()
        np.testing.assert_allclose(row["rollout_is_weights"].numpy(), expected, rtol=1e-5)


class WithImages(OnCpu):
    """Of a model that reads images, whose positions have channels."""

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        self.processor = SimpleNamespace(get_rope_index=None)


def positions_of_verl(length: int) -> Tensor:
    """As verl's agent loops compute them for a text, with the function of a model that reads images."""
    processor = SimpleNamespace(config=Qwen2_5_VLConfig(), image_token_id=-1, video_token_id=-1)
    processor.get_rope_index = MethodType(Qwen2_5_VLModel.get_rope_index, processor)
    ids = torch.arange(length)[None]
    loops = SimpleNamespace(processor=processor)
    inputs = {"mm_token_type_ids": torch.zeros_like(ids)}
    compute = AgentLoopWorkerTQ.__ray_actor_class__._compute_position_ids
    positions: Tensor = compute(loops, ids, torch.ones_like(ids), inputs)[0]
    return positions


def test_positions_of_a_model_that_reads_images_have_channels(
    plane: None, redis_url: str, run: str, tmp_path: Path
) -> None:
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 4)
        with working(join(redis_url, run)):
            seen = step(tmp_path, redis_url, run, WithImages).actor_rollout_wg.seen
    for row in seen.values():
        torch.testing.assert_close(row["position_ids"], positions_of_verl(len(row["input_ids"])))


def test_log_probs_that_verl_reads_are_asked_for(
    plane: None, redis_url: str, run: str, tmp_path: Path
) -> None:
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 3)
        with producer.group(SIZE) as group:
            for rollout in group:
                rollout.push(input_ids=[5, 6], response_mask=[0, 1], reward=rollout.rollout_index)
        with (
            working(join(redis_url, run)),
            pytest.raises(
                SettingError, match=r"without rollout_log_probs, which \S+calculate_log_probs reads"
            ),
        ):
            step(tmp_path, redis_url, run)


def test_a_run_that_is_further_than_verl_is_refused(
    plane: None, redis_url: str, run: str, tmp_path: Path
) -> None:
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 1)
        with working(join(redis_url, run)), closing(sa.TrainerQueue(redis_url, run, batch_groups=1)) as queue:
            queue.trained(queue.next_batch())
            queue.commit(queue.state_dict())
    with pytest.raises(
        SettingError, match="is at version 1, verl at step 0, which is version 0: resume from"
    ):
        trainer(tmp_path, redis_url, run)


def test_after_an_older_checkpoint_prompts_are_other_groups(
    plane: None, redis_url: str, run: str, tmp_path: Path
) -> None:
    """What has ended since is played again. Until the next checkpoint a restart has these ids again."""
    made = trainer(tmp_path, redis_url, run)
    prompts = get_tensordict({"raw_prompt": [["one"], ["two"]]})
    with closing(made.replay_buffer) as sampler:
        write_state(tmp_path / "older", sampler.state())
        uids = [list(sampler.name(prompts)["uid"])]
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 1)
        with working(join(redis_url, run)), closing(sa.TrainerQueue(redis_url, run, batch_groups=1)) as queue:
            queue.trained(queue.next_batch())
            queue.commit(queue.state_dict())
    for _ in range(2):
        with closing(made._build_replay_buffer()) as sampler:
            sampler.begin(0, tmp_path / "older")
            uids.append(list(sampler.name(prompts)["uid"]))
    assert uids[0][0].startswith("verl-0-")
    assert set(uids[0]).isdisjoint(uids[1])
    assert uids[1] == uids[2]


def test_a_checkpoint_without_the_state_of_a_queue_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"its streamadv.json cannot be read"):
        read_state(tmp_path)


def test_a_sampler_without_its_trainer_is_refused() -> None:
    with pytest.raises(SettingError, match=r"set trainer.v1.trainer_mode to streamadv_separate_async or"):
        QueueSampler("separate_async", {}, 8, "drop", {}, refill_fn=None)
