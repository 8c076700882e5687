"""slime's or miles' own types and schedule on the batches of a queue: `make test-integration-slime SLIME=FOLDER`.

Seen with slime at 624b824a8 and miles at 31f1ca961.
"""

from __future__ import annotations

import shutil
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamadv as sa
from streamadv.errors import SettingError, TrajectoryError
from streamadv.integrations import slime
from tests.support import join, ledger, problems, working

PEER = "miles" if find_spec("miles") else "slime"
Sample: Any = import_module(f"{PEER}.utils.types").Sample
call_rollout_fn: Any = import_module(f"{PEER}.rollout.base_types").call_rollout_fn
build_dp_schedule: Any = import_module(f"{PEER}.utils.dp_schedule").build_dp_schedule
GROUPS, SIZE = 2, 3
pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]


def arguments(folder: Path, **changed: Any) -> SimpleNamespace:
    values = {
        "rollout_batch_size": GROUPS,
        "n_samples_per_prompt": SIZE,
        "global_batch_size": GROUPS * SIZE,
        "num_rollout": 8,
        "advantage_estimator": "grpo",
        "custom_reward_post_process_path": "streamadv.integrations.slime.advantages",
        "rollout_global_dataset": True,
        "save": str(folder),
        "load": str(folder),
        "kl_coef": 0.0,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 64,
        "balance_by_flops": False,
        "balance_data": False,
    }
    return SimpleNamespace(**{**values, **changed})


@pytest.fixture(autouse=True)
def of_the_run(monkeypatch: pytest.MonkeyPatch, redis_url: str, run: str) -> None:
    monkeypatch.setenv("STREAMADV_REDIS_URL", redis_url)
    monkeypatch.setenv("STREAMADV_RUN", run)
    monkeypatch.setenv(slime.OPTIONS, '{"chain": "dr_grpo", "max_staleness": null}')


def played(number: int, index: int) -> Any:
    """A sample with a prompt of two tokens, a tool's answer within, and experts."""
    return Sample(
        tokens=[number, index, 5, 6, 7, 8],
        response_length=4,
        loss_mask=[1, 1, 0, 1],
        rollout_log_probs=[-1.0, -2.0, 0.0, -0.5],
        rollout_routed_experts=np.arange(5 * 2).reshape(5, 2, 1),
        status=Sample.Status.COMPLETED,
        reward=float(index),
    )


def push(producer: sa.Producer, groups: int, first: int = 0) -> None:
    for number in range(first, first + groups):
        with producer.group(SIZE) as group:
            for rollout in group:
                rollout.push(**slime.record(played(number, rollout.rollout_index)))


def generate(args: Any, rollout_id: int, source: slime.QueueDataSource) -> Any:
    return call_rollout_fn(slime.rollout, args, rollout_id, source, evaluation=False)


def flat(output: Any) -> list[Any]:
    return [sample for group in output.samples for sample in group]


def test_a_sample_comes_back_as_it_was_pushed_with_its_advantage(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    args = arguments(tmp_path)
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, GROUPS)
        with working(join(redis_url, run)):
            source = slime.QueueDataSource(args)
            source.load(-1)
            output = generate(args, 0, source)
            source.queue.close()
    samples = flat(output)
    assert [sample.index for sample in samples] == list(range(GROUPS * SIZE))
    assert [sample.group_index for sample in samples] == [0] * SIZE + [1] * SIZE
    for sample in samples:
        before = played(*sample.tokens[:2])
        assert sample.tokens == before.tokens
        assert (sample.loss_mask, sample.rollout_log_probs) == (before.loss_mask, before.rollout_log_probs)
        assert (sample.response_length, sample.reward, sample.status) == (4, before.reward, before.status)
        np.testing.assert_array_equal(sample.rollout_routed_experts, before.rollout_routed_experts)
        getattr(sample, "_validate_response_metadata_lengths" if PEER == "slime" else "validate")()
    raw, rewards = slime.advantages(args, samples)
    assert raw == [0.0, 1.0, 2.0] * GROUPS
    assert rewards == [-1.0, 0.0, 1.0] * GROUPS
    assert output.metrics["streamadv/critic/score/mean"] == 1.0


