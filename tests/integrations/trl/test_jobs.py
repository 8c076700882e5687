"""Jobs in processes of their own: two ranks with DDP, and a trainer that is killed at the worst moments."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import streamadv as sa
from streamadv.integrations.trl import newest_checkpoint
from tests.support import join, ledger, problems, working

from .jobs import PARTS, ROWS, TIMEOUT_S, gradients, run_job, train
from .models import batch_of
from .test_exact import LOSSES, TOLERANCE, trainer
from .test_queue import SIZE, push

KILLED = -9
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.timeout(TIMEOUT_S + 20)
def test_two_ranks_with_different_rows_have_the_gradient_of_one_process(tmp_path: Path) -> None:
    assert run_job(gradients, LOSSES, tmp_path, ranks=2, logs=tmp_path) == [0, 0]
    ranks = [torch.load(tmp_path / f"gradients-{rank}", weights_only=True) for rank in range(2)]
    for loss_type in LOSSES:
        whole = trainer(tmp_path, loss_type=loss_type)
        loss = float(whole.training_step(whole.model, batch_of([ROWS])))
        gradient = torch.cat([weight.grad.flatten() for weight in whole.model.parameters()])
        for made in ranks:
            for cut in range(len(PARTS)):
                rank_loss, rank_gradient = made[f"{loss_type} {cut}"]
                assert rank_loss == pytest.approx(loss, abs=TOLERANCE)
                torch.testing.assert_close(rank_gradient, gradient, atol=TOLERANCE, rtol=1e-5)


@pytest.mark.server
@pytest.mark.timeout(2 * TIMEOUT_S + 20)
def test_two_ranks_train_on_a_run_and_go_on_from_their_checkpoint(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 10)
        with working(join(redis_url, run)):
            assert run_job(train, redis_url, run, 2, tmp_path, ranks=2, logs=tmp_path) == [0, 0]
            assert ledger(join(redis_url, run))["trained"] == 2 * 2 * SIZE
            assert run_job(train, redis_url, run, 4, tmp_path, ranks=2, logs=tmp_path) == [0, 0]
    joined = join(redis_url, run)
    assert ledger(joined)["trained"] == 4 * 2 * SIZE
    assert problems(joined) == []
    first, second = (torch.load(tmp_path / f"weight-{rank}", weights_only=True) for rank in range(2))
    torch.testing.assert_close(first, second, atol=0, rtol=0)


@pytest.mark.server
@pytest.mark.timeout(4 * TIMEOUT_S)
def test_a_killed_trainer_goes_on_without_a_group_lost_or_trained_twice(
    redis_url: str, run: str, tmp_path: Path
) -> None:
    """Its checkpoints are of versions 2, 4, 6 and 8."""
    with sa.Producer(redis_url, run=run) as producer:
        push(producer, 16)
        producer.finish()
        with working(join(redis_url, run)):
            for die in (("before the commit", 4), ("in the step", 5), ("after the commit", 6)):
                assert run_job(train, redis_url, run, 8, tmp_path, die, logs=tmp_path) == [KILLED]
                assert problems(join(redis_url, run), deep=False) == []
            assert run_job(train, redis_url, run, 8, tmp_path, logs=tmp_path) == [0]
    checkpoint = Path(newest_checkpoint(tmp_path / "out") or "")
    assert checkpoint.name == "checkpoint-8"
    trained = Counter(json.loads((checkpoint / "groups.json").read_text()))
    assert len(trained) == 16
    assert set(trained.values()) == {1}
    joined = join(redis_url, run)
    counted = ledger(joined)
    assert counted["pushed"] == counted["trained"] == 16 * SIZE, counted
    assert problems(joined) == []
