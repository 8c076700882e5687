"""The engines behind a gateway: which one has a rollout, and what to do when one is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import orjson

from .. import clock
from ..integrations.engines.client import AGAIN
from ..messages import log_fields, one_line
from .refusals import RefusedError, unavailable

if TYPE_CHECKING:
    from .sessions import Session

logger = logging.getLogger(__name__)

#: Tries of a request, on whichever engines; the pause before the second one doubles before each further one.
TRIES: Final = 4
PAUSE_S: Final = 0.5
#: Seconds that an engine gets no new rollouts after it was away.
BREAK_S: Final = 10.0
#: Seconds between two questions for an engine's version.
WATCH_S: Final = 0.5
#: Seconds for the question what an engine can do.
LOOK_S: Final = 10.0
#: Seconds for what an engine is told to do, such as to load weights.
COMMAND_S: Final = 600.0
#: Bytes of an engine's answer.
MAX_ANSWER: Final = 256 << 20
_RENDER: Final = "/v1/chat/completions/render"


@dataclass
class Engine:
    """One engine, or a router before several."""

    url: str
    under_way: int = 0
    rollouts: int = 0
    down_until: float = 0.0
    version: int | None = None
    is_told: bool = False  # its version, by an operator
    renders: bool = False  # token in, token out
    is_loaded: bool = False  # with weights of the run, by this gateway
    is_known: bool = False  # it has said what it can do


class CommandError(Exception):
    """An engine has not done what it was told."""


class Engines:
    """All engines. One event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        answer_s: float = 1800.0,
        look: Callable[[Engines], Awaitable[None]] | None = None,
    ) -> None:
        """answer_s: for an answer, with all tries: who waits longer for an engine that stalls holds up its group.

        look: loads the run's weights, see `loading.py`. Called after each look at the engines' versions; an engine
        without a version is asked for nothing then.
        """
        self._answer_s, self._load = answer_s, look
        self.all = [Engine(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self._http: aiohttp.ClientSession | None = None
        self._watching: asyncio.Task[None] | None = None
        self.model: str | None = None

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)
        await asyncio.gather(*map(self._look, self.all))
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._http is not None:
            await self._http.close()

    async def ask(self, rollout: Session, path: str, body: Mapping[str, Any]) -> tuple[Any, int | None]:
        """The answer of the rollout's engine, or of another one that takes it over, and the version it began with.

        Raises RefusedError.
        """
        async with self._in_time(rollout):
            return await self._ask(rollout, path, body)

    async def stream(
        self,
        rollout: Session,
        path: str,
        body: Mapping[str, Any],
        take: Callable[[Mapping[str, Any]], Awaitable[None]],
    ) -> int | None:
        """Hand each chunk of a streamed answer to `take`; returns the version that it began with.

        Only what fails before the first chunk is tried again. Raises RefusedError.
        """
        async with self._in_time(rollout):
            answer, version = await self._ask(rollout, path, body, is_streamed=True)
            try:
                async for chunk in _chunks(answer):
                    await take(chunk)
            finally:
                answer.close()
        return version

    @asynccontextmanager
    async def _in_time(self, rollout: Session) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._answer_s):
                yield
        except TimeoutError:
            if rollout.engine is not None:
                self._rest(rollout.engine)
            raise unavailable(f"no engine has answered within {self._answer_s:g} s") from None

    async def _ask(
        self, rollout: Session, path: str, body: Mapping[str, Any], is_streamed: bool = False
    ) -> tuple[Any, int | None]:
        problem = ""
        for number in range(TRIES):
            if number:
                await asyncio.sleep(PAUSE_S * 2 ** (number - 1))
            engine = self.place(rollout)
            engine.under_way += 1
            version = engine.version
            try:
                status, answer = await self._post(engine, rollout.name, path, body, is_streamed)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                problem = f"{engine.url}: {type(error).__name__} {one_line(str(error))}"
                self._rest(engine)
                continue
            finally:
                engine.under_way -= 1
            if status < 400:
                return answer, version
            problem = f"{engine.url}: {status} {_words_of(answer)}"
            if status not in AGAIN:
                raise RefusedError(status, "engine", problem, answer if isinstance(answer, dict) else None)
            if number == TRIES - 2:  # it answers, and always with this: perhaps another one can
                self._rest(engine)
        raise unavailable(f"no engine answers: {problem}")

    def release(self, rollout: Session) -> None:
        """The rollout asks no more."""
        if rollout.engine is not None:
            rollout.engine.rollouts -= 1
            rollout.engine = None

    def place(self, rollout: Session) -> Engine:
        """The engine that the rollout asks. It stays with it, for the sake of the prefix cache."""
        now = clock.now()
        if rollout.engine is not None and rollout.engine.down_until <= now:
            return rollout.engine
        # The one with the fewest requests that is up; the current one if none is.
        best = min(self.all, key=lambda one: (one.down_until > now, one.under_way, one.rollouts))
        self.release(rollout)
        best.rollouts += 1
        rollout.engine = best
        return best

    def _rest(self, engine: Engine) -> None:
        if engine.down_until <= clock.now():
            fields = log_fields("engine_away", role="gateway")
            logger.warning(
                "engine %s is away: it gets no requests for %g s", engine.url, BREAK_S, extra=fields
            )
        engine.down_until = clock.now() + BREAK_S

    async def _post(
        self, engine: Engine, name: str, path: str, body: Mapping[str, Any], is_streamed: bool = False
    ) -> tuple[int, Any]:
        """Status and answer. is_streamed: the answer under way, but a refusal whole."""
        assert self._http is not None
        headers = {"Content-Type": "application/json", "X-Session-ID": name}
        answer = await self._http.post(engine.url + path, data=orjson.dumps(body), headers=headers)
        if is_streamed and answer.status < 400:
            return answer.status, answer
        async with answer:
            return answer.status, await _read(answer)

    async def command(self, engine: Engine, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Have an engine do something. Raises CommandError."""
        try:
            async with asyncio.timeout(COMMAND_S):
                status, answer = await self._post(engine, "command", path, body or {})
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise CommandError(f"{path}: {type(error).__name__} {one_line(str(error))}") from None
        if status >= 400:
            raise CommandError(f"{path}: {status} {_words_of(answer)}")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await asyncio.gather(*(self._ask_version(engine) for engine in self.all))
            if self._load is not None:
                await self._load(self)

    async def know(self, rollout: Session) -> Engine:
        """The rollout's engine, asked what it can do if it was away when the gateway began."""
        engine = self.place(rollout)
        if not engine.is_known:
            await self._look(engine)
        try:
            async with asyncio.timeout(self._answer_s):
                while self._load is not None and not engine.is_loaded:
                    await asyncio.sleep(PAUSE_S)
                    engine = self.place(rollout)
        except TimeoutError:
            raise unavailable(f"engine {engine.url} has no weights of the run yet") from None
        return engine

    async def _look(self, engine: Engine) -> None:
        await self._ask_version(engine)
        with suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError):
            listed = await self._get(engine, "/v1/models")
            self.model = self.model or str(listed["data"][0]["id"])
            body = {"model": self.model, "messages": [{"role": "user", "content": "."}]}
            async with asyncio.timeout(LOOK_S):
                status, answer = await self._post(engine, "start", _RENDER, body)
            engine.renders = status < 400 and "token_ids" in answer
            engine.is_known = status not in AGAIN
            if engine.is_known:
                logger.info(
                    "engine %s: %s",
                    engine.url,
                    "takes and gives tokens"
                    if engine.renders
                    else "makes its own tokens of messages; vLLM 0.32 with "
                    "--enable-scale-out would keep rows whole whatever its template does",
                    extra=log_fields("engine_found", role="gateway"),
                )

    async def _ask_version(self, engine: Engine) -> None:
        if engine.is_told:
            return
        with suppress(aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            version = str((await self._get(engine, "/weight_info"))["weight_version"])
            engine.version = int(version) if version.isdecimal() else None

    async def _get(self, engine: Engine, path: str) -> Any:
        assert self._http is not None
        timeout = aiohttp.ClientTimeout(total=5)
        async with self._http.get(engine.url + path, timeout=timeout) as answer:
            answer.raise_for_status()
            return orjson.loads(await answer.read())


async def _read(answer: aiohttp.ClientResponse) -> Any:
    """What an engine has answered, as JSON; a refusal may be text."""
    parts, size = [], 0
    async for part in answer.content.iter_any():
        parts.append(part)
        if (size := size + len(part)) > MAX_ANSWER:
            raise aiohttp.ClientPayloadError(f"the answer is larger than {MAX_ANSWER} bytes")
    data = b"".join(parts)
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        if answer.status < 400:
            raise aiohttp.ClientPayloadError("the answer is no JSON") from None
        return data[:500].decode(errors="replace")


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    """The chunks of a streamed answer. Raises RefusedError if it is broken off."""
    rest, size = b"", 0
    try:
        async for data in answer.content.iter_any():
            size += len(data)
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                said = event.removeprefix(b"data:").strip()
                if said == b"[DONE]":
                    return
                chunk = orjson.loads(said) if said.startswith(b"{") else None
                if chunk is not None and "choices" not in chunk:
                    raise unavailable(f"the engine has failed: {_words_of(chunk)}")
                if chunk is not None:
                    yield chunk
            if size > MAX_ANSWER:
                break
    except (aiohttp.ClientError, ConnectionError, orjson.JSONDecodeError) as error:
        raise unavailable(f"the engine has broken off its answer: {type(error).__name__}") from None
    raise unavailable("the engine has broken off its answer")


def _words_of(answer: Any) -> str:
    """What an engine's error says, in one line."""
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        answer = error.get("message", error) if isinstance(error, dict) else error
    return one_line(str(answer))[:500]
