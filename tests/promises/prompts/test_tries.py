"""How often a prompt was played, and the longest ids."""

from __future__ import annotations

import json

import streamadv as sa
from streamadv.status.prompts import read_lines
from tests.support import join, producing

from .test_back import play, queue_of, train
from .test_once import SIZE, prompts, stored


def test_tries_of_a_prompt_are_those_since_it_was_set_back(redis_url: str, run: str) -> None:
    with sa.Producer(redis_url, run) as producer:
        joined = join(redis_url, run)
        groups = producer.prompts(prompts(epochs=1), SIZE)
        with queue_of(redis_url, run) as queue:
            play(groups, 2)
            train(queue, joined, 1)
            older = json.loads(json.dumps(queue.state_dict()))
            queue.commit(older)
        with queue_of(redis_url, run) as queue:
            play(groups, 1)
            train(queue, joined, 1)
            queue.commit(queue.state_dict())
        with queue_of(redis_url, run) as queue:
            queue.load_state_dict(older)
            play(groups, 3)
            lines = read_lines(joined, stored(joined))
            assert [line.tries for line in lines if line.state == "in play"] == [1, 1, 1], lines


def test_the_longest_names_are_taken(redis_url: str, run: str) -> None:
    with producing(redis_url, run) as producer:
        given = sa.Prompts({"s/" * 40: range(10**6)}, epochs=10**6, name="n" * 40)
        assert next(producer.prompts(given, SIZE))[1].group_id
