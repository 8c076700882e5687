"""One turn: from a request to an answer that the server has and the client may see."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .. import clock, tracing
from ..errors import SettingError
from ..integrations.engines import from_openai
from ..messages import one_line
from ..metrics import instruments
from .dialects import Dialect
from .engines import Engines
from .joining import chains, following
from .live import Live, without_ids
from .options import Options, of_the_run
from .refusals import RefusedError, bad_request, unavailable
from .sessions import Session, Sessions
from .tokens import Sampled, TokenMode
from .turns import Turn

#: The columns of trajectories have 32 bits.
MAX_ID: Final = 2**31 - 1


class Asked(NamedTuple):
    """A request for a turn."""

    dialect: Dialect
    body: dict[str, Any]
    digest: str
    is_retry: bool
    agent: str | None


def digest_of(dialect: Dialect, raw: bytes, idempotency_key: str) -> str:
    """By which a request is known again."""
    head = f"{dialect.name}\0{idempotency_key}\0".encode()
    return hashlib.blake2b(head + raw, digest_size=16).hexdigest()


class Turns:
    """Makes turns."""

    def __init__(self, options: Options, engines: Engines, sessions: Sessions) -> None:
        self._options, self._engines, self._sessions = options, engines, sessions
        self._tokens = TokenMode(engines, options)

    async def answer(self, session: Session, asked: Asked, live: Live | None = None) -> Mapping[str, Any]:
        """The answer, as the engine's API has it. Raises RefusedError.

        live: gets what the engine samples now. If it has not begun in the end, the answer is that of a request before.
        """
        while asked.is_retry and (waiting := session.under_way.get(asked.digest)):
            await asyncio.wait({waiting})
            if not waiting.cancelled():
                return waiting.result()
        if session.asking >= self._options.max_turns:
            text = f"rollout {session.name} has {session.asking} requests under way, the most it may have"
            raise RefusedError(429, "too_many_turns", text)
        answered = session.under_way[asked.digest] = asyncio.get_running_loop().create_future()
        session.asking += 1
        session.cut_at = None
        try:
            answer = None
            if asked.is_retry:
                # What it got before: from here, from another gateway, or after its client had gone.
                await self._sessions.refresh(session)
                before = (turn.answer for turn in reversed(session.turns) if turn.digest == asked.digest)
                answer = next(before, None)
            answer = answer or await self._make(session, asked, live)
            answered.set_result(answer)
            session.cut_at = None  # whoever hears this is there
            return answer
        except (asyncio.CancelledError, ConnectionError):  # the latter of a stream that nobody reads
            session.cut_at = clock.now()
            raise
        finally:
            session.asking -= 1
            session.seen = clock.now()
            answered.cancel()
            if session.under_way.get(asked.digest) is answered:
                del session.under_way[asked.digest]

    async def _make(self, session: Session, asked: Asked, live: Live | None) -> Mapping[str, Any]:
        since = tracing.now()
        engine, mode = await self._engines.know(session), self._options.mode
        model = self._options.model or self._engines.model or "policy"
        request = of_the_run(_read(asked), self._options, model)
        messages = request.get("messages")
        at = chains(messages, request.get("tools"), asked.agent) if messages is not None else []
        takes_tokens = live is None and (mode == "tokens" or (mode == "auto" and engine.renders))
        # How many messages there are up to the last one of the assistant, and with it; 0 if there is none.
        said = enumerate(messages or (), 1)
        answered = max((number for number, each in said if each.get("role") == "assistant"), default=0)
        if answered and at[answered] not in session.ends and (takes_tokens or not session.turns):
            await self._sessions.refresh(session)  # another gateway may have made that answer
        if answered and not session.turns and not self._options.allow_history:
            raise RefusedError(
                409,
                "history_lost",
                f"rollout {session.name} has no turns at the run's server, and this request goes on from some: play it "
                f"from its start with the same key; if agents begin with examples, start the gateway with "
                f"--allow-history",
            )
        sampled = await self._sample(session, asked, request, at if takes_tokens else (), live)
        choices = sampled.choices
        if any(one.finish_reason == "abort" for one in choices):
            raise unavailable("the engine has broken off its answer: ask again")
        ends = [following(at[-1], choice["message"]) for choice in sampled.answer["choices"]] if at else []
        joins = _why_not_joined(session, at)
        turn = Turn(choices, asked.digest, ends, len(messages or ()) + 1, asked.agent, joins, sampled.answer)
        # Whoever cancels the request does not cancel what may have reached the server.
        await asyncio.shield(self._sessions.commit(session, turn))
        if live is not None:
            await live.finish()
        tracing.record(tracing.TURN, self._sessions.run, [session.ticket.group_id], since)
        instruments.GATEWAY_TURNS.inc()
        return sampled.answer

    async def _sample(
        self, session: Session, asked: Asked, request: dict[str, Any], at: Sequence[str], live: Live | None
    ) -> Sampled:
        """The answer as the client gets it. at: digests of the conversation, if its engine takes tokens."""
        try:
            if at:
                sampled = await self._tokens.sample(session, request, at)
            else:
                sampled = await self._chat(session, asked.dialect.engine_path, request, live)
            _check(sampled, "messages" in request)
            # The engine's own answer, an object for each token, does not wait for the server.
            return Sampled(without_ids(sampled.answer, bool(asked.body.get("logprobs"))), sampled.choices)
        except SettingError as error:  # an answer without token ids, or with another number of log-probs
            # Nothing is trained on that nobody knows the tokens of: the rollout fails.
            await self._sessions.fail(session, "failed", one_line(str(error)))
            text = f"rollout {session.name} has failed: {error}"
            raise RefusedError(502, "lost_tokens", text) from None
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            text = f"the engine's answer has another form than a completion: {type(error).__name__} {error}"
            raise unavailable(one_line(text)) from None

    async def _chat(
        self, session: Session, path: str, request: Mapping[str, Any], live: Live | None
    ) -> Sampled:
        """Ask with messages; the engine makes the tokens."""
        is_chat = "messages" in request
        own: dict[str, Any] = {"stream": False, "return_token_ids": True, "include_reasoning": True}
        wanted = request.get("logprobs")
        own["logprobs"] = True if is_chat else wanted if isinstance(wanted, int) else 0
        if live is None:
            answer, version = await self._engines.ask(session, path, {**request, **own})
        else:
            own |= {"stream": True, "stream_options": {"include_usage": True}}
            version = await self._engines.stream(session, path, {**request, **own}, live.take)
            answer = live.answer()
        counted = (answer.get("usage") or {}).get("completion_tokens")
        found = [
            len(choice["token_ids"]) for choice in answer["choices"] if choice.get("token_ids") is not None
        ]
        if counted is not None and len(found) == len(answer["choices"]) and sum(found) != counted:
            raise SettingError(
                f"the engine has sampled {counted} tokens and reports {sum(found)}: its parser of tools or reasoning "
                f"hides some; start it with another one"
            )
        choices = [from_openai(answer, version=version, choice=at) for at in range(len(answer["choices"]))]
        return Sampled(answer, choices)


def _check(sampled: Sampled, is_chat: bool) -> None:
    """Raise SettingError for what cannot be trained on, ValueError for what is no answer."""
    said = sampled.answer["choices"]
    if not said or len(said) != len(sampled.choices):
        raise ValueError(f"{len(said)} choices")
    if is_chat and not all(isinstance(choice.get("message"), dict) for choice in said):
        raise ValueError("a choice without a message")
    for one in sampled.choices:
        if one.log_probs is None:
            raise SettingError("the engine's answer has no log-probs: start it with log-probs allowed")
        if not np.isfinite(np.array(one.log_probs, "f8")).all():
            raise SettingError("the engine's answer has log-probs that are no finite numbers")
        ids = np.array(one.token_ids)
        if len(ids) and (ids.dtype.kind != "i" or ids.min() < 0 or ids.max() > MAX_ID):
            raise SettingError(f"the engine's answer has token ids that are not within 0..{MAX_ID}")


def _read(asked: Asked) -> dict[str, Any]:
    try:
        return asked.dialect.read(asked.body)
    except KeyError as error:
        raise bad_request(f"{asked.dialect.name}: {error.args[0]} is missing") from None
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise bad_request(f"{asked.dialect.name}: {one_line(str(error))}") from None


def _why_not_joined(session: Session, at: Sequence[str]) -> str:
    """Should the prompt begin another row: why. The same messages as before were written otherwise, or they differ."""
    known = next((session.ends[chain] for chain in reversed(at) if chain in session.ends), None)
    if known is None:
        return "history"
    return "length" if known.finish_reason == "length" else "template"
