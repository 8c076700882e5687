"""What the gateway costs for each turn and token, and its memory: the figures of docs/produce/any-agent.md.

python -m tests.gateway.cost [--streams 256] [--rollouts 1024] [--turns 4] [--tokens 200]

An engine that answers at once, with a token for each byte of a conversation; agents, engine, gateway and server are
processes. Processor time and resident memory are those of the gateway alone.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import orjson
from aiohttp import ClientSession, TCPConnector, web

from streamadv.gateway import Keys
from streamadv.store.embedded import EmbeddedServer, free_port

RUN, PROMPT = "cost", 500
TICKS = os.sysconf("SC_CLK_TCK")


def serve(port: int, tokens: int) -> None:
    """An engine whose every answer is so many letters."""
    text = "x" * tokens
    logs = [{"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []} for _ in text]
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": list(text.encode())}
    choice["logprobs"] = {"content": logs}

    async def chat(request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        prompt = [token for said in asked["messages"] for token in said["content"].encode()]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens}
        answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
        body = orjson.dumps({**answer, "choices": [choice], "prompt_token_ids": prompt})
        return web.Response(body=body, content_type="application/json")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


def used(pid: int) -> tuple[float, float]:
    """Seconds of processor time, and MB of resident memory."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / TICKS, pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def rollout(http: ClientSession, gateway: str, key: str, options: argparse.Namespace) -> None:
    async def post(url: str, key: str, body: Any) -> Any:
        while True:
            async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
                if answer.status < 300:
                    return await answer.json()
                assert answer.status in (429, 503), await answer.text()
            await asyncio.sleep(0.1)

    (one,) = (await post(f"{gateway}/v1/groups", key, {"size": 1}))["rollouts"]
    messages = [{"role": "user", "content": "q" * PROMPT}]
    for _ in range(options.turns):
        asked = {"model": "gpt-4o", "messages": messages}
        answer = await post(f"{one['base_url']}/chat/completions", one["api_key"], asked)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]
    ended = await post(one["end_url"], one["close_key"], {"reward": 1.0})
    assert (ended["result"], ended["rows"]) == ("pushed", 1), ended


async def load(gateway: str, pid: int, options: argparse.Namespace) -> None:
    key, left = Keys.from_environment().sign("operator", RUN, None), options.rollouts
    async with ClientSession(connector=TCPConnector(limit=0)) as http:

        async def play() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await rollout(http, gateway, key, options)

        before, _ = used(pid)
        began, said = time.monotonic(), options.rollouts
        tasks = [asyncio.create_task(play()) for _ in range(options.streams)]
        while not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=1.0)
            if said - left >= options.rollouts / 8:
                said = left
                print(f"{options.rollouts - left} rollouts begun: {used(pid)[1]:.0f} MB", flush=True)
        for task in tasks:
            task.result()
        after, memory = used(pid)
    turns = options.rollouts * options.turns
    spent, wall = after - before, time.monotonic() - began
    print(f"{turns} turns in {wall:.1f} s: {1000 * spent / turns:.2f} ms a turn, {memory:.0f} MB")
    token, whole = 1e6 * spent / turns / options.tokens, 1000 * spent / options.rollouts
    print(f"{token:.1f} us a sampled token; {whole:.2f} ms a rollout, with its beginning and its push")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    os.environ["STREAMADV_GATEWAY_SECRET"] = "a-secret-of-the-measurement"
    engine_port, port = free_port(), free_port()
    engine = multiprocessing.get_context("spawn").Process(target=serve, args=(engine_port, options.tokens))
    with EmbeddedServer() as server:
        words = [
            "gateway",
            "--port",
            str(port),
            "--engine",
            f"http://127.0.0.1:{engine_port}",
            "--mode",
            "chat",
        ]
        command = [sys.executable, "-m", "streamadv", *words, "--redis", server.url, "--run", RUN]
        engine.start()
        grouper = subprocess.Popen(
            [sys.executable, "-m", "streamadv", "worker", "grouper", "--redis", server.url, "--run", RUN]
        )
        gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert gateway.stdout is not None
            asyncio.run(load(gateway.stdout.readline().strip(), gateway.pid, options))
        finally:
            for process in (gateway, grouper, engine):
                process.kill()


if __name__ == "__main__":
    main()
