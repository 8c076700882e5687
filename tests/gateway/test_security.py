"""Who may do what, and what clients may send."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from streamadv import cli, doors
from streamadv.gateway import Keys
from streamadv.gateway.server import Place
from streamadv.producer.tickets import Ticket
from tests.unit.integrations.fake_engine import serving

from .engine import talkative
from .play import playing

pytestmark = pytest.mark.server
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


async def test_each_key_opens_its_own_door(redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            mine, other = await gateway.begin(2)
            operator = gateway.keys.sign("operator", run, None)
            foreign = gateway.keys.sign("turn", "another-run", Ticket("g", 0, 1, 1, 0, None))
            forged = Keys(["a-secret-of-somebody-else"]).sign("end", run, Ticket("g", 0, 1, 1, 0, None))
            turn, end = f"{mine['base_url']}/chat/completions", mine["end_url"]
            cases = [
                (turn, "", 401), (turn, "sk-1", 401), (turn, forged, 401), (turn, foreign, 401),
                (turn, mine["close_key"], 403), (turn, operator, 403), (turn, other["api_key"], 403),
                (end, mine["api_key"], 403), (end, other["close_key"], 403), (end, operator, 403), (end, forged, 401),
                (f"{gateway.url}/v1/groups", mine["close_key"], 403), (f"{gateway.url}/v1/groups", "", 401),
            ]  # fmt: skip
            for url, key, expected in cases:
                status, answer, _ = await gateway.post(url, key, HELLO if url == turn else {"reward": 1.0})
                assert status == expected, (url, key, answer)
                assert mine["api_key"][10:] not in str(answer)
            async with gateway.http.put(f"{gateway.url}/engines/0/version", json={"version": 1}) as refused:
                assert refused.status == 401
            assert engine.said == []  # type: ignore[attr-defined]
            now = time.time()
            monkeypatch.setattr(doors, "wall", lambda: now + 86401)
            assert (await gateway.post(turn, mine["api_key"], HELLO))[0] == 401


async def test_a_key_is_enough_without_the_path(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            assert (await gateway.post(f"{gateway.url}/v1/chat/completions", rollout["api_key"], HELLO))[
                0
            ] == 200
            assert (await gateway.end(rollout, reward=1.0))[1]["turns"] == 1


async def test_bodies_are_bounded(redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless() -> Any:
        while True:
            yield b"x" * 65536

    async def silent() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    monkeypatch.setattr("streamadv.gateway.http.BODY_S", 0.2)
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine, max_body=1 << 20) as gateway:
            (rollout,) = await gateway.begin()
            url, headers = (
                f"{rollout['base_url']}/chat/completions",
                {"Authorization": f"Bearer {rollout['api_key']}"},
            )
            status, answer, _ = await gateway.post(url, rollout["api_key"], {"messages": ["x" * (2 << 20)]})
            assert (status, answer["error"]["code"]) == (413, "body_too_large")
            for body, codes in ((endless(), (413, 408)), (silent(), (408,))):
                with suppress(aiohttp.ClientError, ConnectionError):  # it may be cut off while it still sends
                    async with gateway.http.post(url, data=body, headers=headers) as refused:
                        assert refused.status in codes
            for text in (
                b"[]",
                b"{",
                b"\xff",
                b'"x"',
                b'{"messages": 5}',
                b'{"messages": [5]}',
                b'{"messages": [{"role": "user", "content": [5]}]}',
                b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]}',
                b"[" * 100_000,
                b'{"messages": [{"role": "assistant", "tool_calls": 5}]}',
                b'{"messages": [{"role": "assistant", "tool_calls": [5]}]}',
                b'{"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]}',
            ):
                async with gateway.http.post(url, data=text, headers=headers) as refused:
                    assert refused.status == 400, text[:20]


async def test_compressed_bodies_are_refused_unread(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            url = f"{rollout['base_url']}/chat/completions"
            for body in (gzip.compress(b" " * (1 << 20)), b"no gzip"):
                headers = {"Authorization": f"Bearer {rollout['api_key']}", "Content-Encoding": "gzip"}
                async with gateway.http.post(url, data=body, headers=headers) as refused:
                    assert refused.status == 415, await refused.text()


async def test_what_clients_send_comes_into_no_header_and_no_line_of_the_log(
    redis_url: str, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(talkative()) as engine, caplog.at_level(logging.DEBUG):
        async with playing(redis_url, run, engine) as gateway:
            (rollout,) = await gateway.begin()
            url = f"{rollout['base_url']}/chat/completions"
            for agent in ("a b", "a/b", "é", "x" * 65, '"'):
                status, answer, _ = await gateway.post(
                    url, rollout["api_key"], HELLO, x_streamadv_agent=agent
                )
                assert (status, answer["error"]["code"]) == (400, "bad_request")
            await gateway.end(rollout, fail="first line\nforged: line\x1b[31m")
    assert not [
        record for record in caplog.records if "\n" in record.getMessage() or "\x1b" in record.getMessage()
    ]
    assert rollout["api_key"] not in caplog.text


async def test_requests_at_once_are_bounded(redis_url: str, run: str) -> None:
    with serving(talkative()) as engine:
        async with playing(redis_url, run, engine, max_turns=2, max_open=1) as gateway:
            first, second = await gateway.begin(2)
            reached, go_on = asyncio.Semaphore(0), asyncio.Event()
            asking = gateway.front._engines._post

            async def slow(*args: Any) -> Any:
                reached.release()
                await go_on.wait()
                return await asking(*args)

            gateway.front._engines._post = slow  # type: ignore[method-assign]
            clients = [asyncio.create_task(gateway.chat(first, f"hello {number}")) for number in range(2)]
            for _ in clients:
                await reached.acquire()
            status, answer, headers = await gateway.chat(first, "a third")
            assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "too_many_turns", "2")
            status, answer, _ = await gateway.chat(second, "hello")
            assert (status, answer["error"]["code"]) == (429, "too_many_rollouts")
            go_on.set()
            assert [status for status, *_ in await asyncio.gather(*clients)] == [200, 200]
            assert (await gateway.end(first, reward=1.0))[1]["rows"] == 2


def test_it_listens_to_this_machine_alone_unless_something_encrypts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert Place("0.0.0.0", behind_proxy=True).tls() is None
    assert Place("127.0.0.1").tls() is None
    assert Place("::1").tls() is None
    words = [
        "gateway",
        "--redis",
        "redis://127.0.0.1:1",
        "--engine",
        "http://127.0.0.1:1",
        "--host",
        "0.0.0.0",
    ]
    assert cli.main(words) == 1
    assert "--behind-proxy" in capsys.readouterr().err
    assert cli.main([*words, "--tls-cert", "missing.pem"]) == 1
    assert "missing.pem" in capsys.readouterr().err
