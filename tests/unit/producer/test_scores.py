"""`producer.score`: checked as a push is."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from streamadv.errors import TrajectoryError
from streamadv.store.connection import Connection
from tests.support import group_all, join, problems, producing, unscored


def test_scores_must_be_finite(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.push([unscored("g", 0)])
        for reward, rewards in ((float("nan"), None), (float("inf"), None), (1.0, {"style": float("nan")})):
            with pytest.raises(TrajectoryError, match="needs a finite number"):
                producer.score("g", 0, reward, rewards)
        assert producer.score("g", 0, None) == "scored"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("g", "first", 1.0), "rollout_index: is the text 'first'"),
        (("g", None, 1.0), "rollout_index: "),
        (("g", float("nan"), 1.0), "rollout_index: "),
        (("g", 0.5, 1.0), "rollout_index: "),
        (("g", -1, 1.0), "rollout_index: "),
        ((None, 0, 1.0), "group_id: "),
        (("g", 0, "1"), "reward: is the text '1'"),
        (("g", 0, [1.0]), "reward: "),
        (("g", 0, 10**400), "reward: "),
        (("g", 0, 1.0, ["style"]), "rewards: "),
        (("g", 0, 1.0, {"style": object()}), "rewards.style: "),
        (("g", 0, 1.0, {"style": None}), "rewards.style: "),
    ],
)
def test_a_score_is_checked_like_a_push(fake: Connection, arguments: tuple[Any, ...], message: str) -> None:
    with producing(fake, "r") as producer:
        producer.push([unscored("g", 0)])
        with pytest.raises(TrajectoryError, match=message):
            producer.score(*arguments)
        assert producer.score("g", 0, 1.0) == "scored"


def test_numbers_of_numpy_are_scores_and_slots(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        producer.push([unscored("g", 0), unscored("g", 1)])
        assert producer.score("g", cast(int, np.int64(0)), cast(float, np.float32(0.5))) == "scored"
        rewards = {"style": cast(float, np.float32(1.0))}
        assert producer.score("g", cast(int, np.uint8(1)), cast(float, np.int64(2)), rewards) == "scored"
        run = join(fake, "r")
        assert group_all(run) == ["complete"]
    assert problems(run) == []
