"""Everything streamadv raises on purpose. Each message is one line: setting or field, value, remedy.

Each docstring says who raises the error, and what its reader does about it.
"""

from __future__ import annotations

from collections.abc import Mapping


class StreamadvError(Exception):
    """Base class of all errors raised by streamadv."""


class SettingError(StreamadvError):
    """Raised at start where a setting is missing, unknown, out of range or contradicts another one: correct it."""


class ManifestMismatchError(SettingError):
    """A process was given another value than the run was created with: give that one, or none, or use another run."""


class TrajectoryError(StreamadvError):
    """The producer refuses a trajectory with a wrong field, dtype, length, size or number: correct what pushes it.

    Inside `group.run` it fails the rollout that pushes it, and is raised where all of a group fail at the same line.
    """


class ArgumentError(TrajectoryError, ValueError):
    """A function of the maths or a loss got a tensor, array or list of wrong shape, dtype, device or values."""


class OptionError(SettingError, ValueError):
    """A function of the maths or a loss got an option of wrong type or range, or one that contradicts another."""


class JudgeAwayError(StreamadvError):
    """A score function raises or returns it while its judge cannot be asked: the trajectories wait, no try is counted.

    wait_s: seconds for which the judge asked to be left alone.
    """

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.wait_s = wait_s


class WireError(StreamadvError):
    """A reader got bytes that are no payload of a schema version this release understands: use one release in a run."""


class UndecodableGroupError(WireError):
    """Workers and the trainer cannot read payloads or results of groups, which become dead letters.

    problems: (group_id, rollout_index) -> what is wrong.
    """

    def __init__(self, problems: Mapping[tuple[str, int], str]) -> None:
        super().__init__("; ".join(f"group {name}: {text}" for (name, _), text in problems.items())[:1000])
        self.problems = problems


class ChainError(StreamadvError):
    """An advantage worker's chain fails on several groups alike, so the fault is not in the data: correct the chain."""


class EstimatorError(StreamadvError):
    """An estimator raised an exception, or returned what its registration or the chain does not allow: correct it."""


class LateColumnError(SettingError):
    """A function given to the trainer queue in `late=` failed, or returned no column of its micro-batch: correct it."""


class HungError(StreamadvError):
    """A scoring function or an estimator did not return within its time: bound what it waits for."""


class MissingDependencyError(StreamadvError, ImportError):
    """A command or a function needs an optional package: install the extra that the message names."""


class ServerError(StreamadvError):
    """The embedded server was not found or did not start: the message says how to install one, or what its log says."""


class ServerUnreachableError(StreamadvError):
    """The server at the given URL did not answer in time: start it, or correct the URL."""


class NotPermittedError(StreamadvError):
    """The server's access rules refuse a command to the user of the URL: use the user that the role is meant for."""


class WeightsMissingError(StreamadvError, FileNotFoundError):
    """Weights to be loaded are not there (any more): wait for the trainer, or give the folder that it writes to."""


class ProcessEndedError(StreamadvError):
    """A child process of `up`, the demo, Ray or a benchmark keeps ending, or does not move any more: see its log."""


class ProducerClosedError(StreamadvError):
    """A call on a producer that was closed, before or meanwhile, by whatever thread or task: make another producer."""


class Busy(StreamadvError):
    """The producer could not begin a group in time, for lack of bytes or by pacing: try again later.

    reason: one of `store.reasons.REASONS`, with its figures of this moment.
    """

    def __init__(self, message: str, reason: tuple[str, str] = ("max_bytes", "")) -> None:
        super().__init__(message)
        self.reason = reason


class GroupEndedError(StreamadvError):
    """The producer cannot begin or extend a group that ended (complete, expired or dropped): begin another one."""


class RunEndedError(StreamadvError):
    """The trainer has ended the run (`TrainerQueue.finish`), so the producer begins no training group: stop, or wait
    until a trainer takes the run again. Also raised by `QueueAsyncGRPOTrainer`, which cannot end with its run.
    """


class NoBatchError(StreamadvError):
    """The trainer queue got no batch within the time that its caller gave: the message says what is missing."""


class StarvedError(StreamadvError):
    """The trainer queue gives up, or ends with nothing trained, as every group was dropped: the message says why."""


class CheckpointError(StreamadvError):
    """A checkpoint was not saved, or rank 0 has not said that it was: the disk or another rank failed. Earlier ones are
    whole, and `queue.resume` finds the newest.
    """


class EpochFencedError(StreamadvError):
    """Another training job has taken the run, so this one may no longer name, train or commit: stop it."""


class BatchLostError(StreamadvError):
    """The server lost groups of a named batch: restart the trainer from its checkpoint."""


class UncommittedBudgetError(StreamadvError):
    """The trainer queue gives up: batches trained and not committed fill max_bytes. Commit more often, or raise it."""


class BatchBudgetError(StreamadvError):
    """The trainer queue gives up: max_bytes holds fewer groups than a batch needs. Raise it, or lower batch_groups."""
