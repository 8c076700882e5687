"""What is said of several sets of prompts, and of very many prompts."""

from __future__ import annotations

import streamadv as sa
from streamadv.batch.prompts import LOST, RunPrompts
from streamadv.prompts.stored import carry_ends, read, read_sets
from streamadv.status.prompts import read_progress
from tests.support import join, producing

from .test_once import SIZE, stored


def test_each_set_ends_at_its_own_pace(redis_url: str, run: str) -> None:
    with producing(redis_url, run) as producer:
        for name in ("slow", "fast"):
            next(producer.prompts(sa.Prompts(range(1000), name=name, shuffle=None), SIZE))
        joined = join(redis_url, run)
        for position in range(200):
            name, index = ("slow", position // 10) if position % 10 == 0 else ("fast", position)
            joined.connection.scripts.xadd(
                joined.keys.home.prompt_ends, {"end": f"prompt:{name}::0:{index}:0 trained "}
            )
        carry_ends(joined)
        fast, slow = read_progress(joined, joined.now_ms() + 10_000)
        assert fast.seconds_left is not None
        assert slow.seconds_left is not None
        assert slow.seconds_left > 5 * fast.seconds_left


def test_very_many_prompts_can_be_lost_at_once(redis_url: str, run: str) -> None:
    with producing(redis_url, run) as producer:
        next(producer.prompts(sa.Prompts(range(10_000), shuffle=None), SIZE))
        joined = join(redis_url, run)
        [prompts] = read_sets(joined)
        home = joined.keys.home
        items = [f"1 {position}" for position in range(9000)]
        joined.connection.scripts.hset(
            home.prompt_entries(prompts.name), mapping=dict.fromkeys(items, "0 0 ended")
        )
        joined.connection.scripts.hset(home.prompt_state(prompts.name), "next:1", 9000)
        found = read(joined, prompts)
        RunPrompts(joined)._end(found, items, LOST)
        assert len(stored(joined).of("-")) == 9000
