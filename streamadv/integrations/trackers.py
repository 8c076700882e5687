"""`sa.track`: the metrics of each batch, and a few of its rollouts with their text, in an experiment tracker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import numpy as np

from ..errors import SettingError
from ..extras import require
from ..messages import brief, log_fields, one_line, whole_number
from ..trajectory.schema import Trajectory
from ..view.texts import open_tokenizer

if TYPE_CHECKING:
    from ..trainer.microbatch import Batch, Delivered
    from ..trainer.queue import TrainerQueue

logger = logging.getLogger(__name__)

#: Text of some token ids.
Decode = Callable[[Sequence[int]], str]

#: Columns of the table of rollouts.
COLUMNS: Final = (
    *("version", "group", "rollout", "data_source", "reward", "rewards", "advantage", "staleness", "status"),
    *("tokens", "prompt", "answer"),
)
#: Characters of a text at most.
MAX_CHARS: Final = 20_000


class Backend(Protocol):
    """A tracker: takes the figures of a version, and a table of its rollouts, whose rows have the values of COLUMNS.

    After `close` all of it is logged.
    """

    def log(self, version: int, metrics: Mapping[str, float]) -> None: ...
    def table(self, version: int, rows: Sequence[Sequence[Any]]) -> None: ...
    def close(self) -> None: ...


class Tracker:
    """Logs batches of a trainer queue. Made by `track`; use with `with`, or call `close`."""

    def __init__(self, backend: Backend | None, rollouts: int, every: int, decode: Decode) -> None:
        self._backend, self._rollouts, self._every, self._decode = backend, rollouts, every, decode

    def log(self, batch: Batch, measured: Mapping[str, float]) -> None:
        """Log what the training loop has measured of a batch: loss, gradient norm ..."""
        self._attempt(lambda backend: backend.log(batch.version, measured))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Log no more. A run of the tracker that `track` has begun ends."""
        self._attempt(lambda backend: backend.close())
        self._backend = None

    def _delivered(self, batch: Batch) -> None:
        self._attempt(lambda backend: backend.log(batch.version, batch.metrics))
        if self._rollouts and batch.version % self._every == 0:
            self._attempt(lambda backend: backend.table(batch.version, self._rows(batch)))

    def _rows(self, batch: Batch) -> list[list[Any]]:
        """Some rollouts of this rank, from the least reward to the greatest."""

        def place_of(delivered: Delivered) -> tuple[float, str, int]:
            reference = delivered.reference
            return reference.reward or 0.0, reference.group_id, reference.rollout_index

        all_ = sorted(batch.make_delivered(), key=place_of)
        chosen = np.linspace(0, len(all_) - 1, min(self._rollouts, len(all_))).round().astype(int).tolist()
        return [self._row(all_[place].trajectory(batch.version), batch.version) for place in chosen]

    def _row(self, trajectory: Trajectory, version: int) -> list[Any]:
        return [
            version,
            trajectory.group_id,
            trajectory.rollout_index,
            trajectory.data_source or "",
            trajectory.reward,
            ", ".join(f"{name} {value:g}" for name, value in trajectory.rewards.items()),
            _advantage_of(trajectory),
            trajectory.staleness,
            trajectory.status.value,
            trajectory.num_tokens,
            *self._texts(trajectory),
        ]

    def _texts(self, trajectory: Trajectory) -> tuple[str, str]:
        """Before the first token that is trained on, and from it on; of all rows."""
        prompts, answers = [], []
        for row in trajectory.rows:
            trained = np.flatnonzero(row.response_mask)
            start = int(trained[0]) if len(trained) else len(row)
            ids = row.input_ids.tolist()
            prompts.append(self._decode(ids[:start])[:MAX_CHARS])
            answers.append(self._decode(ids[start:])[:MAX_CHARS])
        return "\n\n".join(prompts), "\n\n".join(answers)

    def _attempt(self, action: Callable[[Backend], None]) -> None:
        """Nothing that a tracker raises ends the training."""
        if self._backend is None:
            return
        try:
            action(self._backend)
        except Exception as error:
            fields = log_fields("not_tracked")
            text = "%s logs nothing of this: %s: %s"
            name = type(self._backend).__name__
            logger.warning(text, name, type(error).__name__, one_line(str(error)), extra=fields)


