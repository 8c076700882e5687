"""The addresses of the page, who may ask for them, and the readers that answer. Nothing here writes."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, TypeVar

from aiohttp import web

from ..algorithms import preset_names
from ..errors import SettingError, StreamadvError
from ..plugins import VIEWS, load_points
from ..run import Run, find_run
from ..run.kept import share_kept
from ..run.manifest import RunSettings
from ..status.kept import advantage_range, read_trajectories, why
from ..status.prompts import read_progress, tried
from ..status.seen import SeenGroup
from ..store.connection import Connection
from ..store.retry import RETRYABLE, SERVER_ERRORS, server_reason
from ..trajectory.schema import Trajectory
from .board import Board
from .book import PAGE, Book, Choice, Line, batches_of, facets, histogram
from .pages import FOLDER, environment
from .rollouts import (
    MAX_MEMBERS,
    batch_view,
    compute_again,
    find,
    panel_text,
    search,
    side_by_side,
    tokens_of,
)
from .texts import Ids, open_tokenizer

#: Seconds between two readings of the board, and until a server that says nothing is away.
READ_S: Final = 1.0
REPLY_S: Final = 10.0
#: Prompts in the table, those dropped most first.
MOST_PROMPTS: Final = 500
#: Seconds that a wrong password costs.
WRONG_S: Final = 0.5
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
#: Of a panel, whose markup is a package's and whose text is a rollout's: no script, no request, an origin of its own.
PANEL_HEADERS: Final = {
    **HEADERS,
    "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class AwayError(Exception):
    """The run cannot be read now; the text says why."""


class Desk:
    """A run that a thread of its own reads, with what it remembers."""

    def __init__(self, url: str, name: str, tokenizer: str | None) -> None:
        self._thread = ThreadPoolExecutor(1, "view")
        self._connection = Connection(url, reply_timeout=REPLY_S)
        self._name, self._tokenizer = name, tokenizer
        self._run: Run | None = None
        self._texts: Ids | None = None

    def _join(self) -> None:
        """Have the run as it is now. Raises SettingError while it does not exist."""
        if self._run is not None:
            keys = self._run.keys
            self._run.refresh()
            if self._run.keys == keys:
                return
        self._run = self.run = find_run(self._connection, self._name)
        self.book, self._texts = Book(self.run), None
        self.board = Board(self.run, self.book)

    @property
    def texts(self) -> Ids:
        """Text of tokens. Raises SettingError."""
        if self._texts is None:
            self._texts = open_tokenizer(self._tokenizer, self.run.manifest.tokenizer)
        return self._texts

    async def ask(self, question: Callable[[Desk], T]) -> T:
        """The answer. Raises AwayError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, question)

    def _answer(self, question: Callable[[Desk], T]) -> T:
        try:
            self._join()
            return question(self)
        except RETRYABLE as error:
            raise AwayError(server_reason(error).line(None)) from None
        except SettingError as error:  # the run is not there, or no longer
            self._run = None
            raise AwayError(str(error)) from None
        except (StreamadvError, *SERVER_ERRORS) as error:
            raise AwayError(str(error)) from None

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._connection.close()


