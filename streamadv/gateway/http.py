"""URLs, keys, refusals."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web

from ..errors import StreamadvError
from ..messages import brief, log_fields, one_line
from ..metrics import instruments
from ..producer.async_producer import AsyncProducer
from ..producer.tickets import Ticket
from . import live
from .access import Gateway
from .asking import Asked, Turns, digest_of
from .dialects import DIALECTS, Dialect
from .engines import Engines
from .keys import BadKeyError, Claim, Keys, Purpose
from .options import Options
from .refusals import RefusedError, bad_request, refused
from .sessions import Session, Sessions
from .turns import Store

logger = logging.getLogger(__name__)

#: Seconds for a request's body.
BODY_S: Final = 120.0
#: Seconds after which a stream that waits gets a comment: clients and tunnels cut connections that say nothing.
COMMENT_S: Final = 5.0
#: Seconds that the beginning of a group waits for admission, unless it says another time.
ADMISSION_S: Final = 60.0
_AGENT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ROLLOUT: Final = "/g/{group}/{index}"
_GROUP: Final = ("group_id", "data_source", "metadata", "redundancy", "role", "round", "deadline_s")
_ENDING: Final = {
    "reward", "rewards", "reward_later", "status", "metadata", "turn_rewards", "fail", "reason", "cancel",
    "data_source",
    "trace",  # of older clients; it says nothing
}  # fmt: skip

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """The HTTP side of a gateway."""

    def __init__(self, producer: AsyncProducer, options: Options, keys: Keys, engines: Engines) -> None:
        self._producer, self._options, self._keys, self._engines = producer, options, keys, engines
        self.sessions = Sessions(producer, options, engines.release)
        self._turns = Turns(options, engines, self.sessions)
        self.is_stopping = False
        self.under_way = 0
        self.idle = asyncio.Event()  # no turn is under way
        self.idle.set()

    async def open(self) -> None:
        """Look at the engines, and tell the run that it need not wait for this gateway."""
        await self._engines.open()
        self._producer._logic.membership.serve(self.sessions.words)
        await self._producer.finish()

    def runner(self, shutdown_s: float) -> web.AppRunner:
        """Serves it. Whoever goes away cancels what he has asked for; bodies come as they are, see `_body`."""
        app = web.Application(middlewares=[self._answer_errors], client_max_size=self._options.max_body)
        for prefix in ("", _ROLLOUT, f"{_ROLLOUT}/a/{{agent}}"):
            for dialect in DIALECTS:
                app.router.add_post(f"{prefix}/v1/{dialect.path}", partial(self._turn, dialect))
            app.router.add_get(f"{prefix}/v1/models", self._models)
        app.router.add_post(f"{_ROLLOUT}/end", self._end)
        app.router.add_get(_ROLLOUT, self._show)
        app.router.add_post("/v1/groups", self._begin)
        app.router.add_post("/v1/finish", self._finish)
        app.router.add_put("/engines/{number}/version", self._set_version)
        app.router.add_get("/healthz", self._health)
        options: dict[str, Any] = {"handler_cancellation": True, "auto_decompress": False, "access_log": None}
        return web.AppRunner(app, shutdown_timeout=shutdown_s, **options)

    async def _turn(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        self.under_way += 1
        self.idle.clear()
        try:
            if self.is_stopping:
                raise RefusedError(503, "stopping", "this gateway stops: ask again, another one goes on")
            ticket = self._ticket(request, "turn")
            raw = await _body(request)
            body = _object(raw)
            key = request.headers.get("Idempotency-Key", "")
            retries = request.headers.get("x-stainless-retry-count", "0")
            is_retry = bool(key) or bool(retries.strip("0"))
            agent = request.match_info.get("agent") or request.headers.get("x-streamadv-agent")
            if agent is not None and not _AGENT.fullmatch(agent):
                raise bad_request(
                    f"agent is {brief(agent)}: use letters, digits, '.', '_' and '-', at most 64"
                )
            asked = Asked(dialect, body, digest_of(dialect, raw, key), is_retry, agent)
            session = await self.sessions.get(ticket)
            if body.get("stream"):
                return await self._stream(request, session, asked)
            answer = await self._turns.answer(session, asked)
            _count(dialect.name, "ok")
            return _json(dialect.write(answer, body))
        finally:
            self.under_way -= 1
            if not self.under_way:
                self.idle.set()

    async def _stream(self, request: web.Request, session: Session, asked: Asked) -> web.StreamResponse:
        """The answer as events, the last of which leaves when it is kept; live, or else all of them then."""
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def send(events: bytes) -> None:
            if not out.prepared:
                await out.prepare(request)
            await out.write(events)

        is_live = self._options.live_streams and asked.dialect.name in live.DIALECTS
        streaming = live.Live(send, asked.body) if is_live else None
        making = asyncio.create_task(self._turns.answer(session, asked, streaming))
        try:
            while not (await asyncio.wait({making}, timeout=COMMENT_S))[0]:
                await send(b": the engine samples\n\n")
            answer = making.result()
            has_left = streaming is not None and streaming.has_begun
            events = b"" if has_left else b"".join(asked.dialect.stream(answer, asked.body))
        except (RefusedError, StreamadvError) as error:
            if not out.prepared:
                raise
            refusal = error if isinstance(error, RefusedError) else refused(error)
            events = b"event: error\ndata: " + orjson.dumps(refusal.body(asked.dialect.name)) + b"\n\n"
            _count(asked.dialect.name, refusal.code)
        else:
            _count(asked.dialect.name, "ok")
        finally:
            making.cancel()
        await send(events)
        await out.write_eof()
        return out

    async def _end(self, request: web.Request) -> web.Response:
        ticket = self._ticket(request, "end")
        said = _object(await _body(request))
        if unknown := sorted(said.keys() - _ENDING):
            raise bad_request(f"end: {brief(unknown[0])} is no field, use {', '.join(sorted(_ENDING))}")
        for name, kind, what in (("metadata", dict, "an object"), ("data_source", str, "text")):
            if said.get(name) is not None and not isinstance(said[name], kind):
                raise bad_request(f"end: {name} is {brief(said[name])}, needs {what}")
        return _json(await self.sessions.end(ticket, said))

    async def _show(self, request: web.Request) -> web.Response:
        session = await self.sessions.get(self._ticket(request, self._claim(request).purpose))
        episode = session.episode
        return _json(
            {
                "rollout": session.name, "state": "open", "turns": len(session.turns), "rows": len(episode.rows),
                "tokens": [len(row) for row in episode.rows], "breaks": episode.breaks, "asking": session.asking,
                "engine": None if session.engine is None else session.engine.url,
            }
        )  # fmt: skip

    async def _begin(self, request: web.Request) -> web.Response:
        self._claim(request, "operator")
        said = _object(await _body(request))
        if unknown := sorted(said.keys() - {*_GROUP, "size", "timeout_s"}):
            raise bad_request(
                f"groups: {brief(unknown[0])} is no field, use size, timeout_s, {', '.join(_GROUP)}"
            )
        given = {"deadline_s": self._options.idle_s} | {name: said[name] for name in _GROUP if name in said}
        group = await self._producer.begin_group(
            said.get("size", 1), timeout=said.get("timeout_s", ADMISSION_S), **given
        )
        first = group.tickets[0]
        if first.metadata:
            shared = orjson.dumps({"metadata": first.metadata}).decode()
            await Store(self._producer, self._options.idle_s).share(group.group_id, shared)
        url = self._options.public_url or f"{request.scheme}://{request.host}"
        handing = Gateway(url, run=self._producer.run, keys=self._keys)
        rollouts = []
        for ticket in group.tickets:
            access = handing._access(ticket)
            rollouts.append(
                {
                    "index": ticket.rollout_index, "base_url": access.base_url, "api_key": access.api_key,
                    "close_key": access.close_key, "end_url": access.end_url,
                }
            )  # fmt: skip
        return _json({"group": group.group_id, "rollouts": rollouts}, 201)

    async def _finish(self, request: web.Request) -> web.Response:
        """No launcher begins more groups here; one that does all the same has the run wait again."""
        self._claim(request, "operator")
        membership = self._producer._logic.membership
        membership.last_word = "finished"
        await self._producer.finish()
        return _json({"run": self._producer.run, "finished": membership.finished})

    async def _set_version(self, request: web.Request) -> web.Response:
        self._claim(request, "operator")
        number, version = request.match_info["number"], _object(await _body(request)).get("version")
        if not number.isdecimal() or int(number) >= len(self._engines.all):
            raise bad_request(f"engine {brief(number)}: there are 0 to {len(self._engines.all) - 1}", 404)
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise bad_request(f"version is {brief(version)}, needs a whole number")
        engine = self._engines.all[int(number)]
        engine.version, engine.is_told = version, True
        return _json({"engine": engine.url, "version": version})

    async def _models(self, request: web.Request) -> web.Response:
        self._ticket(request, "turn")
        name = self._options.model or self._engines.model or "policy"
        model = {"id": name, "object": "model", "created": 0, "owned_by": "streamadv"}
        return _json({"object": "list", "data": [model]})

    async def _health(self, request: web.Request) -> web.Response:
        shown = {
            "state": "stopping" if self.is_stopping else "open",
            "turns_under_way": self.under_way,
            "rollouts_open": instruments.GATEWAY_OPEN._value.get(),
            "turns": instruments.GATEWAY_TURNS._value.get(),
            "rows": instruments.GATEWAY_ROWS._value.get(),
        }
        return _json(shown, 503 if self.is_stopping else 200)

    def _claim(self, request: web.Request, purpose: Purpose | None = None) -> Claim:
        """What the request's key allows. Raises RefusedError."""
        given = request.headers.get("Authorization", "")
        key = given[7:] if given[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        try:
            claim = self._keys.open(key.strip(), self._producer.run)
        except BadKeyError as error:
            raise RefusedError(401, "bad_key", str(error)) from None
        if purpose is not None and claim.purpose != purpose:
            raise RefusedError(403, "not_yours", f"this key does not allow that: use the one for {purpose}")
        return claim

    def _ticket(self, request: web.Request, purpose: Purpose) -> Ticket:
        ticket, place = self._claim(request, purpose).ticket, request.match_info
        if ticket is None:
            raise RefusedError(403, "not_yours", "an operator's key plays no rollout")
        if "group" in place and (place["group"], place["index"]) != (
            ticket.group_id,
            str(ticket.rollout_index),
        ):
            raise RefusedError(403, "other_rollout", "this key is of another rollout than the path")
        return ticket

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RefusedError as error:
            refusal = error
        except StreamadvError as error:
            refusal = refused(error)
        except web.HTTPRequestEntityTooLarge:
            text = f"the body is larger than {self._options.max_body} bytes"
            refusal = RefusedError(413, "body_too_large", text)
        except web.HTTPException as error:
            refusal = bad_request(f"{request.method}: {error.reason}", error.status)
        except (aiohttp.ClientError, ConnectionError):
            raise
        except Exception as error:
            fields = log_fields("request_failed", role="gateway")
            logger.exception("a request has failed: %s", one_line(str(error)), extra=fields)
            refusal = RefusedError(500, "internal", "the gateway has failed, its log says why")
        name = next((one.name for one in DIALECTS if request.path.endswith(f"/v1/{one.path}")), "")
        if name:
            _count(name, refusal.code)
        return _json(refusal.body(name), refusal.status, refusal.headers)


def _count(dialect: str, code: str) -> None:
    """A request for a turn was answered: `ok`, or the code of a refusal."""
    known = code if code in instruments.GATEWAY_CODES else "other"
    instruments.GATEWAY_REQUESTS.labels(dialect, known).inc()


async def _body(request: web.Request) -> bytes:
    if request.headers.get("Content-Encoding", "identity") != "identity":  # a small one may become a huge one
        raise bad_request("the body is compressed: send it without Content-Encoding", 415)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise bad_request(f"the body did not come within {BODY_S:g} s", 408) from None


def _object(raw: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is no JSON: {one_line(str(error))}") from None
    if not isinstance(found, dict):
        raise bad_request("the body needs to be an object")
    return found


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )
