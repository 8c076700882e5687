"""Stands before an engine and writes down what it says on the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, web

ANSWERS = ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions")


class Tap:
    """`said`: ids, log-probs and spans of versions of each choice that the engine has sampled."""

    def __init__(self, engine: str) -> None:
        self.engine, self.url = engine, ""
        self.said: list[tuple[tuple[int, ...], list[float], Any]] = []
        self.asked = asyncio.Event()  # something is being sampled

    def note(self, path: str, answer: dict[str, Any]) -> None:
        for choice in answer["choices"] if path in ANSWERS else ():
            if choice.get("token_ids") is None:
                continue
            listed = choice["logprobs"]
            logs = [token["logprob"] for token in listed["content"]] if "content" in listed else None
            logs = listed["token_logprobs"] if logs is None else logs
            self.said.append((tuple(choice["token_ids"]), logs, choice.get("weight_versions")))


@asynccontextmanager
async def tapping(engine: str) -> AsyncIterator[Tap]:
    tap = Tap(engine)
    async with ClientSession() as http:

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            if request.path == ANSWERS[0]:
                tap.asked.set()
            kind = {"Content-Type": request.headers.get("Content-Type", "application/json")}
            async with http.request(
                request.method, engine + request.path_qs, data=body, headers=kind
            ) as answer:
                data = await answer.read()
            if answer.status == 200 and answer.content_type == "application/json":
                tap.note(request.path, json.loads(data))
            return web.Response(body=data, status=answer.status, content_type=answer.content_type)

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        tap.url = "http://{}:{}".format(*runner.addresses[0])
        try:
            yield tap
        finally:
            await runner.cleanup()
