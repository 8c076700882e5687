"""A real Chromium without a screen, told what to do by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

DEADLINE_S: Final = 20.0  # bounds a hang


class Page:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.faults: list[str] = []  # errors of scripts, and what the page's policy refused

    async def tell(self, method: str, **parameters: Any) -> Any:
        """Send a command; its result."""
        said = await self._send(method, **parameters)
        assert "error" not in said, said
        return said["result"]

    async def _send(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async for message in self._socket:
            said = message.json()
            if said.get("id") == number:
                return said
            if said.get("method") == "Runtime.exceptionThrown":
                self.faults.append(str(said["params"]["exceptionDetails"]))
            if said.get("method") == "Log.entryAdded" and said["params"]["entry"]["source"] == "security":
                self.faults.append(said["params"]["entry"]["text"])
        raise AssertionError("the browser has ended")

    async def ask(self, script: str) -> Any:
        """The value of a script."""
        said = await self.tell("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until a script is true; its value."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            look = f"(() => {{ try {{ return {script} }} catch {{ return null }} }})()"
            said = await self._send(
                "Runtime.evaluate", expression=f"Boolean({look}) && ({look})", returnByValue=False
            )
            if "error" not in said:  # as while the page changes
                result = said["result"]["result"]
                if result.get("value", "objectId" in result):
                    return result.get("value", True)
            await asyncio.sleep(0.03)
        raise AssertionError(f"never: {script}; the page says: {await self.ask('document.body.innerText')}")

    async def open(self, url: str) -> None:
        """Go to an address; returns when it was read."""
        await self.tell("Page.navigate", url=url)
        await self.arrived(url)

    async def arrived(self, url: str) -> None:
        await self.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    async def press(self, key: str) -> None:
        """A key of the keyboard."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            await self.tell(
                "Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {})
            )

    async def size(self, width: int, height: int, dark: bool = False) -> None:
        await self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.tell("Emulation.setEmulatedMedia", features=[scheme])

    async def shoot(self) -> bytes:
        """A picture of what is visible, as PNG."""
        picture = await self.tell("Page.captureScreenshot", format="png")
        return base64.b64decode(picture["data"])


@contextmanager
def chromium(program: str, folder: Path) -> Iterator[str]:
    """A browser of its own; yields the address of its protocol. folder: for its profile."""
    words = [
        program,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *(f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"),
    ]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if line.startswith("DevTools listening on "))
        yield line.split()[-1].replace("ws://", "http://").partition("/devtools")[0]
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()


@asynccontextmanager
async def new_page(browser: str) -> AsyncIterator[Page]:
    """A page of the browser at this address."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{browser}/json/new") as answer:
            target = await answer.json()
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
            page = Page(socket)
            for domain in ("Page", "Runtime", "Log"):
                await page.tell(f"{domain}.enable")
            yield page
            async with session.get(f"{browser}/json/close/{target['id']}"):
                pass  # and it ends the connection
