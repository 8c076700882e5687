"""A score function that asks a judge over the network: bounded, remembered by content, and waiting while it is away."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import socket
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

from .. import clock
from ..errors import JudgeAwayError, SettingError
from ..messages import brief, check_number, log_fields, one_line, whole_number
from .scores import Score
from .scoring_streams import UnscoredTrajectory

logger = logging.getLogger(__name__)

#: Answers after which the same request may succeed: too many requests, or nobody there to answer.
AWAY_CODES: Final = frozenset((425, 429, 502, 503, 504, 529))
#: Errors of clients that could not connect: httpx, the SDKs of OpenAI and Anthropic, aiohttp. And of late answers.
AWAY_NAMES: Final = frozenset(("TransportError", "APIConnectionError", "ClientConnectionError"))
LATE_NAMES: Final = frozenset(("TimeoutException", "APITimeoutError", "ServerTimeoutError"))
#: The same, as errors of the system without a class of their own; without a number if several addresses failed.
AWAY_ERRNOS: Final = frozenset((None, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH))
#: No request begins later than so many seconds after those that it is made with: a call of a scorer is bounded in time.
BEGUN_WITHIN_S: Final = 55.0
#: Seconds that an answer may ask for.
LONGEST_WAIT_S: Final = 600.0


class Judge:
    """Asks a judge for each trajectory of a micro-batch, and is given to a `Scorer` or `streamadv worker scorer`.

    An exception of a request is the score of its trajectory alone. One that says that the judge is away makes it wait:
    connections that fail, answers 425, 429, 502, 503, 504 and 529, answers that are late while no other comes, and
    `JudgeAwayError`. The requests that had not begun then wait with it, and so do those that have not begun within a
    minute.

    Args:
        function: coroutine function of one trajectory, which returns a score; after the client if there is one.
        client: makes an asynchronous context manager, such as `httpx.AsyncClient`: one for the requests that are made
            at the same time.
        concurrency: requests at the same time, of this process.
        per_minute: requests begun in a minute, evenly spread, of this process; None has no limit.
        answer_s: seconds after which an answer is late. A scorer's `timeout_s` needs a minute more.
        cache: file (SQLite) that remembers scores; processes of one machine may share it. None: this process alone
            remembers them.
        remember: scores held in memory; 0, and no file, asks each time.
        key: gives the text that a score depends on, or None if it is not to be remembered. Default: status, data
            source, metadata, and the columns that are no floats.
        version: what else scores depend on, such as the judge's model and prompt.
    """

    def __init__(
        self,
        function: Callable[..., Awaitable[Score]],
        *,
        client: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
        concurrency: int = 32,
        per_minute: float | None = None,
        answer_s: float = 60.0,
        cache: str | None = None,
        remember: int = 10_000,
        key: Callable[..., str | None] | None = None,
        version: str = "",
    ) -> None:
        concurrency = whole_number("concurrency", concurrency, 1)
        check_number("per_minute", per_minute, or_none=True)
        check_number("answer_s", answer_s, "seconds")
        self.__name__ = getattr(function, "__name__", "judge")  # by which a worker finds its scorer
        self._function, self._client, self._concurrency = function, client, concurrency
        self._answer_s = answer_s
        self._interval_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next_at = self._answered_at = 0.0
        self._key, self._version = key, version
        self._remembered = Remembered(cache, remember)
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, _Session] = WeakKeyDictionary()

    async def __call__(self, trajectories: Sequence[UnscoredTrajectory]) -> list[Score]:
        """A score for each, or why there is none."""
        asked = (self.ask(each) for each in trajectories)
        scores: list[Score] = await asyncio.gather(*asked, return_exceptions=True)
        return scores

    async def ask(self, *trajectories: UnscoredTrajectory) -> Any:
        """Call the function for these, in its bounds, or answer from what is remembered.

        For functions of your own that compare trajectories of a group. Raises what the function raises; JudgeAwayError
        if that says that the judge is away.
        """
        key = self._key(*trajectories) if self._key is not None else content_of(trajectories)
        if key is None:
            async with self._session() as session:
                return await self._request(session, trajectories)
        key = f"{self.__name__} {self._version} {key}"
        known, score = self._remembered.get(key)
        if known:
            return score
        async with self._session() as session:
            if key not in session.asked:  # by another trajectory of the same content
                session.asked[key] = asyncio.ensure_future(self._request(session, trajectories))
                session.asked[key].add_done_callback(lambda _: session.asked.pop(key, None))
            score = await asyncio.shield(session.asked[key])
            self._remembered.put(key, score)
            return score

    async def _request(self, session: _Session, trajectories: Sequence[UnscoredTrajectory]) -> Any:
        async with session.slots:
            if session.away is not None:
                raise JudgeAwayError(str(session.away), session.away.wait_s)
            now = clock.now()
            at = max(now, self._next_at)
            if at - session.began > BEGUN_WITHIN_S:
                raise JudgeAwayError(
                    "it is asked for more than it answers in a minute: start more of it, or raise its limits"
                )
            self._next_at = at + self._interval_s
            if at > now:
                await asyncio.sleep(at - now)
            began = clock.now()
            try:
                score = await self._answer(session, trajectories)
            except JudgeAwayError as error:
                session.away = error
                raise
            except Exception as error:
                if not self._is_away(error, began):
                    raise
                session.away = JudgeAwayError(one_line(f"{type(error).__name__}: {error}"), _wait_s(error))
                raise session.away from error
            self._answered_at = clock.now()
            return score

    async def _answer(self, session: _Session, trajectories: Sequence[UnscoredTrajectory]) -> Any:
        async with asyncio.timeout(self._answer_s) as limit:
            try:
                if self._client is None:
                    return await self._function(*trajectories)
                async with session.opening:  # what opens a client asks the judge, too
                    if session.client is None:
                        session.client = await session.stack.enter_async_context(self._client())
                return await self._function(session.client, *trajectories)
            except asyncio.CancelledError:
                if limit.expired():
                    text = f"no answer within {self._answer_s:g} s: raise answer_s and the scorer's timeout_s"
                    raise TimeoutError(text) from None
                raise

    def _is_away(self, error: Exception, began: float) -> bool:
        names = {each.__name__ for each in type(error).__mro__}
        if isinstance(error, TimeoutError) or names & LATE_NAMES:
            return self._answered_at < began  # a request that alone is late may be at fault itself
        if type(error) is OSError:
            return error.errno in AWAY_ERRNOS
        is_away = isinstance(error, ConnectionError | socket.gaierror) or bool(names & AWAY_NAMES)
        return is_away or _code_of(error) in AWAY_CODES

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[_Session]:
        """What requests that are made at the same time share. Each call of a scorer has an event loop of its own."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            session = self._sessions[loop] = _Session(asyncio.Semaphore(self._concurrency), clock.now())
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            if not session.users:
                self._sessions.pop(loop, None)
                await session.stack.aclose()


