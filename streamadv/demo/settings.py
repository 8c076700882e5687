"""The demo's settings: given on the command line, read by each of its processes from one file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from .. import doors

#: Sizes that learn on every seed in well under a minute on two cores.
GROUP_SIZE: Final = 16
GROUPS_PER_ROUND: Final = 4  # 64 episodes in lock-step
BATCH_GROUPS: Final = 8
MAX_TURNS: Final = 20
ROLLOUT_PROCESSES: Final = 2
ADVANTAGE_WORKERS: Final = 2
EVALUATION_EPISODES: Final = 512
EVALUATE_EVERY: Final = 10  # versions
GOAL: Final = 0.8  # success rate that counts as learnt, on the fixed map
DEFAULT_UPDATES: Final = {"fixed": 80, "random": 200}  # by maps
DEFAULT_ESTIMATOR: Final = "grpo"
MAPS: Final = tuple(DEFAULT_UPDATES)
CORRECTIONS: Final = ("none", "tis", "ppo")  # of the loss for stale rollouts, see `trainer.LOSSES`

_FILE = "settings.json"
_LAST = "last"


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the processes of one demo agree on. The Redis URL is not among them: it may hold a password."""

    run: str
    seed: int = 0
    maps: str = MAPS[0]
    estimator: str = DEFAULT_ESTIMATOR
    correction: str = "ppo"
    max_staleness: int = 4
    updates: int = DEFAULT_UPDATES[MAPS[0]]

    def write(self, directory: Path) -> None:
        (directory / _FILE).write_text(json.dumps(asdict(self)))

    @staticmethod
    def finish(directory: Path, version: int) -> None:
        """The trainer has ended with this version."""
        with doors.whole_file(directory / _LAST) as unfinished:
            unfinished.write_text(str(version))

    @staticmethod
    def last(directory: Path) -> int | None:
        """The version with which the trainer has ended; None before."""
        file = directory / _LAST
        return int(file.read_text()) if file.exists() else None

    @classmethod
    def read(cls, directory: Path) -> DemoSettings:
        return cls(**json.loads((directory / _FILE).read_text()))
