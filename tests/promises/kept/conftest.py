"""What tests of kept groups share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis


@pytest.fixture
def limited(redis_url: str) -> Iterator[redis.Redis]:
    """The server, whose maxmemory is none again afterwards."""
    with redis.Redis.from_url(redis_url) as client:
        yield client
        client.config_set("maxmemory", 0)
