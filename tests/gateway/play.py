"""A gateway in this process, on a real server and before a fake engine; and what the run got of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiohttp import ClientSession, web

import streamadv as sa
from streamadv.gateway import Gateway, Keys
from streamadv.gateway.engines import Engines
from streamadv.gateway.http import Front
from streamadv.gateway.loading import Loading
from streamadv.gateway.options import Options
from streamadv.grouping.groups_log import read_log
from streamadv.run import open_run
from streamadv.run.packets import fetch_columns
from streamadv.store.connection import Connection
from streamadv.trajectory.members import references_of
from streamadv.trajectory.packet import parse_header
from tests.support import group_all, problems
from tests.unit.integrations.fake_engine import FakeEngine


class Playing:
    """A gateway, and clients of it."""

    def __init__(self, front: Front, url: str, http: ClientSession, producer: sa.AsyncProducer) -> None:
        self.front, self.url, self.http, self.producer = front, url, http, producer
        self.keys = Keys.from_environment()

    async def begin(self, size: int = 1, **said: Any) -> list[dict[str, Any]]:
        """Rollouts of a new group, as a launcher in any language gets them."""
        key = self.keys.sign("operator", self.producer.run, None)
        status, answer, _ = await self.post(f"{self.url}/v1/groups", key, {"size": size, **said})
        assert status == 201, answer
        return list(answer["rollouts"])

    async def post(self, url: str, key: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(
            url, json=body, headers={"Authorization": f"Bearer {key}", **names}
        ) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text()), answer.headers

    async def chat(self, rollout: dict[str, Any], *said: str, **body: Any) -> tuple[int, Any, Any]:
        """Ask with messages of user and assistant by turns."""
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
        headers = body.pop("headers", {})
        asked = {"model": "gpt-4o", "messages": messages, **body}
        return await self.post(
            f"{rollout['base_url']}/chat/completions", rollout["api_key"], asked, **headers
        )

    async def say(self, rollout: dict[str, Any], *said: str, **body: Any) -> str:
        """The answer's text."""
        status, answer, _ = await self.chat(rollout, *said, **body)
        assert status == 200, answer
        return str(answer["choices"][0]["message"]["content"])

    async def end(self, rollout: dict[str, Any], **said: Any) -> tuple[int, Any]:
        status, answer, _ = await self.post(rollout["end_url"], rollout["close_key"], said)
        return status, answer


@asynccontextmanager
async def playing(redis_url: str, run: str, *engines: FakeEngine, **options: Any) -> AsyncIterator[Playing]:
    chosen = Options(tuple(engine.url for engine in engines), **{"mode": "chat", **options})
    async with sa.Producer(redis_url, run) as producer, ClientSession() as http:
        look = Loading(producer).look if chosen.load_weights else None
        asked = Engines(chosen.engines, chosen.answer_s, look)
        front = Front(producer, chosen, Keys.from_environment(), asked)
        await front.open()
        sweeping = asyncio.create_task(front.sessions.sweep())
        runner = front.runner(shutdown_s=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield Playing(front, "http://{}:{}".format(*runner.addresses[0]), http, producer)
        finally:
            sweeping.cancel()
            await runner.cleanup()
            await asked.close()


def gateway_of(played: Playing) -> Gateway:
    return Gateway(played.url, run=played.producer.run)


class Rows(NamedTuple):
    """A trajectory as it was pushed."""

    rows: list[dict[str, list[Any]]]
    """Columns of each row."""
    header: dict[str, Any]

    @property
    def sampled(self) -> list[tuple[list[int], list[float]]]:
        """Ids and log-probs of the tokens to train on, row by row."""
        found = []
        for row in self.rows:
            at = [place for place, mask in enumerate(row["response_mask"]) if mask]
            found.append(([row["input_ids"][i] for i in at], [row["rollout_log_probs"][i] for i in at]))
        return found


def pushed(redis_url: str, run: str) -> dict[str, Rows]:
    """Of the groups that have ended in their fullness: '<group>/<index>' -> what was pushed."""
    joined = open_run(Connection(redis_url), run)
    group_all(joined)
    assert not (found := problems(joined)), found
    found = {}
    for group in read_log(joined, 0, "0-0", 1000):
        for fetched in fetch_columns(joined, group.packets, None, header=True):
            assert fetched.problem is None
            members = fetched.packet.members
            count = len(members.table)
            headers = parse_header(fetched.header, members).get("members") or [{}] * count
            at = 0
            for reference, header in zip(
                references_of(members, [(group.group_id, None)] * count), headers, strict=True
            ):
                rows = []
                for length in reference.row_lengths:
                    rows.append(
                        {name: column[at : at + length].tolist() for name, column in fetched.columns.items()}
                    )
                    at += length
                found[f"{group.group_id}/{reference.rollout_index}"] = Rows(rows, header)
    return found