class Screens:
    """Handlers of all addresses."""

    def __init__(self, url: str, run: str, tokenizer: str | None) -> None:
        self._name = run
        #: Of the board and the book, of what people open, and of batches that are computed again, which takes longest.
        self._now, self._rows, self._again = (Desk(url, run, tokenizer) for _ in range(3))
        self._pages, self._panels = environment(), load_points(VIEWS)
        self._reading: asyncio.Task[str] | None = None
        self._read_at = float("-inf")
        self._ends = asyncio.Event()

    async def on_shutdown(self, _: web.Application) -> None:
        self._ends.set()

    def close(self) -> None:
        for desk in (self._now, self._rows, self._again):
            desk.close()

    def _page(self, template: str, status: int = 200, **values: Any) -> web.Response:
        text = self._pages.get_template(template).render(run=self._name, **values)
        return web.Response(text=text, content_type="text/html", status=status)

    async def flow(self, request: web.Request) -> web.Response:
        return self._page("flow.html", title="Flow")

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The board, once a second, as server-sent events."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **HEADERS})
        await response.prepare(request)
        with suppress(ConnectionError):
            while not self._ends.is_set():
                try:
                    kind, text = "flow", await self._board()
                except AwayError as error:
                    kind, text = "away", str(error)
                await response.write(f"event: {kind}\ndata: {json.dumps(text)}\nretry: 1000\n\n".encode())
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ends.wait(), READ_S)
        return response

    async def _board(self) -> str:
        """The newest reading, which all who look share."""
        now = asyncio.get_running_loop().time()

        async def read() -> str:
            board = await self._now.ask(lambda desk: desk.board.read())
            return self._pages.get_template("board.html").render(run=self._name, **board)

        if self._reading is None or (self._reading.done() and now - self._read_at >= READ_S * 0.9):
            self._read_at = now
            self._reading = asyncio.ensure_future(read())
        return await asyncio.shield(self._reading)

    async def _lines(self) -> tuple[list[Line], bool]:
        """All groups there are, and whether older ones are still to be read."""
        return await self._now.ask(lambda desk: (desk.book.lines(), not desk.book.is_whole))

    async def groups(self, request: web.Request) -> web.Response:
        try:
            choice = Choice.of(request.query)
        except SettingError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        lines, reads_on = await self._lines()
        chosen = [line for line in lines if choice.has(line)]
        searched, rest = 0, len(chosen) - choice.skip
        if choice.text:
            after = chosen[choice.skip :]
            chosen, searched = await self._rows.ask(
                lambda desk: search(desk.run, after, choice.text, desk.texts)
            )
        means = [reward for line in lines for reward in line.known]
        pages = max(1, -(-len(chosen) // PAGE))
        page = min(choice.page, pages)
        return self._page(
            "groups.html",
            title="Groups",
            reads_on=reads_on,
            choice=choice,
            total=len(lines),
            count=len(chosen),
            searched=searched,
            unsearched=rest - searched if choice.text else 0,
            lines=chosen[(page - 1) * PAGE : page * PAGE],
            page=page,
            pages=pages,
            facets=facets(lines, choice),
            low=min(means, default=0.0),
            high=max(means, default=0.0),
            rewards=histogram([line.mean for line in chosen]),
            lengths=histogram([line.length for line in chosen]),
        )

    async def group(self, request: web.Request) -> web.Response:
        group_id, start = request.query.get("id", ""), _whole(request, "from", 0)
        lines, _ = await self._lines()

        def question(desk: Desk) -> dict[str, Any] | None:
            group = find(desk.run, lines, group_id)
            if group is None:
                return None
            side = side_by_side(desk.run, group, desk.texts, start)
            return {"group": group, "side": side, "why": why(group, desk.run.manifest)}

        if (found := await self._rows.ask(question)) is None:
            return self._gone(group_id)
        return self._page("group.html", title=group_id, start=start, most=MAX_MEMBERS, **found)

    async def tokens(self, request: web.Request) -> web.Response:
        group_id, index = _rollout_in(request)

        def look(_: Desk, group: SeenGroup, each: Trajectory) -> dict[str, Any]:
            indices = [member.rollout_index for member in group.members]
            return {"rollout": each, "advantages": advantage_range(each), "indices": indices}

        if (found := await self._of_rollout(request, look)) is None:
            return self._gone(group_id, index)
        found |= {"group_id": group_id, "index": index, "panels": sorted(self._panels)}
        return self._page("tokens.html", title=f"{group_id}/{index}", **found)

    async def _of_rollout(
        self, request: web.Request, look: Callable[[Desk, SeenGroup, Trajectory], T]
    ) -> T | None:
        """What `look` makes of the rollout that is asked for, and its group; None if it is not there."""
        group_id, index = _rollout_in(request)
        lines, _ = await self._lines()

        def question(desk: Desk) -> T | None:
            group = find(desk.run, lines, group_id)
            found = [] if group is None else read_trajectories(desk.run, group)
            each = next((each for each in found if each.rollout_index == index), None)
            return None if group is None or each is None else look(desk, group, each)

        return await self._rows.ask(question)

    async def panel(self, request: web.Request) -> web.Response:
        """What a package's panel makes of a rollout."""
        if (render := self._panels.get(request.query.get("name", ""))) is None:
            raise web.HTTPNotFound(text="no package has this panel")
        text = await self._of_rollout(request, lambda _, __, each: panel_text(render, each))
        return web.Response(text=text or "", content_type="text/html", headers=PANEL_HEADERS)

    async def columns(self, request: web.Request) -> web.Response:
        """The tokens of a rollout with all their columns, as JSON."""
        found = await self._of_rollout(request, lambda desk, _, each: tokens_of(each, desk.texts))
        if found is None:
            group_id, index = _rollout_in(request)
            raise web.HTTPNotFound(text=f"no rollout {index} of group {group_id!r}")
        response = web.json_response(found)
        response.enable_compression()
        return response

    async def batch(self, request: web.Request) -> web.Response:
        asked, chain = _whole(request, "k", -1), request.query.get("chain")
        lines, reads_on = await self._lines()

        def question(desk: Desk) -> dict[str, Any]:
            known = batches_of(lines)
            k = asked if asked >= 0 or not known else max(known)
            shown = batch_view(desk.run, lines, k, desk.texts) if k >= 0 else None
            rewards = [reward for line in lines for reward in line.known]
            low, high = min(rewards, default=0.0), max(rewards, default=0.0)
            share = share_kept(desk.run.manifest, "trained")
            kept = f"{100 * share:.3g} %" if share else ""
            return {"known": known, "batch": shown, "low": low, "high": high, "kept": kept}

        found = await self._rows.ask(question)
        again, k = None, found["batch"]["k"] if found["batch"] else -1
        if chain is not None and k >= 0:
            again = await self._again.ask(lambda desk: compute_again(desk.run, k, chain.strip()))
        found |= {"reads_on": reads_on, "again": again, "presets": preset_names(), "page": PAGE}
        return self._page("batch.html", title="Batch", **found)

    async def prompts(self, request: web.Request) -> web.Response:
        sources, seen = await self._rows.ask(
            lambda desk: (read_progress(desk.run, desk.run.now_ms()), tried(desk.run))
        )
        return self._page(
            "prompts.html", title="Prompts", sources=sources, seen=seen[:MOST_PROMPTS], count=len(seen)
        )

    async def settings(self, request: web.Request) -> web.Response:
        manifest = await self._rows.ask(lambda desk: desk.run.manifest)
        named = {"shards": len(manifest.keys.salts), **manifest.model_dump(mode="json")}
        lines = [
            (name, named[name], field.description, name == "shards" or name in manifest.fields)
            for name, field in RunSettings.model_fields.items()
        ]
        return self._page("settings.html", title="Settings", lines=lines)

    def _gone(self, group_id: str, index: int | None = None) -> web.Response:
        return self._page("gone.html", status=404, title="Gone", group_id=group_id, index=index)

    @web.middleware
    async def when_away(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """A page that says why nothing can be shown, and asks again."""
        try:
            return await handler(request)
        except AwayError as error:
            return self._page("away.html", status=503, title="Away", message=str(error))


def make_app(screens: Screens, password: str | None, hosts: frozenset[str] | None) -> web.Application:
    """The application. hosts: what a browser may call this machine; None: anything."""
    expected = b"Basic " + base64.b64encode(f"view:{password}".encode())

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if hosts is not None and (request.url.host or "") not in hosts:
                # Another name that leads here is how a page of somebody else would read this one.
                raise web.HTTPForbidden(text=f"this page is at {', '.join(sorted(hosts))}")
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if password is not None and not hmac.compare_digest(given, expected):
                await asyncio.sleep(WRONG_S if given else 0)
                asks = {"WWW-Authenticate": 'Basic realm="streamadv view", charset="UTF-8"'}
                raise web.HTTPUnauthorized(text="user view, and the password", headers=asks)
            response = await handler(request)
        except web.HTTPException as refusal:
            refusal.headers.update(HEADERS)
            raise
        if not response.prepared:
            response.headers.update(
                {name: value for name, value in HEADERS.items() if name not in response.headers}
            )
        return response

    app = web.Application(middlewares=[guard, screens.when_away])
    app.router.add_get("/", screens.flow)
    app.router.add_get("/events", screens.events)
    app.router.add_get("/groups", screens.groups)
    app.router.add_get("/group", screens.group)
    app.router.add_get("/tokens", screens.tokens)
    app.router.add_get("/tokens.json", screens.columns)
    app.router.add_get("/panel", screens.panel)
    app.router.add_get("/batch", screens.batch)
    app.router.add_get("/prompts", screens.prompts)
    app.router.add_get("/settings", screens.settings)
    app.router.add_static("/static", FOLDER / "static")

    app.on_shutdown.append(screens.on_shutdown)
    return app


def _rollout_in(request: web.Request) -> tuple[str, int]:
    """The group and the rollout that are asked for."""
    return request.query.get("id", ""), _whole(request, "index", 0)


def _whole(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "") or str(default)
    try:
        return int(text)
    except ValueError:
        raise web.HTTPBadRequest(text=f"{name} is {text[:60]!r}, needs a number") from None
