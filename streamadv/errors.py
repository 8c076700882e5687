"""Everything streamadv raises on purpose. Each message is one line: setting or field, value, remedy."""

from __future__ import annotations

from collections.abc import Mapping


class StreamadvError(Exception):
    """Base class of all errors raised by streamadv."""


class SettingError(StreamadvError):
    """A setting is missing, unknown, out of range or contradicts another one."""


class ManifestMismatchError(SettingError):
    """A process was given a value that differs from the one the run was created with."""


class TrajectoryError(StreamadvError):
    """A trajectory breaks the data model: wrong field, dtype, length, size or a non-finite number."""


class ArgumentError(TrajectoryError, ValueError):
    """A tensor, array or list of labels given to a function has the wrong shape, dtype, device or values."""


class OptionError(SettingError, ValueError):
    """An option given to a function is of the wrong type, unknown, out of range or contradicts another one."""


class WireError(StreamadvError):
    """Bytes read from Redis are not a payload of a schema version this release understands."""


class UndecodableGroupError(WireError):
    """Payloads or results of groups cannot be read. `problems`: (group_id, rollout_index) -> what is wrong."""

    def __init__(self, problems: Mapping[tuple[str, int], str]) -> None:
        super().__init__("; ".join(f"group {name}: {text}" for (name, _), text in problems.items())[:1000])
        self.problems = problems


class ChainError(StreamadvError):
    """The advantage chain fails on several groups alike, or in its own code: the fault is not in the data."""


class EstimatorError(StreamadvError):
    """An estimator raised an exception, or returned what its registration or the chain does not allow."""


class LateColumnError(SettingError):
    """A function given in `late=` failed, or what it returned is no column of its micro-batch."""


class HungError(StreamadvError):
    """A function of the user's did not return within its time."""


class MissingDependencyError(StreamadvError):
    """An optional package is needed; the message names the extra that brings it."""


class ServerError(StreamadvError):
    """The embedded server could not be found or started."""


class ServerUnreachableError(StreamadvError):
    """The server at the given URL did not answer in time."""


class ProcessEndedError(StreamadvError):
    """A child process (of the demo, of a benchmark) keeps ending, or has stopped moving."""


class ProducerClosedError(StreamadvError):
    """The producer was closed, by another thread or task or before this call."""


class Busy(StreamadvError):
    """Admission refused a group: the run is at its byte budget or as far ahead as max_staleness allows.

    reason: one of `store.reasons.REASONS`, with its figures of this moment.
    """

    def __init__(self, message: str, reason: tuple[str, str] = ("max_bytes", "")) -> None:
        super().__init__(message)
        self.reason = reason


class GroupEndedError(StreamadvError):
    """The group has ended (complete, expired or dropped); it takes no more rollouts."""


class NoBatchError(StreamadvError):
    """No batch could be formed within the time the caller gave."""


class StarvedError(StreamadvError):
    """Everything that is produced is filtered away, stale, rolled back or dead: no batch will come."""


class EpochFencedError(StreamadvError):
    """Another trainer has taken over this run; this one may no longer name, train or commit."""


class BatchLostError(StreamadvError):
    """A named batch misses groups (the server lost them): restart the trainer from its checkpoint."""


class UncommittedBudgetError(StreamadvError):
    """Trained but uncommitted batches fill the byte budget, so nothing new can arrive."""


class BatchBudgetError(StreamadvError):
    """max_bytes holds fewer groups than a batch needs, so none can ever be formed."""
