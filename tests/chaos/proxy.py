"""A TCP proxy on loopback that cuts connections in the middle of a request or of a reply, or holds them up.

Faults are armed from outside (`arm`) or drawn from a seed for every piece of data; each takes the next connection
with data in its direction.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter, deque
from contextlib import suppress
from typing import Final, Self

#: The server never sees all of the request; has carried it out, the client never hears of it; is late.
FAULTS: Final = ("request", "reply", "delay")
CHUNK: Final = 1 << 16


class Proxy:
    """Listens on a free port and passes everything on to the server at host and port."""

    def __init__(self, host: str, port: int, seed: int = 0) -> None:
        self._target = (host, port)
        self._chance = random.Random(seed)
        self._armed: deque[str] = deque()
        self.odds = 0.0  # of a fault for every piece of data
        self.delay_s = 0.3
        self.faults: Counter[str] = Counter()
        self._mark = b""
        self.held = threading.Event()
        self._released = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def arm(self, fault: str) -> None:
        """Do this to the next data in its direction."""
        self._armed.append(fault)

    def hold(self, mark: bytes) -> None:
        """Hold back what a client sends from the next `mark` on, until `release`. `held` is set once it does."""
        self._mark = mark

    def release(self) -> None:
        """Pass on what is held back."""
        self._loop.call_soon_threadsafe(self._released.set)

    def __enter__(self) -> Self:
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_server = await asyncio.open_connection(*self._target)
        except OSError:  # the server is away
            writer.close()
            return
        pumps = [
            asyncio.ensure_future(self._pump("request", reader, to_server[1])),
            asyncio.ensure_future(self._pump("reply", to_server[0], writer)),
        ]
        try:
            with suppress(asyncio.CancelledError):  # the proxy ends
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            writer.close()
            to_server[1].close()

    async def _pump(self, way: str, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(CHUNK):
                if way == "request" and self._mark:
                    data = await self._hold_back(data, source, target)
                fault = self._fault(way)
                if fault == "delay":
                    await asyncio.sleep(self.delay_s)
                elif fault is not None:
                    target.write(data[: self._chance.randrange(len(data))])
                    await target.drain()
                    return
                target.write(data)
                await target.drain()

    async def _hold_back(
        self, data: bytes, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> bytes:
        """Pass on what comes before the mark and wait, if it comes. Returns what is still to be passed on."""
        mark = self._mark
        while any(data.endswith(mark[:length]) for length in range(1, len(mark))):
            more = await source.read(CHUNK)  # the rest of the mark?
            if not more:
                return data
            data += more
        before, found, _ = data.partition(mark)
        if not found:
            return data
        self._mark = b""
        target.write(before)
        await target.drain()
        self.held.set()
        await self._released.wait()
        return data[len(before) :]

    def _fault(self, way: str) -> str | None:
        fault = None
        if self._armed and self._armed[0] in (way, "delay"):
            fault = self._armed.popleft()
        elif self.odds and self._chance.random() < self.odds:
            fault = self._chance.choice((way, "delay"))
        if fault is not None:
            self.faults[fault] += 1
        return fault
