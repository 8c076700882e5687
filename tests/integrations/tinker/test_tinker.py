"""Batches of the queue as steps of a Tinker server; its states are what was trained."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinker import AdamParams

import streamadv as sa
from streamadv.errors import SettingError
from streamadv.integrations.engines import Episode
from streamadv.integrations.tinker import SAVED, TinkerEngine, datums, train
from tests.docs.story import ROOT
from tests.support import join, ledger, problems, working

from .standin import VOCABULARY, Client, Service

pytestmark = [pytest.mark.server, pytest.mark.timeout(180)]
ADAM = AdamParams(learning_rate=0.05)
KILLED = -9


def push(producer: sa.Producer, groups: int, size: int = 4) -> None:
    """Groups of random rows, all different, half of them with a tool's answer within."""
    random = np.random.default_rng(groups)
    for number in range(groups):
        with producer.group(size) as group:
            for rollout in group:
                ids = [
                    number % VOCABULARY,
                    number // VOCABULARY,
                    rollout.rollout_index,
                    *random.integers(0, VOCABULARY, 5),
                ]
                mask = [0, 0, 0, 1, 0, 1, 1, 1] if number % 2 else [0, 0, 0, 1, 1, 1, 1, 1]
                logs = -random.random(len(ids)) * np.array(mask)
                rollout.push(
                    input_ids=ids, response_mask=mask, rollout_log_probs=logs, reward=float(random.random())
                )


def queue_of(url: str, run: str, **options: Any) -> sa.TrainerQueue:
    return sa.TrainerQueue(url, run, **{"batch_groups": 2, "tokens_per_micro_batch": 40, **options})


def test_a_row_becomes_a_datum_one_token_further(redis_url: str, run: str) -> None:
    rows = [
        {"input_ids": [3, 4, 5, 6], "response_mask": [0, 1, 0, 1], "rollout_log_probs": [0, -1, 0, -2]},
        {"input_ids": [7, 8], "response_mask": [1, 0], "rollout_log_probs": [-1, 0]},
    ]
    with sa.Producer(redis_url, run=run) as producer:
        with producer.group(2) as group:
            for rollout in group:
                rollout.push(rows=rows, reward=float(rollout.rollout_index))
        with (
            working(join(redis_url, run)),
            queue_of(redis_url, run, batch_groups=1, chain="dr_grpo") as queue,
        ):
            (mb,) = queue.next_batch()
            found = datums(mb, divisor=2.0, weights=True)
            with pytest.raises(
                SettingError, match="log_probs is old_log_probs: trajectories of the batch lack"
            ):
                datums(mb, log_probs="old_log_probs")
    assert len(found) == 2  # the second row's only token has nothing before it
    for datum, advantage in zip(found, (-0.25, 0.25), strict=True):
        assert datum.model_input.to_ints() == [3, 4, 5]
        assert {name: each.tolist() for name, each in datum.loss_fn_inputs.items()} == {
            "target_tokens": [4, 5, 6],
            "logprobs": [-1, 0, -2],
            "advantages": [advantage, 0, advantage],
            "weights": [1, 0, 1],
        }


@pytest.mark.parametrize("budget", [None, pytest.param(40, marks=pytest.mark.release), 8])
def test_the_step_is_that_of_the_mean_over_the_batch_however_it_is_cut(
    redis_url: str, run: str, tmp_path: Path, budget: int | None
) -> None:
    client, batches = Client(tmp_path), []
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 2)
        producer.finish()
        with working(join(redis_url, run)), queue_of(redis_url, run, tokens_per_micro_batch=budget) as queue:
            next_batch = queue.next_batch
            queue.next_batch = lambda *given: batches.append(next_batch(*given)) or batches[-1]  # type: ignore[method-assign]
            assert train(queue, client, tmp_path / "c", adam=ADAM) == 1  # type: ignore[arg-type]
    expected = Client(tmp_path)
    total = torch.zeros(())
    tokens = sum(int(mb.columns["response_mask"].sum()) for mb in batches[0])
    for mb in batches[0]:
        for start, stop in zip(mb.cu_seqlens[:-1], mb.cu_seqlens[1:], strict=True):
            row = {name: column[start:stop] for name, column in mb.columns.items()}
            ids = row["input_ids"]
            log_probs = torch.log_softmax(expected.table[ids[:-1].tolist()], -1).gather(1, ids[1:, None])[
                :, 0
            ]
            loss = -(log_probs - row["rollout_log_probs"][1:]).exp() * row["advantages"][1:]
            total = total + (loss * row["response_mask"][1:]).sum() / tokens
    total.backward()
    expected.optim_step(ADAM)
    torch.testing.assert_close(client.table, expected.table, rtol=1e-4, atol=1e-6)
    assert client.calls.count("optim_step") == 1
    assert client.calls.count("forward_backward") == len(batches[0])


