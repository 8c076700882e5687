"""`help(...)` of what users hold in their hands names everything that it has."""

from __future__ import annotations

import pydoc
import re

import pytest

import streamadv as sa
from streamadv.store.connection import Connection
from tests.support import delivered_batch, join, producing, push_groups


def missing(instance: object) -> list[str]:
    """Public names of an instance that help() of its class, or of a class like it, does not show."""
    text = pydoc.render_doc(type(instance), renderer=pydoc.plaintext)
    names = {name for name in dir(instance) if not name.startswith("_")}
    return sorted(name for name in names if not re.search(rf"\b{name}\b", text))


def test_help_of_batches_and_micro_batches(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        push_groups(producer, 1)
    queue = sa.TrainerQueue(fake, "r", batch_groups=1, prefetch=0)
    batch = delivered_batch(queue, join(fake, "r"))
    (mb,) = batch
    for instance in (queue, batch, mb, mb.padded(), mb.prompt_response(), *batch.references[:1]):
        assert missing(instance) == [], type(instance).__name__


def test_help_of_producers_groups_and_rollouts(fake: Connection) -> None:
    with sa.Producer(fake, "r") as producer:
        group = producer.begin_group(2)
        (rollout, _) = group
        for instance in (producer, group, rollout, rollout.ticket):
            assert missing(instance) == [], type(instance).__name__


@pytest.mark.parametrize(
    ("asynchronous", "blocking"), [(sa.AsyncGroup, sa.Group), (sa.AsyncRollout, sa.Rollout)]
)
def test_asyncio_ones_say_the_same(asynchronous: type, blocking: type) -> None:
    shown = [
        set(re.findall(r"`(\w+)`", kind.__doc__ or ""))
        & {"group_id", "rollout_index", "model_version", "size"}
        for kind in (asynchronous, blocking)
    ]
    assert shown[0] == shown[1] != set()
