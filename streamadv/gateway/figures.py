"""The gateway's metrics: `metrics/instruments.py` declares them."""

from __future__ import annotations

from collections.abc import Mapping

from ..metrics import instruments

OPEN = instruments.GATEWAY_OPEN
TURNS = instruments.GATEWAY_TURNS
TOKENS = instruments.GATEWAY_TOKENS
ROWS = instruments.GATEWAY_ROWS
RESTORED = instruments.GATEWAY_RESTORED
SPLICED = instruments.GATEWAY_SPLICED
REPEATED = instruments.GATEWAY_REPEATED
CLIENTS_GONE = instruments.GATEWAY_CLIENTS_GONE
RETRIES_ANSWERED = instruments.GATEWAY_RETRIES_ANSWERED
ENGINE_SECONDS = instruments.GATEWAY_ENGINE_SECONDS
OWN_SECONDS = instruments.GATEWAY_OWN_SECONDS


def answered(dialect: str, code: str) -> None:
    """A request for a turn was answered: `ok`, or the code of a refusal."""
    known = code if code in instruments.GATEWAY_CODES else "other"
    instruments.child(instruments.GATEWAY_REQUESTS, dialect, known).inc()


def row_broken(cause: str, tokens: int) -> None:
    """A prompt of so many tokens began another row."""
    instruments.child(instruments.GATEWAY_BREAKS, cause).inc()
    REPEATED.inc(tokens)


def of_process() -> Mapping[str, float]:
    """What /healthz shows."""
    return {"rollouts_open": OPEN._value.get(), "turns": TURNS._value.get(), "rows": ROWS._value.get()}
