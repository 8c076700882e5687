"""Scores by the content that they were given for: in memory, and in a file that survives the process."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SettingError
from ..messages import brief, log_fields, whole_number
from .scoring_streams import UnscoredTrajectory

logger = logging.getLogger(__name__)


class Remembered:
    """The newest scores of this process; with a file, all of them, for all processes that open it."""

    def __init__(self, file: str | None, count: int) -> None:
        self._count, self._scores = whole_number("remember", count), OrderedDict[str, Any]()
        self._lock = threading.Lock()  # calls of a scorer may run in different threads
        self._file: sqlite3.Connection | None = None
        if file is not None:
            try:
                self._file = sqlite3.connect(
                    file, timeout=60.0, isolation_level=None, check_same_thread=False
                )
                self._file.execute("PRAGMA journal_mode=WAL")
                self._file.execute("PRAGMA synchronous=NORMAL")
                self._file.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, score TEXT)")
            except sqlite3.Error as error:
                raise SettingError(
                    f"cache is {brief(file)}, no file of scores: {error}; name another"
                ) from None

    def get(self, key: str) -> tuple[bool, Any]:
        """Whether there is one, and the score."""
        with self._lock:
            if key in self._scores:
                self._scores.move_to_end(key)
                return True, self._scores[key]
            row = self._in_file("SELECT score FROM scores WHERE key = ?", _short(key))
            return (False, None) if row is None else (True, self._keep(key, json.loads(row[0])))

    def put(self, key: str, score: Any) -> None:
        """Remember a score: a number, None, or named components. Others are not remembered."""
        try:
            text = json.dumps(score, default=float, allow_nan=False)
        except (TypeError, ValueError):
            return  # the scorer says what is wrong with it
        plain = json.loads(text)
        if isinstance(plain, str | list) or (isinstance(score, Mapping) and plain.keys() != score.keys()):
            return
        with self._lock:
            self._keep(key, plain)
            self._in_file("INSERT OR REPLACE INTO scores VALUES (?, ?)", _short(key), text)

    def _in_file(self, statement: str, *values: str) -> Any:
        """The first row of the answer. A file that fails costs no score: from then on this process does without."""
        if self._file is None:
            return None
        try:
            return self._file.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            self._file = None
            text = "the judge's cache fails (%s): scores are remembered by this process alone"
            logger.warning(text, error, extra=log_fields("cache_failed", role="scorer"))
            return None

    def _keep(self, key: str, score: Any) -> Any:
        self._scores[key] = score
        while len(self._scores) > self._count:
            self._scores.popitem(last=False)
        return score


def content_of(trajectories: Sequence[UnscoredTrajectory]) -> str:
    """A digest of what was pushed but for columns of floats, which differ where tokens are the same."""
    digest = hashlib.blake2b(digest_size=20)
    for each in trajectories:
        parts: list[Any] = [
            each.status,
            each.data_source,
            each.metadata,
            list(each.row_lengths),
            list(each.agents),
        ]
        digest.update(json.dumps(parts, sort_keys=True, default=_plain).encode())
        for name in sorted(each.columns):
            column = each.columns[name]
            if column.dtype.kind != "f":
                digest.update(f"{name} {column.dtype.str} {column.shape} ".encode())
                digest.update(column.tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)


def _short(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=20).hexdigest()
