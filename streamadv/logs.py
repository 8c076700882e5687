"""Log records as lines of text or JSON, for the command line and for users' own programs.

Records of the package carry fields for machines (`messages.log_fields`); `JsonFormatter` writes them out.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Literal

from .messages import log_fields, printable

LogFormat = Literal["text", "json"]

#: Fields that a record may carry, in the order in which they are written.
FIELDS: Final = ("event", "run", "role", "batch", "group", "reason", "count")
#: Packages whose records below warnings nobody asked for: torch says goodbye, numba tells of its compilation.
TALKATIVE: Final = ("torch", "numba")
#: How a record in JSON begins.
JSON_BEGINS: Final = '{"time": '

logger = logging.getLogger(__name__)


class TextFormatter(logging.Formatter):
    """Time, level, logger and message on one line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record).replace("\n", " | "))


class JsonFormatter(logging.Formatter):
    """One JSON object per record, on one line of ASCII.

    `time` (ISO 8601, UTC), `level`, `logger`, `message` and `process` (host and process id) stand in every record, and
    where they apply `event`, `run`, `role`, `batch`, `group`, `reason`, `count` and `exception` (the traceback).
    run, role: of records that name none.
    """

    def __init__(self, run: str | None = None, role: str | None = None) -> None:
        super().__init__()
        self._defaults = {"run": run, "role": role}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **{name: getattr(record, name, self._defaults.get(name)) for name in FIELDS},
            "process": f"{os.uname().nodename}-{record.process}",
            "logger": record.name,
            "message": record.getMessage(),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}, default=str)


class _Stderr(logging.Handler):
    """Writes to the stderr of the moment: a progress bar puts itself in its place, below what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def set_up_logging(
    level: str = "info", form: LogFormat = "text", *, run: str | None = None, role: str | None = None
) -> None:
    """Log to stderr, one line per record, in place of the handlers that are there.

    level: debug, info, warning or error. run, role: of JSON records that name none. With JSON, warnings of Python and
    the traceback of an exception that ends the process are records too.
    """
    handler = _Stderr()
    handler.addFilter(
        lambda record: record.levelno >= logging.WARNING or record.name.partition(".")[0] not in TALKATIVE
    )
    handler.setFormatter(TextFormatter() if form == "text" else JsonFormatter(run, role))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_crash


def _log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    fields = log_fields("crashed")
    logger.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace), extra=fields)


def announcement(text: str, event: str, *, who: str | None = None, level: int = logging.INFO) -> str:
    """A line for stderr that is shown whatever the log level: `who: text`; a record where the log is JSON."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            record = logging.LogRecord(__name__, level, __file__, 0, text, None, None)
            record.__dict__.update(log_fields(event))
            return handler.formatter.format(record)
    return printable(text if who is None else f"{who}: {text}")


def announce(text: str, event: str, *, who: str | None = None, level: int = logging.INFO) -> None:
    """Print an announcement to stderr."""
    print(announcement(text, event, who=who, level=level), file=sys.stderr, flush=True)
