"""What a producer, a group and a rollout print in a notebook or a log: who they are and where they stand."""

from __future__ import annotations

import re

import pytest

from streamadv.producer import AsyncProducer, Producer
from streamadv.store.connection import Connection


def test_an_asyncio_producer_made_by_itself_says_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"write `async with sa\.Producer\(\.\.\.\) as producer`"):
        AsyncProducer("redis://localhost:6379", run="exp1")  # type: ignore[arg-type]


def test_a_producer_a_group_and_a_rollout_say_where_they_stand(fake: Connection) -> None:
    producer = Producer(fake, "exp1", name="p")
    assert repr(producer) == "Producer(run='exp1', name='p', version=None, not connected)"
    with producer:
        assert re.fullmatch(r"Producer\(run='exp1', name='p', version=\w+, open\)", repr(producer))
        group = producer.begin_group(2, group_id="g")
        first, second = group
        assert repr(first) == "Rollout(group_id='g', rollout_index=0, model_version=0, open)"
        first.push(input_ids=[1, 2], response_mask=[0, 1], reward=1.0)
        second.fail("failed", "no")
        assert repr(first).endswith("ended)")
        assert repr(group) == "Group(group_id='g', size=2, model_version=0, ended=2/2, failed=1)"
        producer.finish()
        assert repr(producer).endswith("finished)")
    assert repr(producer).endswith("closed)")
