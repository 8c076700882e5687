"""A run is deleted and begun anew with other prompts under the same name; its trainer goes on from its checkpoint."""

from __future__ import annotations

import json

import pytest

import streamadv as sa
from streamadv.errors import SettingError
from streamadv.run.run import delete_run
from tests.support import join

from .test_back import play, queue_of, train
from .test_once import SIZE, prompts, stored


def test_prompts_of_another_set_are_not_those_of_the_checkpoint(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        play(producer.prompts(prompts(epochs=1), SIZE), 4)
        with queue_of(redis_url, run) as queue:
            train(queue, joined, 2)
            state = json.loads(json.dumps(queue.state_dict()))
            queue.commit(state)
    delete_run(joined.connection, joined.name)
    with sa.Producer(redis_url, run) as producer:
        given = sa.Prompts(["another", "one", "and", "a third", "a fourth"], name="train")
        next(producer.prompts(given, SIZE))
        with (
            queue_of(redis_url, run) as queue,
            pytest.raises(
                SettingError, match=r"the number of prompts is 7, in the run 5: give .* another name="
            ),
        ):
            queue.load_state_dict(state)
        assert stored(join(redis_url, run)).following == [1]