def track(
    queue: TrainerQueue,
    to: str,
    *,
    rollouts: int = 4,
    every: int = 1,
    tokenizer: str | Path | Decode | None = None,
    **options: Any,
) -> Tracker:
    """Log each batch of the queue as it is delivered: its metrics, and a table of a few rollouts with their text.

    The x-axis is `batch.version`. Rank 0 logs, on other ranks this does nothing. A run of the tracker that is there is
    used, else one begins, which ends with `close`. What the tracker raises later is a warning, and training goes on.

    Args:
        queue: before its first batch.
        to: "wandb", "tensorboard", "mlflow" or "trackio"; its package has to be installed.
        rollouts: of each batch, from the least reward to the greatest; 0 = none.
        every: that many batches lie between two tables.
        tokenizer: path of a tokenizer.json or its folder, or a function from token ids to text such as
            `tokenizer.decode`. None shows token ids.
        options: of the tracker's run: what `wandb.init`, `SummaryWriter`, `mlflow.start_run` or `trackio.init` take.

    Raises SettingError for another name, MissingDependencyError.
    """
    if to not in BACKENDS:
        raise SettingError(f"to is {brief(to)}, needs one of {', '.join(BACKENDS)}")
    rollouts, every = whole_number("rollouts", rollouts), whole_number("every", every, 1)
    require(f"track(queue, {to!r})", to)
    path = None if tokenizer is None or callable(tokenizer) else str(tokenizer)
    decode = tokenizer if callable(tokenizer) else open_tokenizer(path, None).decode
    tracker = Tracker(BACKENDS[to](options) if queue.rank == 0 else None, rollouts, every, decode)
    queue.on_batch(tracker._delivered)
    return tracker


class WandB:
    """Weights & Biases: a row of metrics for each batch, `rollouts` is a table of it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import wandb

        self._package = wandb
        self._own = wandb.run is None
        self._run: Any = wandb.init(**options) if self._own else wandb.run
        # Versions may come again after a rollback, the step of wandb only grows.
        self._run.define_metric("*", step_metric="version")

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"version": version, **metrics})

    def table(self, version: int, rows: Sequence[Sequence[Any]]) -> None:
        table = self._package.Table(list(COLUMNS), list(map(list, rows)))
        self._run.log({"version": version, "rollouts": table})

    def close(self) -> None:
        if self._own:
            self._run.finish()


class TensorBoard:
    """TensorBoard: scalars, and the rollouts as text."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(**options)

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, version)

    def table(self, version: int, rows: Sequence[Sequence[Any]]) -> None:
        self._writer.add_text("rollouts", _markdown(rows), version)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """MLflow: metrics, and a table `rollouts/<version>.json` among the artifacts of the run."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import mlflow

        self._package = mlflow
        self._own = mlflow.active_run() is None
        self._run: Any = mlflow.start_run(**options) if self._own else mlflow.active_run()

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        self._package.log_metrics(dict(metrics), step=version, run_id=self._run.info.run_id)

    def table(self, version: int, rows: Sequence[Sequence[Any]]) -> None:
        columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
        self._package.log_table(columns, f"rollouts/{version:06}.json", run_id=self._run.info.run_id)

    def close(self) -> None:
        if self._own:
            self._package.end_run()


class Trackio:
    """trackio: metrics, `rollouts` is a table."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import trackio

        self._package = trackio
        self._run: Any = trackio.init(**{"embed": False, **options})

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), version)

    def table(self, version: int, rows: Sequence[Sequence[Any]]) -> None:
        table = self._package.Table(columns=list(COLUMNS), data=list(map(list, rows)))
        self._run.log({"rollouts": table}, version)

    def close(self) -> None:
        self._run.finish()


#: Name of a tracker, which is its package -> what begins a run of it with these options.
BACKENDS: Final[Mapping[str, Callable[[Mapping[str, Any]], Backend]]] = {
    "wandb": WandB,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def _advantage_of(trajectory: Trajectory) -> float | None:
    """The mean over tokens that are trained on."""
    pairs = [(row.advantages, row.response_mask) for row in trajectory.rows if row.advantages is not None]
    trained = [advantages[mask > 0] for advantages, mask in pairs]
    values = np.concatenate(trained) if trained else np.zeros(0)
    return float(values.mean()) if len(values) else None


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    """A table in which no text can end a cell or a line."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    for old, new in (("&", "&amp;"), ("<", "&lt;"), ("|", "&#124;"), ("\r", ""), ("\n", "<br>")):
        text = text.replace(old, new)
    return text
