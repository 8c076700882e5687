"""`sa.track` without a tracker's package: what is logged, by which rank, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import streamadv as sa
from streamadv.errors import MissingDependencyError, SettingError
from streamadv.integrations import trackers
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import delivered_batch, pushed_run


class Notes:
    """A tracker that notes what it is told."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options, self.told = dict(options), list[tuple[str, int]]()
        made.append(self)

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        self.told.append(("loss" if "loss" in metrics else "metrics", version))

    def table(self, version: int, rows: Sequence[Sequence[Any]]) -> None:
        self.told.append((f"{len(rows)} rollouts", version))

    def close(self) -> None:
        self.told.append(("closed", 0))


made: list[Notes] = []


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setitem(trackers.BACKENDS, "wandb", Notes)  # type: ignore[arg-type]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "require", lambda *_: None)


@pytest.mark.usefixtures("installed")
def test_each_batch_is_logged_once_and_every_second_has_a_table(fake: Connection) -> None:
    joined = pushed_run(fake, "r", 4)
    queue = TrainerQueue(fake, "r", batch_groups=1, commit="each_batch")
    with sa.track(queue, "wandb", rollouts=9, every=2, project="p") as tracker:
        for _ in range(3):
            tracker.log(delivered_batch(queue, joined), {"loss": 1.0})
    delivered_batch(queue, joined)
    (notes,) = made
    assert notes.options == {"project": "p"}
    assert notes.told == [
        ("metrics", 0), ("2 rollouts", 0), ("loss", 0), ("metrics", 1), ("loss", 1), ("metrics", 2),
        ("2 rollouts", 2), ("loss", 2), ("closed", 0),
    ]  # fmt: skip


@pytest.mark.usefixtures("installed")
def test_rank_0_alone_logs(fake: Connection) -> None:
    joined = pushed_run(fake, "r", 2)
    ranks = [TrainerQueue(fake, "r", rank=rank, world_size=2, batch_groups=2, job="j") for rank in range(2)]
    for queue in ranks:
        sa.track(queue, "wandb", rollouts=0)
    for queue in ranks:
        delivered_batch(queue, joined)
    assert [notes.told for notes in made] == [[("metrics", 0)]]


def test_what_is_wrong_is_said_at_once(fake: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = TrainerQueue(fake, "r")
    monkeypatch.setattr("streamadv.extras.is_installed", lambda package: False)
    with pytest.raises(MissingDependencyError, match=r"needs wandb: pip install 'streamadv\[wandb\]'"):
        sa.track(queue, "wandb")
    with pytest.raises(SettingError, match="to is 'wanbd', needs one of wandb, tensorboard, mlflow, trackio"):
        sa.track(queue, "wanbd")
    with pytest.raises(SettingError, match="every is 0, needs a whole number, 1 or more"):
        sa.track(queue, "wandb", every=0)
    assert made == []
