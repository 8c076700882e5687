"""The heartbeats of the ranks of a training job, in the session hash of the run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Self, get_args

#: Seconds between two heartbeats of a rank.
BEAT_S: Final = 10.0
#: A rank silent for longer counts as lost (three missed heartbeats).
RANK_TIMEOUT_S: Final = 30.0
FIELD: Final = "rank:"
MAX_RANKS: Final = 1 << 20

_FIELD: Final = re.compile(FIELD + "([0-9]{1,7})")
_HEARTBEAT: Final = re.compile("[0-9]{1,15} ")  # when, by the server's clock; the report follows

#: What a rank does: waits for its next batch, trains on one, has been closed.
Doing = Literal["waits", "trains", "left"]


@dataclass(frozen=True, slots=True)
class RankReport:
    """One heartbeat of a rank."""

    world_size: int
    doing: Doing
    batch: int | None  # delivered last; None before the first one
    batch_s: float | None  # seconds since then

    def to_json(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The report in a stored text; None if somebody else has written it."""
        try:
            data: Any = json.loads(text)
            report = cls(int(data["world_size"]), data["doing"], data["batch"], data["batch_s"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        numbers = (report.batch or 0, report.batch_s or 0.0)
        is_sound = all(isinstance(number, int | float) and 0 <= number < 1e15 for number in numbers)
        is_known = report.doing in get_args(Doing) and 1 <= report.world_size <= MAX_RANKS
        return report if is_sound and is_known else None


@dataclass(frozen=True, slots=True)
class HeardRank:
    """The last heartbeat of a rank, and how long ago it came."""

    report: RankReport
    silent_s: float

    @property
    def is_alive(self) -> bool:
        return self.report.doing != "left" and self.silent_s < RANK_TIMEOUT_S


def heard_ranks(session: Mapping[str, str], now_ms: int) -> dict[int, HeardRank]:
    """The ranks that have said something, from the fields of the session hash.

    Those of an earlier job that had more ranks are left out. now_ms: by the server's clock.
    """
    heard = {}
    for name, text in session.items():
        field, when = _FIELD.fullmatch(name), _HEARTBEAT.match(text)
        if field and when and (report := RankReport.parse(text[when.end() :])) is not None:
            heard[int(field[1])] = HeardRank(report, max(0, now_ms - int(when[0])) / 1000)
    size = heard[0].report.world_size if 0 in heard else MAX_RANKS
    return {rank: heard[rank] for rank in sorted(heard) if rank < size}
