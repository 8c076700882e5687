"""For producers: hands a rollout out to an agent that speaks to the gateway. Needs no package."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from ..errors import SettingError, StreamadvError, TrajectoryError
from ..messages import one_line
from ..producer.base_group import BaseRollout
from ..producer.tickets import Ticket
from ..settings import run_name
from ..store.urls import PREFIX
from .keys import KEY_S, Keys

#: Seconds for the answer to `end`; a gateway that loads a long rollout takes some.
END_S: Final = 120.0
#: Tries of an `end` that the gateway does not answer, or answers with 503: the pauses between them double.
END_TRIES: Final = 6
_PAUSE_S: Final = 0.5


class GatewayError(StreamadvError):
    """The gateway has refused to end a rollout, or does not answer."""


class AgainError(Exception):
    """The same request may succeed later."""


@dataclass(frozen=True, slots=True)
class Access:
    """What the agent of one rollout is given, and how the rollout ends."""

    base_url: str
    """For SDKs of OpenAI; they ask below it."""
    api_key: str = field(repr=False)
    """For turns, and for nothing else."""
    close_key: str = field(repr=False)
    """Ends the rollout: keep it from the agent."""
    _rollout: BaseRollout | None = field(default=None, repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which agents find an engine: those of the SDKs of OpenAI and of Anthropic."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
        }

    @property
    def end_url(self) -> str:
        """Where a POST with the close key ends the rollout."""
        return f"{self.base_url.removesuffix('/v1')}/end"

    async def end(
        self,
        reward: float | None = None,
        *,
        rewards: Mapping[str, float] | None = None,
        reward_later: bool = False,
        status: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        fail: str | None = None,
        reason: str | None = None,
        cancel: bool = False,
    ) -> dict[str, Any]:
        """End the rollout once; a second call hears what became of the first. Returns the gateway's answer.

        Args:
            reward, rewards, reward_later, status, metadata: as of `rollout.push`, for all turns that came.
            fail: in one line, why there is no trajectory. reason: failed or aborted.
            cancel: nobody wants the rollout any more.

        Raises GatewayError.
        """
        said: dict[str, Any] = {
            "reward": reward, "rewards": rewards, "status": status, "fail": fail, "reason": reason,
            "reward_later": reward_later or None, "cancel": cancel or None,
        }  # fmt: skip
        said = {name: value for name, value in said.items() if value is not None}
        ticket = self._rollout.ticket if self._rollout is not None else None
        shared = {  # what the key leaves out of the ticket
            "data_source": ticket.data_source if ticket else None,
            "metadata": {**(ticket.metadata if ticket else {}), **(metadata or {})},
        }
        said |= {name: value for name, value in shared.items() if value}
        try:
            body = json.dumps(said, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise TrajectoryError(
                f"end: {error}: reward, rewards and metadata need finite numbers and text"
            ) from None
        for number in itertools.count(1):
            try:
                answer: dict[str, Any] = await asyncio.to_thread(post, self.end_url, self.close_key, body)
                break
            except AgainError as error:
                if number == END_TRIES:
                    raise GatewayError(str(error)) from None
                await asyncio.sleep(_PAUSE_S * 2 ** (number - 1))
        if self._rollout is not None:
            self._rollout._slots.ended.add(self._rollout.rollout_index)
        return answer


class Gateway:
    """Where the gateway is, for a producer that hands rollouts out.

    `agent = gateway.access(rollout)`, inside a function that `group.run` plays: the agent gets `agent.base_url` and
    `agent.api_key`, and `await agent.end(reward=...)` ends the rollout. Give the group a deadline of minutes
    (`producer.group(8, deadline_s=600)`): each turn moves it on, and nobody waits longer for an agent that hangs.

    Args:
        url: of the gateway, as the agents reach it; default STREAMADV_GATEWAY_URL, which `streamadv up --gateway` sets.
        run: name of the run; default STREAMADV_RUN.
        keys: default those of STREAMADV_GATEWAY_SECRET_FILE.
    """

    def __init__(self, url: str | None = None, *, run: str | None = None, keys: Keys | None = None) -> None:
        self.url = url_of(url)
        self._run, self._keys = run_name(run), keys or Keys.from_environment()

    def access(self, rollout: BaseRollout, ttl_s: float = KEY_S) -> Access:
        """Hand a rollout out: its slot stays open until `Access.end`, or the group's deadline."""
        return self._access(rollout.ticket, ttl_s, rollout)

    def _access(self, ticket: Ticket, ttl_s: float = KEY_S, rollout: BaseRollout | None = None) -> Access:
        """Without its rollout in a process that has no producer."""
        ticket.hand_out()
        place = f"{self.url}/g/{quote(ticket.group_id, safe='')}/{ticket.rollout_index}/v1"
        turn, end = (self._keys.sign(purpose, self._run, ticket, ttl_s) for purpose in ("turn", "end"))
        return Access(place, turn, end, rollout)


def url_of(url: str | None) -> str:
    """Of the gateway, as given or as STREAMADV_GATEWAY_URL says. Raises SettingError if neither does."""
    if not (found := url or os.environ.get(f"{PREFIX}GATEWAY_URL")):
        raise SettingError(f"the gateway's URL is not given: give it, or set {PREFIX}GATEWAY_URL")
    return found.rstrip("/").removesuffix("/v1")


def post(url: str, key: str | None, body: bytes) -> Any:
    """The answer to a POST of JSON. Raises GatewayError, and AgainError where the same request may succeed later."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=END_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        text = f"{url}: {error.code} {one_line(error.read(2000).decode(errors='replace'))}"
        if error.code in (429, 503):
            raise AgainError(text) from None
        raise GatewayError(text) from None
    except (OSError, ValueError) as error:
        raise AgainError(f"{url}: {type(error).__name__} {one_line(str(error))}") from None
