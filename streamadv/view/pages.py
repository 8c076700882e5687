"""The templates: what they may call, and what escapes what they are given."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..messages import counted, printable, seconds_text, size_text
from .book import Line

FOLDER: Final = Path(__file__).parent
#: Size of a dot's place in a strip of rewards, and the strip's height.
DOT: Final = 9
HEIGHT: Final = 20
#: Characters at each end of a long id.
END: Final = 10
#: Dots of a strip at most.
MAX_DOTS: Final = 32


def environment() -> Environment:
    """Templates in which every value is escaped."""
    made = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"num": number, "ago": ago, "size": size_text, "seconds": seconds_text}
    made.filters |= {"line": printable, "short": short}
    made.globals |= {"link": link, "dots": dots, "points": points, "counted": counted, "compact": json.dumps}
    return made


def link(path: str, *words: dict[str, str], **more: object) -> str:
    """An address of this page."""
    given = {name: value for part in words for name, value in part.items()}
    given |= {name: str(value) for name, value in more.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def number(value: float | str | None) -> str:
    """A figure: whole ones with commas, others with four digits."""
    if value is None:
        return "-"
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}"


def short(group_id: str) -> str:
    """An id that fits into a table: of a long one the beginning and the end."""
    return group_id if len(group_id) <= 2 * END + 4 else f"{group_id[:END]}…{group_id[-END:]}"


def ago(ms: int | None) -> str:
    """A moment of the server's clock, in UTC."""
    return "" if ms is None else f"{datetime.fromtimestamp(ms / 1000, UTC):%H:%M:%S}"


def dots(line: Line, low: float, high: float) -> list[tuple[int, float, str, str]]:
    """The rewards of a group as dots of a strip: x, y, class and label. low, high: of all groups."""
    found = []
    for place, (index, reward, counts) in enumerate(line.rewards[:MAX_DOTS]):
        share = 0.5 if reward is None or high <= low else (reward - low) / (high - low)
        kind = "none" if reward is None else "high" if share > 0.5 else "low"
        label = f"rollout {index}: reward {'none' if reward is None else format(reward, 'g')}"
        y = round(HEIGHT - 4 - share * (HEIGHT - 8), 1)
        found.append((place * DOT + 5, y, kind if counts else f"{kind} out", label))
    return found


def points(values: Sequence[float | None], width: float, height: float) -> list[tuple[float, float]]:
    """Values as points of a curve from 0 or the least value to the greatest."""
    known = [value for value in values if value is not None]
    low, high = min([0.0, *known]), max([0.0, *known])
    scale = (height - 4) / ((high - low) or 1.0)
    step = width / max(1, len(values) - 1)
    return [
        (round(place * step, 1), round(height - 2 - (value - low) * scale, 1))
        for place, value in enumerate(values)
        if value is not None
    ]
