"""What the client of engines costs for each turn: the figures of docs/produce/engines.md.

python -m tests.unit.integrations.cost
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict

from streamadv.integrations.engines import EngineClient, Episode

from .fake_engine import FakeEngine, serving

TURNS, READ, WRITTEN = 4, 64, 192
ROUNDS = 50


async def main() -> None:
    """Episodes of turns, token by token and as chats; processor time of this thread, where the engine is not."""
    engine = FakeEngine(lambda prompt: "x" * (WRITTEN - 1))
    with serving(engine):
        async with EngineClient(engine.url) as client:
            spent = await rounds(client)
    for name, seconds in spent.items():
        print(f"{name}: {1000 * statistics.median(seconds):.2f} ms")


async def rounds(client: EngineClient) -> dict[str, list[float]]:
    spent: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        began = time.thread_time()
        await client.chat([{"role": "user", "content": "x" * READ}])
        spent["a chat's turn"].append(time.thread_time() - began)
        episode = Episode()
        for _ in range(TURNS):
            episode.observe(range(READ))
            began = time.thread_time()
            completion = await client.complete(episode.tokens)
            spent["a turn by tokens"].append(time.thread_time() - began)
            began = time.thread_time()
            episode.add(completion)
            spent["its addition to an episode"].append(time.thread_time() - began)
        began = time.thread_time()
        episode.record()
        spent["an episode's record"].append(time.thread_time() - began)
    return spent


if __name__ == "__main__":
    asyncio.run(main())