def test_a_batch_that_lacks_rollouts_is_filled_up_for_slimes_schedule(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    """A failed rollout, one of two rows, and one without a trainable token."""
    args = arguments(tmp_path, rollout_batch_size=1, global_batch_size=SIZE)
    settings = sa.RunSettings(partial_min_usable=1)
    with sa.Producer(redis_url, run=run, settings=settings) as producer:
        with producer.group(SIZE) as group:
            row = {"input_ids": [1, 2, 3], "response_mask": [0, 1, 1]}
            two_rows, first_token, failed = group
            two_rows.push(rows=[row, row], reward=1.0)
            first_token.push(input_ids=[1, 2], response_mask=[1, 0], reward=0.0)
            failed.fail("failed", "the tool is gone")
        with working(join(redis_url, run)):
            source = slime.QueueDataSource(args)
            source.load(-1)
            samples = flat(generate(args, 0, source))
            source.queue.close()
    assert [sample.rollout_id for sample in samples] == [0, 0, 1, 2]
    assert [sample.loss_mask for sample in samples] == [[1, 1], [1, 1], [0], [0]]
    parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    lengths = [len(sample.tokens) for sample in samples]
    partitions, _, _, sizes = build_dp_schedule(
        args,
        parallel,
        lengths,
        global_batch_size=SIZE,
        rollout_indices=[sample.rollout_id for sample in samples],
    )
    assert sizes == [SIZE]
    assert sorted(number for part in partitions for number in part) == [0, 1, 2, 3]


class Job:
    """slime's `train_async`, as far as a data source sees it: the next rollout is asked for before one is trained on.

    What it was trained on is in its checkpoints, one behind each second rollout.
    """

    def __init__(self, folder: Path) -> None:
        self.args, self.folder = arguments(folder), folder
        newest = max((int(file.stem) for file in folder.glob("*.txt")), default=-1)
        self.start = newest + 1
        self.trained = (folder / f"{newest}.txt").read_text().splitlines() if newest >= 0 else []
        self.source = slime.QueueDataSource(self.args)
        self.source.load(newest)

    def run(self, until: int, die: tuple[str, int] = ("", -1)) -> None:
        """Up to rollout `until`; `die` says where and at which rollout the job ends without a word."""
        coming = flat(generate(self.args, self.start, self.source))
        for number in range(self.start, until):
            samples = coming
            if number + 1 < until:
                coming = flat(generate(self.args, number + 1, self.source))
            if die == ("before the step", number):
                break
            self.trained += [f"{sample.tokens[:2]}" for sample in samples if any(sample.loss_mask)]
            if number % 2:
                (self.folder / f"{number}.txt").write_text("\n".join(self.trained))
                if die == ("before the save", number):
                    break
                self.source.save(number)
        self.source.queue.close()


def test_a_job_that_dies_goes_on_without_a_group_lost_or_trained_twice(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 8 * GROUPS)
        producer.finish()
        with working(join(redis_url, run)):
            for die in (("before the save", 1), ("before the step", 4), ("before the save", 5)):
                Job(tmp_path).run(8, die)
                assert problems(join(redis_url, run), deep=False) == []
            last = Job(tmp_path)
            assert last.start == 6
            last.run(8)
    counted = Counter(last.trained)
    assert len(counted) == 8 * GROUPS * SIZE
    assert set(counted.values()) == {1}
    assert ledger(join(redis_url, run))["trained"] == 8 * GROUPS * SIZE
    assert problems(join(redis_url, run)) == []


def test_a_run_that_is_further_than_slime_is_refused(redis_url: str, run: str, tmp_path: Path) -> None:
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 4 * GROUPS)
        with working(join(redis_url, run)):
            Job(tmp_path).run(4)
    for path in tmp_path.iterdir():
        path.unlink() if path.is_file() else shutil.rmtree(path)
    with pytest.raises(
        SettingError, match=r"the run is at version \d, slime begins rollout 0: load the checkpoint"
    ):
        Job(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"global_batch_size": 3}, "global_batch_size is 3: .*, set it to 6"),
        ({"advantage_estimator": "ppo"}, "advantage_estimator is ppo"),
        ({"async_save": True}, "async_save is set"),
        ({"rollout_global_dataset": False}, "rollout_global_dataset is off"),
        ({"kl_coef": 0.1}, "kl_coef is set"),
        ({"normalize_advantages": True}, "normalize_advantages is set"),
        ({"custom_reward_post_process_path": None}, "custom_reward_post_process_path is None, needs"),
        ({"save": None}, "save is not set"),
    ],
)
def test_what_cannot_hold_is_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=message):
        slime.QueueDataSource(arguments(tmp_path, **changed))


def test_what_has_no_columns_and_what_was_not_played_is_refused() -> None:
    with pytest.raises(TrajectoryError, match=r"the sample is aborted: call rollout.fail\('aborted'\)"):
        slime.record(Sample(status=Sample.Status.ABORTED))
    with pytest.raises(TrajectoryError, match="multimodal_inputs have no columns"):
        slime.record(Sample(status=Sample.Status.COMPLETED, multimodal_inputs={"images": [1]}))