def test_producers_sample_by_what_was_published_and_learn(redis_url: str, run: str, tmp_path: Path) -> None:
    logged: dict[int, Any] = {}
    client = Client(tmp_path)

    async def play() -> list[float]:
        rewards = []
        async with sa.Producer(redis_url, run=run) as producer:
            engine = TinkerEngine(Service(tmp_path), max_tokens=3)  # type: ignore[arg-type]
            with pytest.raises(SettingError, match="the engine has no weights: call refresh"):
                await engine.complete([1])
            engine.refresh(await producer.wait_for_weights())
            async for group in producer.groups(8):
                engine.refresh(producer.weights)
                for rollout in group:
                    episode = Episode([1])
                    episode.add(await engine.complete(episode.tokens))
                    reward = float(sum(token == 2 for token in episode.tokens[1:]))
                    await rollout.push(**episode.record(), reward=reward)
                    rewards.append(reward)
        return rewards

    with sa.Producer(redis_url, run=run):  # makes the run
        joined = join(redis_url, run)
    with ThreadPoolExecutor(1) as pool, working(joined):
        playing = pool.submit(lambda: asyncio.run(play()))
        with queue_of(redis_url, run, max_staleness=1) as queue:
            reached = train(
                queue, client, tmp_path / "c", adam=lambda version: AdamParams(learning_rate=0.1),  # type: ignore[arg-type]
                max_batches=25, log=lambda version, figures: logged.update({version: figures}),
            )  # fmt: skip
            assert reached == 25
            queue.finish()
        rewards = playing.result(60)
    assert np.mean(rewards[-64:]) > np.mean(rewards[:64]) + 0.5
    assert sorted(logged) == list(range(1, 26))
    assert "tinker/loss:sum" in logged[25]
    stalest = "training/off_policy/trajectory_staleness_worst/max"
    assert max(figures[stalest] for figures in logged.values()) <= 2
    assert json.loads((tmp_path / "c" / "25" / SAVED).read_text())["path"].startswith("tinker://")
    assert problems(join(redis_url, run)) == []


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.release
def test_a_killed_trainer_goes_on_without_a_row_lost_or_trained_twice(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    groups, size = 24, 4

    def job(call: str = "", count: int = 0) -> int:
        command = [
            sys.executable,
            "-m",
            "tests.integrations.tinker.job",
            redis_url,
            run,
            str(tmp_path),
            call,
            str(count),
        ]
        return subprocess.run(command, cwd=ROOT, check=False, timeout=150).returncode

    with sa.Producer(redis_url, run=run) as producer:
        push(producer, groups, size)
        producer.finish()
        with working(join(redis_url, run)):
            for die in (
                ("optim_step", 2),
                ("save_state", 2),
                ("forward_backward", 5),
                ("save_weights_for_sampler", 5),
            ):
                assert job(*die) == KILLED
                assert problems(join(redis_url, run), deep=False) == []
            assert job() == 0
    newest = max((tmp_path / "checkpoints").iterdir(), key=lambda path: int(path.name))
    client = Client(tmp_path / "states")
    client.load_state_with_optimizer(json.loads((newest / SAVED).read_text())["path"])
    trained = Counter(tuple(row[:3]) for row in client.rows)
    assert len(trained) == groups * size
    assert set(trained.values()) == {1}
    joined = join(redis_url, run)
    assert ledger(joined)["pushed"] == ledger(joined)["trained"] == groups * size
    assert problems(joined) == []


def test_a_checkpoint_of_another_trainer_is_refused(redis_url: str, run: str, tmp_path: Path) -> None:
    with queue_of(redis_url, run) as queue, queue.checkpoint(tmp_path / "c"):
        pass
    with (
        queue_of(redis_url, run) as queue,
        pytest.raises(SettingError, match=r"tinker.json cannot be read: .*; resume from a checkpoint"),
    ):
        train(queue, Client(tmp_path), tmp_path / "c", adam=ADAM)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["save_every", "publish_every"])
def test_settings_out_of_range_are_refused(redis_url: str, run: str, tmp_path: Path, name: str) -> None:
    with (
        queue_of(redis_url, run) as queue,
        pytest.raises(SettingError, match=f"{name} is 0, needs a whole number"),
    ):
        train(queue, Client(tmp_path), tmp_path, adam=ADAM, **{name: 0})  # type: ignore[arg-type]
