"""A turn as the server keeps it, and the calls that append and read turns (`lua/group/turn.lua`).

A turn is what an engine has answered to one request, with all its choices. Its prompt is kept as what it has beyond a
row of the turns before, so that the turns of a rollout take about as many bytes as its trajectory.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import WireError
from ..integrations.engines import Completion, Episode
from ..producer.async_producer import AsyncProducer
from ..producer.requests import Steps
from ..producer.tickets import GroupSpec, Ticket
from ..store.scripts import ScriptCall, script_call

_LENGTH: Final = struct.Struct("<I")
#: Rows that a prompt is compared with, the latest ones.
ROWS: Final = 8
#: Turns that one call appends: a script may take so many arguments.
MOST_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of an engine, and what it answered."""

    choices: Sequence[Completion]
    """All have the same prompt."""
    digest: str = ""
    """Of the request, by which a retry is known."""
    chains: Sequence[str] = ()
    """Of each choice: the digest of the conversation up to its answer."""
    messages: int = 0
    """Of that conversation."""
    agent: str | None = None
    joins: str = "history"
    """If it begins another row, why: see `metrics.instruments.GATEWAY_CAUSES`."""
    answer: Mapping[str, Any] = field(default_factory=dict)
    """What the client was sent, without ids."""


def pack(turn: Turn, episode: Episode) -> bytes:
    """A turn in bytes. episode: of the turns before."""
    prompt = list(turn.choices[0].prompt_ids)
    row, kept = nearest_row(episode.rows, prompt)
    choices = []
    for one in turn.choices:
        spans = None  # [[version, tokens in a row that have it] ...]
        if one.versions is not None:
            spans = [[version, len(list(same))] for version, same in groupby(one.versions)]
        choices.append([len(one.token_ids), one.log_probs is not None, one.finish_reason, one.version, spans])
    head = {
        "row": row, "kept": kept, "prompt": len(prompt) - kept, "choices": choices, "digest": turn.digest,
        "chains": list(turn.chains), "messages": turn.messages, "agent": turn.agent,
        "joins": turn.joins,
    }  # fmt: skip
    header = json.dumps(head, separators=(",", ":")).encode()
    parts = [_LENGTH.pack(len(header)), header, np.array(prompt[kept:], "<i4").tobytes()]
    for one in turn.choices:
        parts.append(np.array(one.token_ids, "<i4").tobytes())
        if one.log_probs is not None:
            parts.append(np.array(one.log_probs, "<f4").tobytes())
    return b"".join([*parts, zlib.compress(json.dumps(turn.answer).encode(), 1)])


def unpack(data: bytes, episode: Episode) -> Turn:
    """The turn that `pack` packed. episode: of the turns before. Raises WireError."""

    def numbers(kind: str, count: int) -> list[Any]:
        found: list[Any] = np.frombuffer(reader.read(4 * count), kind, count).tolist()
        return found

    try:
        reader = BytesIO(data)
        (length,) = _LENGTH.unpack(reader.read(_LENGTH.size))
        head = json.loads(reader.read(length))
        before = [] if head["row"] is None else episode.rows[head["row"]][: head["kept"]]
        prompt = before + numbers("<i4", head["prompt"])
        choices = []
        for count, has_log_probs, finish_reason, version, spans in head["choices"]:
            ids = numbers("<i4", count)
            log_probs = numbers("<f4", count) if has_log_probs else None
            versions = None if spans is None else [number for number, many in spans for _ in range(many)]
            choices.append(Completion(prompt, ids, log_probs, finish_reason, version, versions=versions))
        answer = json.loads(zlib.decompress(reader.read()))
        return Turn(
            choices, head["digest"], head["chains"], head["messages"], head["agent"], head["joins"], answer
        )
    except (ValueError, KeyError, TypeError, IndexError, zlib.error, struct.error) as error:
        raise WireError(f"a turn of the rollout cannot be read: {type(error).__name__} {error}") from None


def nearest_row(rows: Sequence[Sequence[int]], prompt: Sequence[int]) -> tuple[int | None, int]:
    """Which of the latest rows the prompt has most tokens in common with from the start on, and how many."""
    best: tuple[int | None, int] = (None, 0)
    for number in range(max(0, len(rows) - ROWS), len(rows)):
        common = _common(rows[number], prompt)
        if common > best[1]:
            best = (number, common)
    return best


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:  # alike up to `low`, not up to `high`
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Reply(NamedTuple):
    """What `turn.lua` says."""

    state: str
    """ok, behind, lost, large, ended, turns, none."""
    rest: Sequence[Any]


class Store:
    """The turns of rollouts on the run's servers."""

    def __init__(self, producer: AsyncProducer, deadline_s: float) -> None:
        """deadline_s: to which a turn moves the deadline of its group."""
        self._producer = producer
        self._deadline_ms = round(deadline_s * 1000)

    @property
    def most_bytes(self) -> int:
        """Of a rollout, by the run's settings."""
        return self._producer._logic.membership.manifest.max_trajectory_bytes

    async def read(self, ticket: Ticket, known: int) -> Reply:
        """Turns from number `known` on: 'turns' (data source, what the group shares, turn ...), 'none' or 'ended'."""
        return await self._producer._drive(self._call(ticket, known, []))

    async def append(self, ticket: Ticket, known: int, turns: Sequence[bytes]) -> Reply:
        """Append turns to the first `known` ones: 'ok', 'behind', 'lost', 'large' or 'ended'."""
        for start in range(0, len(turns), MOST_AT_ONCE):
            part = turns[start : start + MOST_AT_ONCE]
            reply = await self._producer._drive(self._call(ticket, known + start, part))
            if reply.state != "ok":
                return reply
        return Reply("ok", ())

    async def share(self, group_id: str, text: str) -> None:
        """Note what the rollouts of a group share beyond their keys, in JSON."""
        keys = self._producer._logic.membership.keys_of(group_id)

        def share() -> Steps[Any]:
            return (yield script_call("share", keys, [text], group=group_id))

        await self._producer._drive(share())

    def _call(self, ticket: Ticket, known: int, turns: Sequence[bytes]) -> Steps[Reply]:
        logic = self._producer._logic
        keys, most = logic.membership.keys_of(ticket.group_id), self.most_bytes

        def call(arguments: list[Any]) -> ScriptCall:
            own = [ticket.rollout_index, known, most, self._deadline_ms, *turns]
            return script_call("turn", keys, [*arguments, *own], group=ticket.group_id)

        reply = yield from logic.pushes.call_group_script(GroupSpec.of(ticket), call)
        return Reply(reply[0].decode(), reply[1:])
