"""What the page's producer speaks to, a gateway before an engine of a few lines, and an agent that asks once."""

import asyncio
import os
import threading

from aiohttp import ClientSession

import streamadv as sa
from tests.gateway.engine import talkative
from tests.gateway.play import playing
from tests.unit.integrations.fake_engine import serving

os.environ |= {
    "STREAMADV_REDIS_URL": "redis://127.0.0.1:6379/0",
    "STREAMADV_RUN": "exp1",
    "STREAMADV_GATEWAY_SECRET": "a-secret-of-the-page",
}
is_open = threading.Event()


async def serve():
    with serving(talkative()) as engine:
        async with playing(sa.redis_url(), "exp1", engine) as gateway:
            os.environ["STREAMADV_GATEWAY_URL"] = gateway.url
            is_open.set()
            await asyncio.Event().wait()


threading.Thread(target=asyncio.run, args=(serve(),), daemon=True).start()
is_open.wait()
task = "what is 2 and 2?"


async def run_in_sandbox(task, env):
    asked = {"messages": [{"role": "user", "content": task}]}
    key = {"Authorization": f"Bearer {env['OPENAI_API_KEY']}"}
    url = f"{env['OPENAI_BASE_URL']}/chat/completions"
    async with ClientSession() as http, http.post(url, json=asked, headers=key) as answer:
        return (await answer.json())["choices"][0]["message"]["content"]


def score(result):
    return float("answer" in result)
