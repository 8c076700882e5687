"""The examples of docs/how-to/logging.md run, with stand-ins for the loggers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import streamadv as sa
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import delivered_batch, join, next_batch, producing, push_groups

PAGE = Path(sa.__file__).parents[1] / "docs" / "how-to" / "logging.md"

Logged = list[tuple[int, dict[str, float]]]


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Logged:
    """What the loggers get: (version, metrics)."""
    logged: Logged = []

    def module(name: str, **members: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, made)

    class Writer:
        def __init__(self, log_dir: str) -> None:
            assert log_dir

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            logged.append((global_step, {tag: scalar_value}))

        def close(self) -> None:
            pass

    module(
        "wandb",
        init=lambda project, config: None,
        define_metric=lambda name, step_metric: None,
        log=lambda data: logged.append((int(data["version"]), data)),
    )
    module(
        "mlflow",
        start_run=lambda run_name: nullcontext(),
        log_metrics=lambda metrics, step: logged.append((step, metrics)),
    )
    module("torch.utils.tensorboard", SummaryWriter=Writer)
    return logged


@pytest.mark.parametrize("title", ["Weights & Biases", "TensorBoard", "MLflow"])
def test_an_example_logs_every_figure_of_every_batch(fake: Connection, logged: Logged, title: str) -> None:
    block = PAGE.read_text().split(f"## {title}\n")[1].split("```python\n")[1].split("```")[0]
    with producing(fake, "r") as producer:
        push_groups(producer, 2, data_source="math", model_version=0)
    real = TrainerQueue(fake, "r", batch_groups=1, prefetch=0)
    batches = []

    def deliver() -> Iterator[sa.Batch]:
        for _ in range(2):
            batch = delivered_batch(real, join(fake, "r"))
            batches.append(batch)
            yield batch

    class Queue:
        trained = real.trained

        def __iter__(self) -> Iterator[sa.Batch]:
            return deliver()

    exec(block, {"queue": Queue(), "train_on": lambda batch: {"actor/loss": 0.5}})
    for batch in batches:
        values: dict[str, float] = {}
        for version, metrics in logged:
            values |= metrics if version == batch.version else {}
        values.pop("version", None)
        assert values == {**batch.metrics, "actor/loss": 0.5}


def test_the_page_names_every_figure(fake: Connection) -> None:
    step = {"row": 0, "start": 2, "end": 3, "reward": 0.0}
    with producing(fake, "r") as producer:
        push_groups(producer, 2, data_source="src", model_version=0, steps=[step], rewards={"format": 1.0})
    queue = TrainerQueue(fake, "r", batch_groups=1, prefetch=0)
    batches = [next_batch(queue, join(fake, "r")) for _ in range(2)]
    patterns = [pattern for name in _names() for pattern in _expanded(name)]
    for name in [name for batch in batches if batch for name in batch.metrics]:
        assert any(re.fullmatch(pattern, name) for pattern in patterns), name


def _names() -> list[str]:
    rows = re.findall(r"^\| (`.*?`.*?) \|", PAGE.read_text(), re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def _expanded(name: str) -> list[str]:
    """Patterns of a name on the page: {a,b} are choices, <x> is any name, … anything."""
    choices = re.search(r"\{(.*?)\}", name)
    if choices:
        return [
            pattern
            for choice in choices[1].split(",")
            for pattern in _expanded(name.replace(choices[0], choice))
        ]
    escaped = re.escape(name).replace("…", ".+").replace(r"\*", ".+")
    return [re.sub(r"<\w+>", "[^/]+", escaped)]
