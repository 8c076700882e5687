"""What a reply says of a payload, and what it says only of the server."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import BusyLoadingError, NoPermissionError, ResponseError

from streamadv.store.connection import Connection
from streamadv.store.replies import replies_of


def test_a_key_of_another_kind_has_no_payload(fake: Connection) -> None:
    fake.scripts.set("text", b"x")
    fake.scripts.hset("hash", "header", b"{}")
    pipe = fake.scripts.pipeline(transaction=False)
    pipe.hgetall("text")
    pipe.hmget("text", ["header"])
    pipe.hgetall("hash")
    pipe.hgetall("gone")
    assert replies_of(pipe) == [None, None, {b"header": b"{}"}, {}]


@pytest.mark.parametrize(
    "error",
    [
        ResponseError("BUSY Redis is busy running a script."),
        NoPermissionError("NOPERM this user has no permissions"),
        BusyLoadingError("LOADING"),
    ],
)
def test_an_answer_about_the_server_condemns_no_payload(error: Exception) -> None:
    class Pipeline:
        def execute(self, raise_on_error: bool) -> list[Any]:
            return [{}, error]

    with pytest.raises(type(error)):
        replies_of(Pipeline())
