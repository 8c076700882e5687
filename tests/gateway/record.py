"""Writes down what the SDKs of OpenAI and Anthropic send to a gateway, and what they accept as its answers.

python -m tests.gateway.record, in the environment of `make test-integration-agents`; `test_wires.py` replays it without
the SDKs. Each conversation has a tool and a thought; keys are not written.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

from streamadv.store.embedded import EmbeddedServer
from tests.unit.integrations.fake_engine import serving

from .engine import caller
from .play import playing

WIRES = Path(__file__).parent / "wires"
ANSWERS = ('<where am I>let me see!look {"at":  7}', "a door")
#: Of the transport, or of this machine.
LEFT_OUT = ("host", "connection", "content-length", "accept-encoding", "x-stainless-os", "x-stainless-arch")


class Wire:
    """What goes by."""

    def __init__(self, gateway: str) -> None:
        self.gateway, self.url = gateway, ""
        self.heard: list[dict[str, Any]] = []

    async def forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        kept = {name: value for name, value in headers.items() if name not in LEFT_OUT}
        async with (
            ClientSession() as http,
            http.post(self.gateway + request.path, data=body, headers=kept) as answer,
        ):
            text = await answer.text()
        key = headers.get("x-api-key") or headers["authorization"].partition(" ")[2]
        path = "/v1/" + request.path.partition("/v1/")[2]
        shown = {name: value.replace(key, "KEY") for name, value in kept.items()}
        answered = {"status": answer.status, "answer": text}
        self.heard.append({"path": path, "headers": shown, "body": json.loads(body), **answered})
        return web.Response(text=text, status=answer.status, content_type=answer.content_type)


@asynccontextmanager
async def wire_to(gateway: str) -> AsyncIterator[Wire]:
    wire, app = Wire(gateway), web.Application()
    app.router.add_post("/{path:.*}", wire.forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    wire.url = "http://{}:{}".format(*runner.addresses[0])
    try:
        yield wire
    finally:
        await runner.cleanup()


async def record(redis_url: str, api: str, streams: bool) -> list[dict[str, Any]]:
    """A conversation of two turns."""
    from tests.integrations.agents.test_sdks import add_result, ask, client_of, tool_of

    with serving(caller(*ANSWERS)) as engine:
        async with playing(redis_url, f"{api}-{streams}", engine, mode="tokens") as gateway:
            (rollout,) = await gateway.begin()
            async with wire_to(gateway.url) as wire:
                there = {**rollout, "base_url": rollout["base_url"].replace(gateway.url, wire.url)}
                said: list[Any] = [{"role": "user", "content": "what is there?"}]
                async with client_of(api, there) as client:
                    add_result(api, await ask(api, streams, client, said, tools=[tool_of(api)]), said)
                    await ask(api, streams, client, said, tools=[tool_of(api)])
            return wire.heard


def main() -> None:
    os.environ["STREAMADV_GATEWAY_SECRET"] = "a-secret-of-the-recording"
    with EmbeddedServer() as server:
        for api in ("chat", "responses", "messages"):
            for streams in (False, True):
                heard = asyncio.run(record(server.url, api, streams))
                file = WIRES / f"{api}{'-streamed' * streams}.json"
                file.write_text(json.dumps(heard, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
