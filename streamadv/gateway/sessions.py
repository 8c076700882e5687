"""The rollouts that this gateway plays: a cache of what the server keeps of each, and how each ends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .. import clock
from ..errors import StreamadvError
from ..integrations.engines import Episode
from ..messages import log_fields, one_line
from ..metrics import instruments
from ..producer.async_producer import AsyncProducer
from ..producer.base_group import Slots
from ..producer.tickets import Ticket
from ..trajectory.members import STEP
from ..trajectory.schema import MAX_ROWS, MAX_STEPS
from .options import Options
from .refusals import RefusedError, bad_request, over
from .turns import Store, Turn, pack, unpack

if TYPE_CHECKING:
    from .engines import Engine  # needs aiohttp, rollouts do not

logger = logging.getLogger(__name__)

#: Bytes that a trajectory has for a token: id, mask, log-prob, version.
TOKEN_BYTES: Final = 13
#: Bytes that are left for a trajectory's metadata.
HEADER_BYTES: Final = 512
#: Seconds that a turn waits for the server; then the client asks again.
STORE_S: Final = 30.0
#: How many rollouts that have ended are remembered, for clients that ask again; of the others the server knows that
#: they have ended.
REMEMBERED: Final = 2048
SWEEP_S: Final = 0.5


class End(NamedTuple):
    """Where the answer of a turn ends."""

    row: int
    tokens: int
    finish_reason: str | None


@dataclass(eq=False)
class Session:
    """One open rollout."""

    name: str
    ticket: Ticket
    episode: Episode = field(default_factory=Episode)
    turns: list[Turn] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)  # these, as the server has them
    ends: dict[str, End] = field(default_factory=dict)  # by chain
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # of what changes its turns
    under_way: dict[str, asyncio.Future[Mapping[str, Any]]] = field(default_factory=dict)  # digest -> answer
    asking: int = 0
    engine: Engine | None = None
    seen: float = field(default_factory=clock.now)
    touched: float = -inf  # when its group's deadline was moved on
    cut_at: float | None = None  # a client has gone in the middle of an answer
    over: str | None = None

    def add(self, turn: Turn, record: bytes) -> None:
        """A turn that the server has."""
        before = len(self.episode.breaks)
        for number, completion in enumerate(turn.choices):
            row = self.episode.add(completion, agent=turn.agent)
            if number < len(turn.chains):
                end = End(row, len(self.episode.rows[row]), completion.finish_reason)
                self.ends[turn.chains[number]] = end
        self.turns.append(replace(turn, choices=()))  # the rows have these
        self.kept.append(record)
        if len(self.episode.breaks) > before:
            instruments.GATEWAY_BREAKS.labels(turn.joins).inc()


class Sessions:
    """All of them, by '<group id>/<rollout index>'."""

    def __init__(self, producer: AsyncProducer, options: Options, release: Callable[[Session], None]) -> None:
        self._producer, self._options, self._release = producer, options, release
        self.run = producer.run
        self._store = Store(producer, options.idle_s)
        self._open: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Task[Session]] = {}
        self._over: dict[str, tuple[str, dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def words(self) -> str:
        """How many are open, and seconds since the last turn of the one that has been silent for longest."""
        silent_s = max((clock.now() - one.seen for one in self._open.values() if not one.asking), default=0.0)
        return f"{len(self._open)} {round(silent_s)}"

    async def get(self, ticket: Ticket) -> Session:
        """The open session of a ticket, restored if another gateway had it. Raises RefusedError."""
        name = f"{ticket.group_id}/{ticket.rollout_index}"
        if name in self._over:
            raise over(name, self._over[name][0])
        is_new = name not in self._open and name not in self._opening
        if is_new and len(self._open) + len(self._opening) >= self._options.max_open:
            text = f"this gateway plays {self._options.max_open} rollouts, the most it may"
            raise RefusedError(429, "too_many_rollouts", text)
        session = await self._opened(name, ticket)
        if self._producer._logic.membership.is_in_vain(session.ticket):
            await self.fail(session, "aborted", "it is too stale to be trained on, or the run has ended")
            raise over(name, session.over or "")
        session.seen = clock.now()
        return session

    async def _opened(self, name: str, ticket: Ticket) -> Session:
        """The one session of a rollout, for all who ask for it at once."""
        if name in self._open:
            return self._open[name]
        task = self._opening.get(name)
        if task is None:
            task = self._opening[name] = asyncio.create_task(self._restore(name, ticket))
            task.add_done_callback(lambda _: self._opening.pop(name, None))
        return await asyncio.shield(task)

    async def _restore(self, name: str, ticket: Ticket) -> Session:
        session = Session(name, ticket)
        await self._catch_up(session)
        self._open[name] = session
        instruments.GATEWAY_OPEN.set(len(self._open))
        return session

    async def refresh(self, session: Session) -> None:
        """Read what other gateways have appended. Raises RefusedError if the slot has ended."""
        async with session.lock:
            if session.over is not None:
                raise over(session.name, session.over)
            await self._catch_up(session)

    async def _catch_up(self, session: Session) -> None:
        reply = await self._waiting(self._store.read(session.ticket, len(session.kept)))
        if reply.state == "ended":
            raise self._has_ended(session)
        if reply.state == "turns":
            source, shared, *records = reply.rest
            said = json.loads(shared) if shared else {}
            known = {"data_source": source.decode(errors="replace") or None, "metadata": {}} | said
            session.ticket = replace(
                session.ticket, **{name: known[name] for name in ("data_source", "metadata")}
            )
            self._add_all(session, records)

    def _add_all(self, session: Session, records: list[bytes]) -> None:
        for record in records:
            session.add(unpack(record, session.episode), record)

    async def commit(self, session: Session, turn: Turn) -> None:
        """Append a turn; afterwards its answer may leave. Raises RefusedError."""
        async with session.lock:
            while True:
                if session.over is not None:
                    raise over(session.name, session.over)
                self._check_size(session, turn)
                record, known = pack(turn, session.episode), len(session.kept)
                reply = await self._waiting(self._store.append(session.ticket, known, [record]))
                if reply.state == "ok":
                    session.touched = clock.now()
                    session.add(turn, record)
                    return
                if reply.state == "behind":
                    self._add_all(session, list(reply.rest))
                elif reply.state == "lost":  # what agents have seen is here: the server gets it again
                    number = int(reply.rest[0])
                    await self._waiting(self._store.append(session.ticket, number, session.kept[number:]))
                elif reply.state == "large":
                    raise self._too_large(session, int(reply.rest[0]))
                else:
                    raise self._has_ended(session)

    def _check_size(self, session: Session, turn: Turn) -> None:
        """Refuse what could not be pushed at the end. Raises RefusedError."""
        episode, prompt = session.episode, turn.choices[0].prompt_ids
        row = episode._row_of(prompt, turn.agent)
        new_rows = len(turn.choices) - (row is not None)
        tokens = sum(map(len, episode.rows)) + sum(len(one.token_ids) for one in turn.choices)
        tokens += new_rows * len(prompt) + (len(prompt) - len(episode.rows[row]) if row is not None else 0)
        steps = episode.turns + len(turn.choices)
        size = tokens * TOKEN_BYTES + steps * STEP.itemsize + HEADER_BYTES
        if size > self._store.most_bytes:
            raise self._too_large(session, size)
        if len(episode.rows) + new_rows > MAX_ROWS or steps > MAX_STEPS:
            text = (
                f"rollout {session.name} would have {len(episode.rows) + new_rows} rows and {steps} turns, it may have "
                f"{MAX_ROWS} and {MAX_STEPS}: end it with status truncated"
            )
            raise RefusedError(413, "rollout_too_large", text)

    def _too_large(self, session: Session, size: int) -> RefusedError:
        return RefusedError(
            413,
            "rollout_too_large",
            f"rollout {session.name} would have {size} bytes, max_trajectory_bytes is {self._store.most_bytes}: end it "
            f"with status truncated, or raise max_trajectory_bytes for the run",
        )

    def _has_ended(self, session: Session) -> RefusedError:
        self._forget(session, "it was ended before")
        return over(session.name, session.over or "")

    async def end(self, ticket: Ticket, said: Mapping[str, Any]) -> dict[str, Any]:
        """End a rollout once, as its launcher says; again: what became of it. Raises RefusedError."""
        name = f"{ticket.group_id}/{ticket.rollout_index}"
        try:
            if name in self._over:
                return self._over[name][1]
            session = await self._opened(name, ticket)
            async with session.lock:
                if session.over is not None:
                    return self._over[name][1]
                await self._catch_up(session)
                return await self._end(session, said)
        except RefusedError as error:
            if error.code != "rollout_over" or name not in self._over:
                raise
            return self._over[name][1]

    async def _end(self, session: Session, said: Mapping[str, Any]) -> dict[str, Any]:
        source = said.get("data_source") or session.ticket.data_source
        metadata = {**session.ticket.metadata, **(said.get("metadata") or {})}
        ticket = replace(session.ticket, data_source=source, metadata=metadata)
        rollout = self._producer.rollout(ticket)
        answer: dict[str, Any] = {"turns": len(session.turns), "rows": len(session.episode.rows)}
        answer["breaks"] = session.episode.breaks
        if said.get("cancel"):
            slots = Slots.of_received(self._producer._logic, ticket)
            codes = (await self._producer._drive(slots.cancel(None, [ticket.rollout_index]))).codes
            answer |= {"ended": "cancelled", "result": codes[0]}
        elif "fail" in said or not session.episode.turns:
            detail = one_line(str(said.get("fail") or "no turn has come to the gateway"))
            code = await rollout.fail(said.get("reason", "failed"), detail)
            answer |= {"ended": "failed", "result": code, "detail": detail}
        else:
            code = await rollout.push(**_record(session.episode, said))
            answer |= {"ended": "pushed", "result": code}
            instruments.GATEWAY_ROWS.inc(len(session.episode.rows))
        self._forget(session, str(answer["ended"]), answer)
        return answer

    async def fail(self, session: Session, reason: str, detail: str) -> None:
        """End a rollout that cannot go on."""
        async with session.lock:
            if session.over is not None:
                return
            result = "duplicate"
            with suppress(StreamadvError):  # the run has ended: nobody waits for the slot
                result = await self._producer.rollout(session.ticket).fail(reason, detail)
            answer = {"ended": "failed", "result": result, "detail": detail}
            self._forget(session, f"{reason}: {detail}", answer)

    def _forget(self, session: Session, why: str, answer: dict[str, Any] | None = None) -> None:
        session.over = why
        self._open.pop(session.name, None)
        self._release(session)
        self._over[session.name] = (why, answer or {"ended": "before", "result": "duplicate"})
        while len(self._over) > REMEMBERED:
            self._over.pop(next(iter(self._over)))
        instruments.GATEWAY_OPEN.set(len(self._open))

    async def _waiting(self, call: Any) -> Any:
        """The reply of the server, or a refusal that a client repeats."""
        try:
            async with asyncio.timeout(STORE_S):
                return await call
        except TimeoutError:
            raise RefusedError(503, "store_unavailable", "the run's server does not answer") from None

    async def sweep(self) -> None:
        """Until it is cancelled: end what clients have left, keep slow turns open, forget what is idle."""
        idle_s = self._options.idle_s
        while True:
            await asyncio.sleep(SWEEP_S)
            for session in list(self._open.values()):
                now = clock.now()
                try:
                    if session.asking:
                        if now - session.touched > idle_s / 4:
                            session.touched = now
                            await self._producer.touch(session.ticket.group_id, idle_s)
                    elif session.cut_at is not None and now - session.cut_at > self._options.grace_s:
                        await self.fail(session, "aborted", "its client went away in the middle of an answer")
                    elif now - session.seen > idle_s:
                        # The group's deadline ends it, if no other gateway plays it.
                        self._open.pop(session.name, None)
                        self._release(session)
                except Exception as error:
                    fields = log_fields("rollout_not_looked_after", role="gateway")
                    logger.warning("rollout %s: %s", session.name, error, extra=fields)


def _record(episode: Episode, said: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `rollout.push`. Raises RefusedError."""
    record = episode.record()
    rewards = said.get("turn_rewards")
    if rewards is not None:
        if not isinstance(rewards, list) or len(rewards) != len(record["steps"]):
            raise bad_request(
                f"turn_rewards: needs a list of {len(record['steps'])} numbers, one for each turn"
            )
        record["steps"] = [
            {**step, "reward": value} for step, value in zip(record["steps"], rewards, strict=True)
        ]
    record |= {name: said[name] for name in ("reward", "rewards", "status") if name in said}
    return record | ({"reward_later": True} if said.get("reward_later") else {})