@dataclass
class _Session:
    slots: asyncio.Semaphore
    began: float
    client: Any = None
    users: int = 0
    away: JudgeAwayError | None = None
    asked: dict[str, asyncio.Future[Any]] = field(default_factory=dict)
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)


def _code_of(error: Exception) -> int | None:
    """The status of an HTTP answer, as clients put it into their errors."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            code = getattr(holder, name, None)
            if isinstance(code, int):
                return code
    return None


def _wait_s(error: Exception) -> float:
    """Seconds of the answer's Retry-After; 0 without, or if it names a date."""
    headers = (
        getattr(getattr(error, "response", None), "headers", None) or getattr(error, "headers", None) or {}
    )
    try:
        return min(max(0.0, float(headers.get("retry-after", 0))), LONGEST_WAIT_S)
    except (AttributeError, TypeError, ValueError):
        return 0.0


# Scores by the content that they were given for: in memory, and in a file that survives the process


class Remembered:
    """The newest scores of this process; with a file, all of them, for all processes that open it."""

    def __init__(self, file: str | None, count: int) -> None:
        self._count, self._scores = whole_number("remember", count), OrderedDict[str, Any]()
        self._lock = threading.Lock()  # calls of a scorer may run in different threads
        self._file: sqlite3.Connection | None = None
        if file is not None:
            try:
                self._file = sqlite3.connect(
                    file, timeout=60.0, isolation_level=None, check_same_thread=False
                )
                self._file.execute("PRAGMA journal_mode=WAL")
                self._file.execute("PRAGMA synchronous=NORMAL")
                self._file.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, score TEXT)")
            except sqlite3.Error as error:
                raise SettingError(
                    f"cache is {brief(file)}, no file of scores: {error}; name another"
                ) from None

    def get(self, key: str) -> tuple[bool, Any]:
        """Whether there is one, and the score."""
        with self._lock:
            if key in self._scores:
                self._scores.move_to_end(key)
                return True, self._scores[key]
            row = self._in_file("SELECT score FROM scores WHERE key = ?", key)
            return (False, None) if row is None else (True, self._keep(key, json.loads(row[0])))

    def put(self, key: str, score: Any) -> None:
        """Remember a score: a number, None, or named components. Others are not remembered."""
        try:
            text = json.dumps(score, default=float, allow_nan=False)
        except (TypeError, ValueError):
            return  # the scorer says what is wrong with it
        plain = json.loads(text)
        if isinstance(plain, str | list) or (isinstance(score, Mapping) and plain.keys() != score.keys()):
            return
        with self._lock:
            self._keep(key, plain)
            self._in_file("INSERT OR REPLACE INTO scores VALUES (?, ?)", key, text)

    def _in_file(self, statement: str, key: str, *score: str) -> Any:
        """The first row of the answer. A file that fails costs no score: from then on this process does without."""
        if self._file is None:
            return None
        short = hashlib.blake2b(key.encode(), digest_size=20).hexdigest()
        try:
            return self._file.execute(statement, (short, *score)).fetchone()
        except sqlite3.Error as error:
            self._file = None
            text = "the judge's cache fails (%s): scores are remembered by this process alone"
            logger.warning(text, error, extra=log_fields("cache_failed", role="scorer"))
            return None

    def _keep(self, key: str, score: Any) -> Any:
        self._scores[key] = score
        while len(self._scores) > self._count:
            self._scores.popitem(last=False)
        return score


def content_of(trajectories: Sequence[UnscoredTrajectory]) -> str:
    """A digest of what was pushed but for columns of floats, which differ where tokens are the same."""
    digest = hashlib.blake2b(digest_size=20)
    for each in trajectories:
        parts: list[Any] = [
            each.status,
            each.data_source,
            each.metadata,
            list(each.row_lengths),
            list(each.agents),
        ]
        digest.update(json.dumps(parts, sort_keys=True, default=_plain).encode())
        for name in sorted(each.columns):
            column = each.columns[name]
            if column.dtype.kind != "f":
                digest.update(f"{name} {column.dtype.str} {column.shape} ".encode())
                digest.update(column.tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)
