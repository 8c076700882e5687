"""Imports verl before the tests do: it warns of each engine that is not installed, and warnings are errors here."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("verl") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verl.trainer.ppo.v1  # noqa: F401


@pytest.fixture(scope="session")
def plane() -> Iterator[None]:
    """Ray, with TransferQueue for whoever starts it."""
    import ray
    import transfer_queue as tq

    from .jobs import start_ray

    start_ray()
    yield
    tq.close()
    ray.shutdown()
