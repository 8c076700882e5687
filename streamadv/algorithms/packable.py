"""What `pack` reads of a trajectory, whoever made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StepLike(Protocol):
    """A turn: a `schema.Step`, or a `reference.StepSpan`."""

    @property
    def row(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def reward(self) -> float: ...
    @property
    def state_key(self) -> str | None: ...


class Packable(Protocol):
    """What `pack` reads of a trajectory; its columns come separately.

    A trajectory with named rewards also has `rewards`, Mapping[str, float]; one with a status has `status`, and
    `data_source`, a text or None, where statistics are taken by source.
    """

    @property
    def group_id(self) -> str: ...
    @property
    def rollout_index(self) -> int: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def is_baseline(self) -> bool: ...
    @property
    def row_lengths(self) -> Sequence[int]: ...
    @property
    def row_trainable(self) -> Sequence[int]: ...
    @property
    def steps(self) -> Sequence[StepLike]: ...
