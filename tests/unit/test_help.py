"""`help(...)` of what users hold in their hands names everything that it has."""

from __future__ import annotations

import importlib
import pydoc
import re
import sys

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


def test_help_and_completion_of_the_package_show_its_public_names() -> None:
    assert dir(sa) == sorted(sa.__all__)
    text = pydoc.render_doc(sa, renderer=pydoc.plaintext)
    classes = [name for name in sa.__all__ if isinstance(getattr(sa, name), type)]
    assert len(classes) > 20
    assert [name for name in classes if not re.search(rf"^    class {name}\b", text, re.MULTILINE)] == []


@pytest.mark.parametrize("name", ["algorithms", "errors", "losses", "padded", "weights"])
def test_a_public_module_is_an_attribute_and_an_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(sa), name, raising=False)  # as if nobody had imported it yet
    assert getattr(sa, name) is importlib.import_module(f"streamadv.{name}")
    assert name in sa.__all__


def test_without_torch_the_package_shows_what_loads_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    computing = {"Batch", "MicroBatch", "TrainerQueue", "losses", "padded"}
    assert set(dir(sa)) == set(sa.__all__) - computing


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
