"""What the gateway costs for each turn and token, and its memory: the figures of docs/produce/any-agent.md.

python -m tests.gateway.cost [--streams 256] [--rollouts 1024] [--turns 4] [--tokens 200]

An engine that answers at once, with a token for each byte of a conversation; agents, engine, gateway and server are
processes. Processor time, resident memory and objects, as the garbage collector counts them, are those of the gateway
alone; turns are kept at the server. Whether it leaks: --rollouts 100000 --turns 1 --tokens 16.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from aiohttp import ClientSession, TCPConnector, web

from streamadv.gateway import Keys
from streamadv.store.embedded import EmbeddedServer, free_port

RUN, PROMPT, GROUP = "cost", 500, 8
TICKS = os.sysconf("SC_CLK_TCK")
#: `streamadv` that says at SIGUSR1 how many objects it has.
COUNTED = """
import gc, signal
from streamadv.cli import main
signal.signal(signal.SIGUSR1, lambda *_: (gc.collect(), print(len(gc.get_objects()), flush=True)))
main()
"""


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


def held(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    return f"{used(process.pid)[1]:.0f} MB, {int(process.stdout.readline())} objects"


async def post(http: ClientSession, url: str, key: str, body: Any) -> Any:
    while True:
        async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            if answer.status < 300:
                return await answer.json()
            assert answer.status in (429, 503), await answer.text()
        await asyncio.sleep(0.1)


async def play(http: ClientSession, rollout: dict[str, str], turns: int) -> None:
    messages = [{"role": "user", "content": "q" * PROMPT}]
    for _ in range(turns):
        asked = {"model": "gpt-4o", "messages": messages}
        answer = await post(http, f"{rollout['base_url']}/chat/completions", rollout["api_key"], asked)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "and then?"}]


async def end(http: ClientSession, rollout: dict[str, str]) -> None:
    ended = await post(http, rollout["end_url"], rollout["close_key"], {"reward": 1.0})
    assert (ended["result"], ended["rows"]) == ("pushed", 1), ended


async def load(gateway: str, process: subprocess.Popen[str], options: argparse.Namespace) -> None:
    """Round after round: begin as many rollouts as there are streams, play them at once, end them."""
    key, rounds = Keys.from_environment().sign("operator", RUN, None), options.rollouts // options.streams
    asked, pid = {"size": min(options.streams, GROUP)}, process.pid
    spent = {"beginning": 0.0, "turns": 0.0, "ends": 0.0}
    async with ClientSession(connector=TCPConnector(limit=0)) as http:
        for number in range(rounds):
            marks = [used(pid)[0]]
            groups = options.streams // asked["size"]
            begun = await asyncio.gather(
                *(post(http, f"{gateway}/v1/groups", key, asked) for _ in range(groups))
            )
            rollouts = [one for group in begun for one in group["rollouts"]]
            marks.append(used(pid)[0])
            await asyncio.gather(*(play(http, one, options.turns) for one in rollouts))
            marks.append(used(pid)[0])
            await asyncio.gather(*(end(http, one) for one in rollouts))
            marks.append(used(pid)[0])
            for name, (before, after) in zip(spent, pairwise(marks), strict=True):
                spent[name] += after - before
            if number % max(1, rounds // 10) == 0:
                print(f"{(number + 1) * len(rollouts)} rollouts: {held(process)}", flush=True)
    rollouts_played = rounds * len(rollouts)
    turn_s = spent["turns"] / rollouts_played / options.turns
    print(f"{1000 * turn_s:.2f} ms a turn, {1e6 * turn_s / options.tokens:.1f} us a sampled token")
    for name in ("beginning", "ends"):
        print(f"{1000 * spent[name] / rollouts_played:.2f} ms a rollout for {name}")
    print(f"{rollouts_played} rollouts: {held(process)}")


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
        command = [sys.executable, "-c", COUNTED, *words, "--redis", server.url, "--run", RUN]
        engine.start()
        grouper = subprocess.Popen(
            [sys.executable, "-m", "streamadv", "worker", "grouper", "--redis", server.url, "--run", RUN]
        )
        gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert gateway.stdout is not None
            asyncio.run(load(gateway.stdout.readline().strip(), gateway, options))
        finally:
            for process in (gateway, grouper, engine):
                process.kill()


if __name__ == "__main__":
    main()
