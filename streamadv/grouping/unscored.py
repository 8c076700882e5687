"""What a scoring function receives of a trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..trajectory.checked import StepSpan
from ..trajectory.columns import Array
from ..trajectory.payload import Payload
from ..trajectory.reference import Reference
from ..trajectory.schema import Status


class UnscoredTrajectory:
    """A trajectory that waits for a score; read-only.

    Its metadata are what the producer pushed or gave to the group: prompt, answer, what a judge needs besides tokens.
    """

    __slots__ = ("_payload", "_reference")

    def __init__(self, reference: Reference, payload: Payload) -> None:
        self._reference = reference
        self._payload = payload

    def __repr__(self) -> str:
        lengths = " + ".join(map(str, self.row_lengths))
        return f"<UnscoredTrajectory {self.name}: {self.status}, {lengths} tokens>"

    @property
    def name(self) -> str:
        """group_id/rollout_index."""
        return f"{self.group_id}/{self.rollout_index}"

    @property
    def group_id(self) -> str:
        return self._reference.group_id

    @property
    def rollout_index(self) -> int:
        return self._reference.rollout_index

    @property
    def group_size(self) -> int:
        return self._payload.header.group_size

    @property
    def status(self) -> Status:
        """completed or truncated; others are not scored."""
        return self._reference.status

    @property
    def data_source(self) -> str | None:
        return self._reference.data_source

    @property
    def metadata(self) -> Mapping[str, Any]:
        """As pushed."""
        return self._payload.header.metadata

    @property
    def model_version(self) -> int | tuple[int, int] | None:
        """Of the policy that played it, or the first and the last one."""
        return self._payload.header.model_version

    @property
    def columns(self) -> Mapping[str, Array]:
        """The columns that the scorer reads: an array each, [tokens], its rows end to end, read-only."""
        return self._payload.columns

    @property
    def row_lengths(self) -> Sequence[int]:
        """Tokens of each row."""
        return self._reference.row_lengths

    @property
    def agents(self) -> Sequence[str | None]:
        """Who wrote each row; empty if no row names an agent."""
        return self._payload.header.agents

    @property
    def steps(self) -> Sequence[StepSpan]:
        """Turns in time order: row, start, end (tokens of the row), reward, state_key."""
        return self._reference.steps

    @property
    def reward(self) -> float | None:
        """The sum of what earlier scorers gave; None before the first."""
        return self._reference.reward

    @property
    def rewards(self) -> Mapping[str, float]:
        """Named rewards that were pushed, or that earlier scorers gave."""
        return self._reference.rewards
