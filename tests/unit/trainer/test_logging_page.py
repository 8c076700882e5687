"""docs/reference/batch-metrics.md names every figure; the example of docs/train/logging.md logs them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import streamadv as sa
from streamadv.store.connection import Connection
from streamadv.trainer.queue import TrainerQueue
from tests.support import delivered_batch, join, next_batch, producing, push_groups

DOCS = Path(sa.__file__).parents[1] / "docs"
PAGE = DOCS / "reference" / "batch-metrics.md"


def test_the_example_for_any_tracker_logs_every_figure_of_every_batch(fake: Connection) -> None:
    block = (
        (DOCS / "train" / "logging.md")
        .read_text()
        .split("Any other tracker")[1]
        .split("```python\n")[1]
        .split("```")[0]
    )
    with producing(fake, "r") as producer:
        push_groups(producer, 2, data_source="math", model_version=0)
    real = TrainerQueue(fake, "r", batch_groups=1, prefetch=0)
    batches, logged = list[sa.Batch](), dict[int, dict[str, float]]()

    def deliver() -> Iterator[sa.Batch]:
        for _ in range(2):
            batch = delivered_batch(real, join(fake, "r"))
            batches.append(batch)
            yield batch

    class Queue:
        trained = real.trained

        def __iter__(self) -> Iterator[sa.Batch]:
            return deliver()

    other = SimpleNamespace(log=lambda metrics, step: logged.update({step: metrics}))
    exec(block, {"queue": Queue(), "other": other, "train_on": lambda batch: {"actor/loss": 0.5}})
    assert logged == {batch.version: {**batch.metrics, "actor/loss": 0.5} for batch in batches}
    assert len(batches) == 2


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
