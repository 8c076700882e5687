"""The turns of one rollout, joined to the rows of a trajectory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import numpy as np

from ...errors import TrajectoryError
from ...messages import log_fields
from ...trajectory.columns import KNOWN_COLUMNS
from .completion import ABORT, LENGTH, Completion

logger = logging.getLogger(__name__)

#: Version of tokens that no policy has written.
NOT_SAMPLED: Final = -1
_breaks_seen = count()


@dataclass(slots=True)
class _Row:
    """Tokens of one row. All lists have one length."""

    agent: str | None
    input_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def append(
        self, ids: Sequence[int], mask: int, log_probs: Sequence[float] | None, version: int | Sequence[int]
    ) -> None:
        self.input_ids += ids
        self.response_mask += [mask] * len(ids)
        self.rollout_log_probs += [0.0] * len(ids) if log_probs is None else log_probs
        self.versions += [version] * len(ids) if isinstance(version, int) else version

    def is_start_of(self, ids: list[int]) -> bool:
        return ids[: len(self.input_ids)] == self.input_ids


class Episode:
    """What one rollout has read and written, turn by turn, for `rollout.push(**episode.record(), reward=...)`.

    Every sampled token is trained on once, with the engine's own id and log-prob; all others have mask 0. Two ways:

    - Token by token: `Episode(prompt_ids)`, ask the engine with `tokens`, `add` its completion, `observe` what a tool
      or the environment has said, ask again.
    - Chats, where the engine makes the tokens of its prompt from messages: `Episode()` and `add` each completion. What
      a prompt has beyond the tokens so far was said by tools or users.

    A prompt that does not begin with all tokens of a row, because a chat template has changed earlier turns, a context
    was compacted or another agent speaks, begins another row: `breaks` says where, and the log says so once.

    Not thread-safe; an episode belongs to one rollout.
    """

    def __init__(self, prompt_ids: Sequence[int] = (), *, agent: str | None = None) -> None:
        """prompt_ids: the first prompt, if the caller makes the tokens. agent: name of the row's author."""
        self.breaks: list[str] = []
        """One line for each row that was begun because a prompt did not continue the tokens so far."""
        self._rows: list[_Row] = []
        self._steps: list[dict[str, Any]] = []
        self._versions: list[int | None] = []  # of the completions
        self._has_log_probs: set[bool] = set()
        self._finish_reason: str | None = None
        if len(prompt_ids):
            self._begin_row(agent)
            self.observe(prompt_ids)

    @property
    def tokens(self) -> list[int]:
        """The tokens of the latest row so far: what to ask the engine with."""
        return list(self._rows[-1].input_ids) if self._rows else []

    @property
    def rows(self) -> list[list[int]]:
        """The tokens of each row so far; not copies."""
        return [row.input_ids for row in self._rows]

    @property
    def turns(self) -> int:
        """Completions that have brought tokens."""
        return len(self._steps)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy has not written, to the latest row."""
        row = self._rows[-1] if self._rows else self._begin_row(None)
        row.append(_listed(token_ids), 0, None, NOT_SAMPLED)

    def add(
        self,
        completion: Completion,
        *,
        reward: float = 0.0,
        state_key: str | None = None,
        agent: str | None = None,
    ) -> int:
        """Append what an engine has sampled, and before it what its prompt has beyond the tokens so far.

        Returns the number of the row that it stands in.

        Args:
            reward: of this turn, for estimators of steps.
            state_key: hash of the observation it answers, for GiGPO.
            agent: name of its author; only rows of this author are continued.
        """
        prompt = _listed(completion.prompt_ids)
        number = self._row_of(prompt, agent)
        if number is None:
            mine = [number for number, row in enumerate(self._rows) if row.agent == agent]
            if mine:
                self._note_break(prompt, mine[-1])
            number = len(self._rows)
            self._begin_row(agent)
        row = self._rows[number]
        row.append(prompt[len(row.input_ids) :], 0, None, NOT_SAMPLED)
        sampled, start = _listed(completion.token_ids), len(row.input_ids)
        log_probs = completion.log_probs
        versions = completion.version or 0 if completion.versions is None else list(completion.versions)
        row.append(sampled, 1, None if log_probs is None else list(log_probs), versions)
        self._finish_reason = completion.finish_reason
        if sampled:
            self._has_log_probs.add(log_probs is not None)
            self._versions += (
                [completion.version] if completion.versions is None else set(completion.versions)
            )
            step = {"start": start, "end": len(row.input_ids), "reward": reward, "state_key": state_key}
            self._steps.append({"row": number, **step} if number else step)
        return number

    def record(self, **fields: Any) -> dict[str, Any]:
        """The arguments of `rollout.push`, but for the reward: columns (or `rows`), `steps`, `model_version`, `status`.

        input_ids int32, response_mask uint8, rollout_log_probs float32 and versions int32 (-1 where nothing was
        sampled), each [T]; the last two only if the completions had them. `status` is truncated if the last completion
        ran into its length, aborted if the engine broke it off.

        Args:
            fields: further arguments of `push`, or others in place of these.

        Raises TrajectoryError if nothing was sampled, or only a part of the completions has log-probs.
        """
        if not self._steps:
            raise TrajectoryError(
                "the episode has no sampled tokens: add a completion, or call rollout.fail()"
            )
        if len(self._has_log_probs) > 1:
            raise TrajectoryError(
                "rollout_log_probs: some completions have none: ask for them in every request"
            )
        made: dict[str, Any] = {"steps": self._steps}
        columns = ["input_ids", "response_mask"]
        if self._has_log_probs == {True}:
            columns.append("rollout_log_probs")
        known = [version for version in self._versions if version is not None]
        if len(known) == len(self._versions):
            columns.append("versions")
            made["model_version"] = (min(known), max(known))
        statuses = {LENGTH: "truncated", ABORT: "aborted"}
        if self._finish_reason in statuses:
            made["status"] = statuses[self._finish_reason]
        rows = [
            {name: np.array(getattr(row, name), KNOWN_COLUMNS[name]) for name in columns}
            for row in self._rows
        ]
        if len(rows) == 1 and self._rows[0].agent is None:
            made |= rows[0]
        else:
            made["rows"] = [
                made_of | {"agent": row.agent} for made_of, row in zip(rows, self._rows, strict=True)
            ]
        return made | fields

    def _row_of(self, prompt_ids: Sequence[int], agent: str | None = None) -> int | None:
        """The longest row of this author that such a prompt continues; None if it would begin another one."""
        prompt = _listed(prompt_ids)
        mine = [number for number, row in enumerate(self._rows) if row.agent == agent]
        continued = [number for number in mine if self._rows[number].is_start_of(prompt)]
        return max(continued, key=lambda number: len(self._rows[number].input_ids), default=None)

    def _begin_row(self, agent: str | None) -> _Row:
        self._rows.append(_Row(agent))
        return self._rows[-1]

    def _note_break(self, prompt: list[int], number: int) -> None:
        before = self._rows[number].input_ids
        pairs = zip(before, prompt, strict=False)
        at = next((at for at, (mine, its) in enumerate(pairs) if mine != its), min(len(before), len(prompt)))
        text = (
            f"turn {self.turns}: its prompt of {len(prompt)} tokens leaves the {len(before)} tokens of row {number} at "
            f"token {at}, so row {len(self._rows)} begins"
        )
        self.breaks.append(text)
        if next(_breaks_seen):  # said once in this process: there may be as many as turns
            return
        logger.warning(
            "%s, which repeats the prompt; if no context was compacted, the chat template changes earlier turns: ask "
            "with token ids, or keep the template from it (said once; Episode.breaks has all)",
            text,
            extra=log_fields("episode_broken", role="producer"),
        )


def _listed(ids: Sequence[int]) -> list[int]:
    """Token ids as a list: also of arrays and tensors."""
    found: list[int] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return found
