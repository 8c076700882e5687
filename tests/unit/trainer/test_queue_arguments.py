"""Wrong arguments of a trainer queue are named, with the value and what is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamadv import Prompts
from streamadv.errors import SettingError
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank is 2"),
        ({"batch_groups": 0}, "batch_groups is 0, needs a whole number, 1 or more"),
        ({"min_groups": 0}, "min_groups is 0"),
        ({"min_groups": 5, "batch_groups": 2}, r"min_groups is 5, needs batch_groups \(2\) or less"),
        ({"tokens_per_micro_batch": -3}, "tokens_per_micro_batch is -3"),
        ({"max_staleness": -1}, "max_staleness is -1, needs a whole number, 0 or more, or None"),
        ({"drop_after": -1}, "drop_after is -1"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"commit": "sometimes"}, "commit is 'sometimes'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"job": "two words"}, "job is 'two words': use 1 to 200 printable characters"),
        ({"job": ""}, "job is ''"),
        ({"durability_window": -1.0}, r"durability_window is -1.0, needs a number, 0 or more"),
        ({"durability_window": float("nan")}, "durability_window is nan"),
        ({"batch_groups": 4.0}, "batch_groups is 4.0, needs a whole number"),
        ({"batch_groups": True}, "batch_groups is True"),
        ({"batch_groups": None}, "batch_groups is None, needs a whole number, 1 or more"),
        ({"max_staleness": 1.5}, "max_staleness is 1.5"),
        ({"max_staleness": float("inf")}, "max_staleness is inf, needs a whole number, 0 or more, or None"),
        ({"rank": "0"}, "rank is '0'"),
        ({"world_size": "2"}, "world_size is '2'"),
        ({"tokens_per_micro_batch": 1e4}, "tokens_per_micro_batch is 10000.0"),
        ({"min_kept_ratio": "x"}, "min_kept_ratio is 'x', needs a number"),
        ({"durability_window": "10"}, "durability_window is '10'"),
        ({"keep_groups": "no"}, "keep_groups is 'no', needs True or False"),
        (
            {"late": lambda micro_batch: micro_batch},
            "late is a function, needs functions of a micro-batch by column",
        ),
        ({"pushed": "values"}, r"pushed is 'values', needs a list of columns: \['values'\]"),
        ({"settings": {"shards": 2}}, "settings is a dict, needs streamadv.RunSettings"),
        ({"chain": "nonsense"}, "nonsense"),
        ({"chain": {"estimator": "gae"}}, "needs column values"),
    ],
)
def test_a_wrong_argument_is_named(fake: Connection, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message) as raised:
        TrainerQueue(fake, "r", **arguments)
    assert "\n" not in str(raised.value)


def test_integers_of_numpy_are_integers(fake: Connection) -> None:
    queue = TrainerQueue(fake, "r", rank=np.int32(0), batch_groups=np.int64(4))  # type: ignore[arg-type]
    assert type(queue.rank) is int
    with pytest.raises(SettingError, match="batch_groups is -4, needs a whole number, 1 or more"):
        TrainerQueue(fake, "r", batch_groups=np.int64(-4))  # type: ignore[arg-type]
    of_set = Prompts(["a"], epochs=np.int64(2), shuffle=np.int64(7)).set  # type: ignore[arg-type]
    assert of_set.text == Prompts(["a"], epochs=2, shuffle=7).set.text


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("next_batch", {"timeout": "1"}, "timeout is '1', needs seconds, 0 or more, or None"),
        ("next_batch", {"timeout": float("nan")}, "timeout is nan"),
        ("next_batch", {"timeout": -1}, "timeout is -1"),
        ("next_batch", {"max_groups": 0}, "max_groups is 0, needs a whole number, 1 or more, or None"),
        ("next_batch", {"max_groups": "2"}, "max_groups is '2'"),
        ("resume", {"folder": None}, "folder is None, needs a path"),
        ("resume", {"folder": b"x"}, "folder is b'x', needs a path"),
    ],
)
def test_a_wrong_argument_of_a_call_is_named(
    fake: Connection, call: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        getattr(TrainerQueue(fake, "r"), call)(**arguments)


def test_a_checkpoint_needs_a_path(fake: Connection) -> None:
    with (
        pytest.raises(SettingError, match="folder is 7, needs a path"),
        TrainerQueue(fake, "r").checkpoint(7),  # type: ignore[arg-type]
    ):
        pass


def test_a_state_of_something_else_is_refused(fake: Connection) -> None:
    queue = TrainerQueue(fake, "r")
    for call in (queue.load_state_dict, queue.commit):
        with pytest.raises(SettingError, match="state has no 'groups'"):
            call({"model": {}, "queue": {}})
        with pytest.raises(SettingError, match="state is None: give what state_dict"):
            call(None)  # type: ignore[arg-type]
        with pytest.raises(SettingError, match="state is of run 'other'"):
            call({"run": "other", "version": 0, "groups": []})
