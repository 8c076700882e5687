"""What the gateway says instead of an answer: status, code, and whether a client should ask again."""

from __future__ import annotations

from typing import Any, Final

from ..errors import Busy, GroupEndedError, RunEndedError, StreamadvError

#: Codes after which the same request never succeeds, also where an SDK would try it again by its status.
_FINAL: Final = frozenset(("history_lost", "rollout_over", "lost_tokens"))
#: Anthropic's names of statuses.
_ANTHROPIC: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
#: Seconds after which a client may ask again.
RETRY_AFTER_S: Final = 2


class RefusedError(Exception):
    """A request that gets no answer of an engine. `told`: what the engine has said, word for word."""

    def __init__(self, status: int, code: str, text: str, told: Any = None) -> None:
        super().__init__(text)
        self.status, self.code, self.told = status, code, told

    @property
    def headers(self) -> dict[str, str]:
        """Those that the SDKs of OpenAI and Anthropic obey."""
        if self.code in _FINAL:
            return {"x-should-retry": "false"}
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {}

    def body(self, dialect: str) -> Any:
        """In the shape of OpenAI, or of Anthropic for its own paths."""
        text = str(self)
        if dialect == "messages":
            other = "api_error" if self.status >= 500 else "invalid_request_error"
            return {"type": "error", "error": {"type": _ANTHROPIC.get(self.status, other), "message": text}}
        if self.told is not None:
            return self.told
        return {"error": {"message": text, "type": self.code, "code": self.code, "param": None}}


def bad_request(text: str, status: int = 400) -> RefusedError:
    """The request is wrong in itself."""
    return RefusedError(status, "bad_request", text)


def unavailable(text: str) -> RefusedError:
    """No engine answers; one may later."""
    return RefusedError(503, "engine_unavailable", text)


def refused(error: StreamadvError) -> RefusedError:
    """An error of streamadv as a refusal."""
    if isinstance(error, Busy):
        return RefusedError(503, "not_admitted", str(error))
    if isinstance(error, RunEndedError | GroupEndedError):
        return RefusedError(410, "rollout_over", str(error))
    return bad_request(str(error))


def over(name: str, why: str) -> RefusedError:
    """The rollout has ended."""
    return RefusedError(410, "rollout_over", f"rollout {name} is over: {why}; begin another one")
