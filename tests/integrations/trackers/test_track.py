"""`sa.track` against the real packages, offline: what they have stored is read back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamadv as sa
from streamadv.errors import SettingError
from streamadv.integrations.trackers import COLUMNS
from streamadv.trainer.queue import TrainerQueue
from tests.support import delivered_batch, join, producing, trajectory

WORDS = ["zero", "one", "two", "three", "four"]
HOSTILE = "<b>|"
#: Bytes of a block of wandb's log.
BLOCK = 1 << 15


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is written below tmp_path, nothing is asked of a network."""
    for name, value in (
        ("WANDB_MODE", "offline"),
        ("WANDB_DIR", str(tmp_path)),
        ("WANDB_SILENT", "true"),
        ("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db"),
        ("TRACKIO_DIR", str(tmp_path / "trackio")),
        ("HF_HUB_OFFLINE", "1"),
        ("GIT_PYTHON_REFRESH", "quiet"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)


def text_of(ids: Any) -> str:
    return " ".join(WORDS[each] if each < len(WORDS) else HOSTILE for each in ids)


def trained(url: str, run: str, to: str, batches: int = 2, **options: Any) -> list[sa.Batch]:
    """Train on batches of two groups, tracked."""
    found = []
    with (
        producing(url, run) as producer,
        TrainerQueue(url, run, batch_groups=2, commit="manual") as queue,
        sa.track(queue, to, rollouts=3, tokenizer=text_of, **options) as tracker,
    ):
        for version in range(batches):
            for group, group_id in enumerate((f"v{version}-g0", f"v{version}-g1")):
                producer.push(
                    [
                        trajectory(group_id, index, 2, input_ids=[0, 1, 2, 3, 9], reward=group + index / 2)
                        for index in range(2)
                    ]
                )
            batch = delivered_batch(queue, join(url, run))
            tracker.log(batch, {"loss": 0.5 + version})
            queue.trained(batch)
            found.append(batch)
    return found


def check_rows(rows: Any, version: int) -> None:
    """The rows of a table of three rollouts: the least reward, one between, the greatest."""
    lines = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    assert [(line["version"], line["reward"]) for line in lines] == [
        (version, 0.0),
        (version, 1.0),
        (version, 1.5),
    ]
    assert {(line["prompt"], line["answer"]) for line in lines} == {("zero one", f"two three {HOSTILE}")}
    assert lines[2]["advantage"] > 0 > lines[0]["advantage"]


def test_wandb(redis_url: str, run: str, tmp_path: Path) -> None:
    import wandb

    batches = trained(redis_url, run, "wandb", project="agents")
    assert wandb.run is None
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    history = list(_wandb_history(next(folder.glob("*.wandb"))))
    scores = {line["version"]: line["critic/score/mean"] for line in history if "critic/score/mean" in line}
    assert scores == {batch.version: batch.metrics["critic/score/mean"] for batch in batches}
    assert [line["loss"] for line in history if "loss" in line] == [0.5, 1.5]
    tables = [line["rollouts/path"] for line in history if "rollouts/path" in line]
    for version, path in enumerate(tables):
        table = json.loads((folder / "files" / path).read_text())
        assert table["columns"] == list(COLUMNS)
        check_rows(table["data"], version)
    assert len(tables) == 2


def _wandb_history(path: Path) -> Iterator[dict[str, Any]]:
    """What a run was logged, from the log that wandb keeps of it: LevelDB's, behind a header of its own."""
    from wandb.proto import wandb_internal_pb2

    raw, at, data = path.read_bytes(), 7, b""
    while at < len(raw):
        if BLOCK - at % BLOCK < 7:  # no head of a part fits into the block
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        data += raw[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of a record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            data = b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_tensorboard(redis_url: str, run: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    batches = trained(redis_url, run, "tensorboard", log_dir=str(tmp_path / "logs"))
    events = EventAccumulator(str(tmp_path / "logs"), size_guidance={"tensors": 0})
    events.Reload()
    scores = [(event.step, event.value) for event in events.Scalars("critic/score/mean")]
    assert scores == [(batch.version, pytest.approx(batch.metrics["critic/score/mean"])) for batch in batches]
    assert [event.value for event in events.Scalars("loss")] == [0.5, 1.5]
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("rollouts/text_summary")]
    for version, text in enumerate(texts):
        head, line, *rows = text.splitlines()
        assert head == f"| {' | '.join(COLUMNS)} |"
        assert len(rows) == 3
        assert rows[0].startswith(f"| {version} | v{version}-g0 | 0 |")
        assert rows[0].endswith("| zero one | two three &lt;b>&#124; |")
        assert {row.count("|") for row in (head, line, *rows)} == {len(COLUMNS) + 1}
    assert len(texts) == 2


def test_mlflow(redis_url: str, run: str) -> None:
    import mlflow

    batches = trained(redis_url, run, "mlflow", run_name="exp1")
    assert mlflow.active_run() is None
    (found,) = mlflow.search_runs(output_format="list")
    client = mlflow.MlflowClient()
    history = client.get_metric_history(found.info.run_id, "critic/score/mean")
    assert [(metric.step, metric.value) for metric in history] == [
        (batch.version, pytest.approx(batch.metrics["critic/score/mean"])) for batch in batches
    ]
    assert [metric.value for metric in client.get_metric_history(found.info.run_id, "loss")] == [0.5, 1.5]
    for version in range(2):
        table = mlflow.load_table(f"rollouts/{version:06}.json", run_ids=[found.info.run_id])
        assert list(table.columns) == list(COLUMNS)
        check_rows(table.values.tolist(), version)


def test_trackio(redis_url: str, run: str) -> None:
    import trackio

    batches = trained(redis_url, run, "trackio", project="agents", name="exp1")
    (found,) = trackio.Api().runs("agents")
    logs = trackio.SQLiteStorage.get_logs("agents", found.name)
    scores = [(line["step"], line["critic/score/mean"]) for line in logs if "critic/score/mean" in line]
    assert scores == [(batch.version, batch.metrics["critic/score/mean"]) for batch in batches]
    assert [line["loss"] for line in logs if "loss" in line] == [0.5, 1.5]
    tables = [line["rollouts"] for line in logs if "rollouts" in line]
    for version, table in enumerate(tables):
        check_rows([[row[name] for name in COLUMNS] for row in table["_value"]], version)
    assert len(tables) == 2


def test_a_run_that_is_there_is_used_and_stays(redis_url: str, run: str) -> None:
    import mlflow
    import wandb

    with wandb.init(project="agents") as outer:
        trained(redis_url, run, "wandb", batches=1)
        assert wandb.run is outer
    with mlflow.start_run() as outer:
        trained(redis_url, f"{run}-2", "mlflow", batches=1)
        assert mlflow.active_run().info.run_id == outer.info.run_id


def test_a_tracker_that_fails_ends_no_training(
    redis_url: str, run: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(SummaryWriter, "add_scalar", fail)
    assert len(trained(redis_url, run, "tensorboard")) == 2
    assert "TensorBoard logs nothing of this: OSError: no space left" in caplog.text


def test_names_and_numbers_are_checked(redis_url: str, run: str) -> None:
    queue = TrainerQueue(redis_url, run)
    with pytest.raises(SettingError, match="to is 'tensorbord', needs one of wandb, tensorboard"):
        sa.track(queue, "tensorbord")
    with pytest.raises(SettingError, match="rollouts is -1, needs a whole number, 0 or more"):
        sa.track(queue, "tensorboard", rollouts=-1)
    assert os.environ["WANDB_MODE"] == "offline"
    queue.close()
