"""What is known of a demo while it runs: fed by messages, status readings and kills; read by view and summary."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ..status.model import Ledger, Status
from .settings import GOAL, DemoSettings

SMOOTHING_S: Final = 3.0  # window of the throughput shown


@dataclass(frozen=True, slots=True)
class Update:
    """One policy update, as the trainer reported it."""

    version: int  # after the update
    reward: float
    kl: float
    trajectories: int
    staleness_sum: int
    staleness_max: int

    @property
    def staleness_mean(self) -> float:
        return self.staleness_sum / self.trajectories if self.trajectories else 0.0


@dataclass(frozen=True, slots=True)
class Kill:
    process: str
    pid: int
    version: int


@dataclass(slots=True)
class Progress:
    """The demo so far. Versions, rates in 0..1, seconds since the start."""

    settings: DemoSettings
    updates: list[Update] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)  # version -> success rate, ascending
    kills: list[Kill] = field(default_factory=list)
    status: Status | None = None  # the newest reading
    seconds: float = 0.0
    phase: str = "starting"
    _pushed: list[tuple[float, int]] = field(default_factory=list)

    @property
    def version(self) -> int:
        return self.updates[-1].version if self.updates else 0

    def hear(self, message: dict[str, Any]) -> None:
        """Take in an `update` or `evaluation` message; others are not progress."""
        if message["kind"] == "update":
            # A trainer that came back from its checkpoint repeats versions: what came after them is void.
            self.updates = [update for update in self.updates if update.version < message["version"]]
            self.updates.append(Update(**{name: message[name] for name in Update.__dataclass_fields__}))
        elif message["kind"] == "evaluation":
            self.evaluations[message["version"]] = message["success_rate"]
            self.evaluations = dict(sorted(self.evaluations.items()))

    def read(self, status: Status, seconds: float) -> None:
        self.status = status
        self._pushed.append((seconds, status.ledger.pushed))
        while len(self._pushed) > 2 and self._pushed[1][0] <= seconds - SMOOTHING_S:
            self._pushed.pop(0)

    @property
    def ledger(self) -> Ledger:
        return Ledger.of({}) if self.status is None else self.status.ledger

    @property
    def trajectories_per_second(self) -> float:
        if len(self._pushed) < 2:
            return 0.0
        (start, before), (end, now) = self._pushed[0], self._pushed[-1]
        return (now - before) / (end - start) if end > start else 0.0

    @property
    def staleness_mean(self) -> float:
        """Over all trajectories trained on."""
        trained = sum(update.trajectories for update in self.updates)
        return sum(update.staleness_sum for update in self.updates) / trained if trained else 0.0

    @property
    def staleness_max(self) -> int:
        return max((update.staleness_max for update in self.updates), default=0)

    @property
    def learnt(self) -> bool:
        """Whether the goal is reached. Random maps have none: nobody has promised to solve them."""
        rate = self.evaluations.get(self.version)
        return rate is not None and (rate >= GOAL or self.settings.maps == "random")

    @property
    def balanced(self) -> bool:
        """pushed = trained + dropped + dead + queued + in_flight, and the server says so too."""
        status = self.status
        return status is not None and status.balanced and status.ledger.pushed == status.ledger.accounted

    def result(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            **{name: value for name, value in asdict(self.settings).items() if name != "run"},
            "updates": self.version,
            "success_rate_start": self.evaluations.get(0),
            "success_rate": self.evaluations.get(self.version),
            "staleness_mean": round(self.staleness_mean, 3),
            "staleness_max": self.staleness_max,
            "trajectories": self.ledger.pushed,
            "kills": len(self.kills),
            "killed": [kill.process for kill in self.kills],
            "seconds": round(self.seconds, 2),
            "ledger": asdict(self.ledger),
            "balanced": self.balanced,
        }
