"""What a producer consists of, without I/O; its heartbeat, its end."""

from __future__ import annotations

import logging
from typing import Final

from .. import metrics
from ..errors import ManifestMismatchError, ProducerClosedError, RunEndedError
from ..messages import log_fields
from ..run.heartbeats import HEARTBEAT_S
from ..run.manifest import RunSettings
from ..store.retry import RETRYABLE
from ..store.waiting import Blocked, Wait
from .admission import Admission
from .failures import Failures
from .membership import Membership, Weights
from .push import Pushes
from .replies import LOST_GROUPS_FIRST, NO_WEIGHTS
from .requests import STAGE, Pause, Steps
from .resend import ResendWindow

logger = logging.getLogger(__name__)

#: Between heartbeats while the server has no room for what it has lost.
CATCH_UP_S: Final = 1.0
#: How long closing a producer lets calls under way end by themselves.
CLOSE_S: Final = 1.0
#: What a heartbeat may raise.
HEARTBEAT_ERRORS: Final[tuple[type[Exception], ...]] = (
    *RETRYABLE,
    ProducerClosedError,
    ManifestMismatchError,
)


class ProducerLogic:
    """The state and the steps behind a `Producer` or an `AsyncProducer`. Threads and tasks may share it."""

    def __init__(
        self, run: str, name: str | None, settings: RunSettings | None, resend_window: float
    ) -> None:
        self.failures = Failures()
        self.membership = Membership(run, name, settings)
        self._resend = ResendWindow(resend_window)
        self.admission = Admission(self.membership, self._resend)
        self.pushes = Pushes(self.membership, self.admission, self._resend)

    def open(self) -> Steps[None]:
        """Join the run and say so."""
        yield from self.membership.join()
        yield from self.heartbeat()

    def heartbeat(self) -> Steps[None]:
        """Say that this producer is alive or finished; learn what has changed; send again what the server has lost."""
        self.failures.log()
        yield from self.admission.withdraw()
        yield from self.membership.agree()  # a setting that nobody had given may have been given since
        yield from self.membership.send_heartbeat()
        yield from self.membership.update_budget()
        yield from self._resend.check(self.membership.manifest.keys.shards)

    def until_heartbeat(self) -> float:
        """Seconds to the next heartbeat, which also sends again what the server had no room for."""
        return min(HEARTBEAT_S, CATCH_UP_S) if self._resend.behind else HEARTBEAT_S

    def stops_heartbeat(self, error: Exception) -> bool:
        """Log that a heartbeat failed. Returns True if every further one would fail as well."""
        if isinstance(error, RETRYABLE):
            logger.warning(
                "heartbeat of producer %s failed: %s",
                self.membership.name,
                error,
                extra=log_fields("heartbeat_failed", run=self.membership.run, role="producer"),
            )
            return False
        if isinstance(error, ManifestMismatchError):
            logger.error(
                "producer %s stops: %s",
                self.membership.name,
                error,
                extra=log_fields("producer_stopped", run=self.membership.run, role="producer"),
            )
        return True

    def wait_for_weights(self) -> Steps[Weights]:
        """Wait until a trainer has said where weights lie. Raises RunEndedError if it ends the run without."""
        wait = Wait(Blocked(self.membership.who, "no weights"))
        while self.membership.weights is None:
            yield from self.membership.send_heartbeat()
            if self.membership.weights is None:
                if self.membership.has_run_ended:
                    raise RunEndedError(
                        "the trainer has ended the run and named no weights: stop, or start a trainer on it again"
                    )
                wait.because(NO_WEIGHTS)
                with metrics.wait(STAGE):
                    yield Pause(wait.delay())
        wait.over()
        return self.membership.weights

    def finish(self) -> Steps[None]:
        """Say that no more groups will come from this producer, once the server has all it was sent."""
        wait = Wait(Blocked(self.membership.who, "not finished"))
        while not (yield from self._resend.check(self.membership.manifest.keys.shards)):
            wait.because(LOST_GROUPS_FIRST)
            yield Pause(wait.delay())
        wait.over()
        self.membership.finished = True
        self.admission.leave_ahead()
        yield from self.heartbeat()

    def goodbye(self) -> Steps[None]:
        """Leave the run on a clean exit."""
        self.failures.log(now=True)
        if self.membership.is_joined:
            yield from self.membership.send_heartbeat()  # the server has then answered all before it
            self.admission.leave_ahead()
            yield from self.admission.withdraw()
            yield from self.membership.send_heartbeat("gone")  # last: until then it may be lost
