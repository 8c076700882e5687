"""Maps the version counter of another program to versions of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ..errors import ArgumentError


@dataclass(frozen=True, slots=True)
class VersionCounter:
    """How another program counts policies: it says `first` for the weights of version 0, `step` more with each batch.

    A version of the run counts the batches in the weights. Programs count otherwise, and a number of theirs that is
    pushed as it is makes every staleness wrong:

    | counter | `VersionCounter` |
    |---|---|
    | verl: tags `min_global_steps`, `max_global_steps` of a rollout | `VersionCounter()` |
    | verl: `global_steps` of the trainer while it trains | `VersionCounter(first=1)` |
    | transformers and TRL: `state.global_step`, n optimizer steps a batch | `VersionCounter(step=n)` |
    | TRL: `model_version` of AsyncGRPO, 1 after its first weight sync | `VersionCounter(first=1)` |
    | prime-rl: `PolicySpan.start`, `PolicySpan.end` | `VersionCounter()` |

    After a restart that counts anew, `VersionCounter.at` takes both numbers of one moment.
    """

    first: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ArgumentError(f"step is {self.step}, needs 1 or more")

    @classmethod
    def at(cls, count: int, version: int, step: int = 1) -> Self:
        """The counter that says `count` for weights of `version`, such as `queue.state_dict()["version"]`."""
        return cls(count - version * step, step)

    def version(self, count: int) -> int:
        """The version of weights for which the program says `count`; 0 for a count before `first`.

        Between two batches it is the version before: the weights hold a part of the next one at most.
        """
        return max(0, (count - self.first) // self.step)

    def span(self, oldest: int, newest: int) -> tuple[int, int]:
        """`model_version` of a rollout whose tokens were made by weights from `oldest` to `newest`."""
        return self.version(oldest), self.version(newest)

    def count(self, version: int) -> int:
        """What the program says for weights of `version`."""
        return self.first + version * self.step
