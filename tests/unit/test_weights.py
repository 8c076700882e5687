"""Weights as files: whole or not there, by version, from torch or numpy."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamadv import weights
from streamadv.errors import MissingDependencyError, SettingError, WeightsMissingError


def model(value: float) -> torch.nn.Linear:
    linear = torch.nn.Linear(2, 3)
    torch.nn.init.constant_(linear.weight, value)
    return linear


def test_the_newest_version_is_loaded_once(tmp_path: Path) -> None:
    target = model(9)
    for folder in (tmp_path, tmp_path / "deleted"):
        loader = weights.Loader(folder)
        assert not loader.is_current
        with pytest.raises(WeightsMissingError, match=r"no weights in .*publish"):
            loader.refresh(target)
    loader = weights.Loader(tmp_path)
    for version in (0, 1):
        weights.publish(tmp_path, version, model(version).state_dict())
    assert loader.refresh(target) == loader.version == 1
    assert torch.equal(target.weight, model(1).weight)
    torch.nn.init.constant_(target.weight, 5)
    assert loader.refresh(target) == 1
    assert target.weight[0, 0] == 5
    assert loader.is_current
    weights.publish(tmp_path, 2, model(2).state_dict())
    assert not loader.is_current
    assert loader.refresh(target) == 2
    assert target.weight[0, 0] == 2


def test_weights_are_on_the_disk_before_they_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[list[str]] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append([path.name for path in tmp_path.iterdir()]))
    weights.publish(tmp_path, 3, {"w": np.zeros(1)})
    name = "weights-000003.safetensors"
    assert synced == [[f".{name}.{os.getpid()}"], [name]]


def test_numpy_users_need_no_torch(tmp_path: Path) -> None:
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7)}
    uri = weights.publish(tmp_path, 3, arrays)
    loaded: dict[str, Any] = {}
    assert weights.load(uri, loaded.update) == 3
    assert {name: array.tolist() for name, array in loaded.items()} == {"w": [[0, 1, 2], [3, 4, 5]], "n": 7}


def test_strided_arrays_are_written_as_they_read(tmp_path: Path) -> None:
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {
        "turned": whole.T,
        "every-other": whole[:, ::2],
        "reversed": whole[::-1],
        "big": whole.astype(">f4"),
    }
    loaded: dict[str, Any] = {}
    weights.load(weights.publish(tmp_path, 0, arrays), loaded.update)
    assert {name: array.tolist() for name, array in loaded.items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


def test_what_a_killed_process_has_left_goes_with_its_version(tmp_path: Path) -> None:
    left = tmp_path / ".weights-000001.safetensors.4711"
    left.touch()
    for version, there in ((1, True), (2, True), (3, False)):
        weights.publish(tmp_path, version, model(version).state_dict(), keep=2)
        assert left.exists() == there, "another process may still be writing it"


def test_a_uri_leads_to_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "shared weights"
    uri = weights.publish(folder, 12, model(12).state_dict())
    assert uri.startswith("file:///")
    assert " " not in uri
    target = model(0)
    assert weights.load(uri, target) == weights.load(weights.path_of(folder, 12), target) == 12
    with pytest.raises(WeightsMissingError, match=r"weights-000013.* is not there"):
        weights.load(weights.path_of(folder, 13), target)
    with pytest.raises(SettingError, match="only file: URIs"):
        weights.load("s3://bucket/weights", target)


def test_tied_and_strided_weights_are_written_whole(tmp_path: Path) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    weights.publish(tmp_path, 0, {"a": tied, "b": tied, "c": tied.T, "half": tied.bfloat16()})
    loaded: dict[str, Any] = {}

    class Target:
        def load_state_dict(self, tensors: dict[str, Any]) -> None:
            loaded.update(tensors)

    weights.load(weights.path_of(tmp_path, 0), Target())
    assert torch.equal(loaded["a"], tied)
    assert torch.equal(loaded["b"], tied)
    assert torch.equal(loaded["c"], tied.T)
    assert loaded["half"].dtype is torch.bfloat16
    with pytest.raises(SettingError, match="numpy has no dtype"):
        weights.load(weights.path_of(tmp_path, 0), loaded.update)


def test_a_file_has_the_rights_that_the_process_gives_new_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        weights.publish(tmp_path, 1, {"a": np.zeros(3)})
    finally:
        os.umask(before)
    assert stat.S_IMODE(weights.path_of(tmp_path, 1).stat().st_mode) == 0o640


def test_unfinished_and_foreign_files_are_no_versions(tmp_path: Path) -> None:
    (tmp_path / ".weights-000007.safetensors.123").write_bytes(b"half")
    (tmp_path / "weights-7.safetensors").write_bytes(b"")
    assert weights.newest(tmp_path) is None
    weights.path_of(tmp_path, 7).write_bytes(b"no such file")
    with pytest.raises(SettingError, match=r"is no file of `weights\.publish`"):
        weights.Loader(tmp_path).refresh(model(0))


def test_what_is_no_regular_file_is_no_version(tmp_path: Path) -> None:
    """Others may write into a shared folder, too."""
    os.mkfifo(weights.path_of(tmp_path, 99))
    weights.path_of(tmp_path, 0).mkdir()
    weights.publish(tmp_path, 12, {"w": np.zeros(1)}, keep=1)
    assert weights.versions(tmp_path) == [12]
    assert weights.Loader(tmp_path).refresh(lambda _: None) == 12
    weights.publish(tmp_path, 3, {"w": np.zeros(1)}, keep=1)
    assert weights.versions(tmp_path) == [3]


def test_opening_a_fifo_stops_nobody(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    both_ends = os.open(fifo, os.O_RDWR)  # else who opens it would wait for ever
    try:
        with pytest.raises(SettingError, match=r"fifo is no file of `weights\.publish`: no regular file"):
            weights.load(fifo.as_uri(), lambda _: None)
    finally:
        os.close(both_ends)


@pytest.mark.parametrize(
    "source",
    [
        *("", "/", "/proc/self/mem", "/dev/null", "\0", "\ud800", "x" * 10**6, "x/" * 10**6),
        *("file://[x/", "file:///%00", f"file:///{'x' * 10**6}", f"s3://{'x' * 10**6}", "file:///%1b[31m"),
    ],
    ids=lambda source: ascii(source[:20]),
)
def test_what_cannot_be_read_is_one_bounded_line(source: str) -> None:
    with pytest.raises((SettingError, WeightsMissingError)) as error:
        weights.load(source, lambda _: None)
    text = str(error.value)
    assert len(text) < 1000
    assert text.isprintable()


@pytest.mark.parametrize("version", ["-3", "", "1.5", "٣", "9" * 5000, None])
def test_a_version_is_a_whole_number(tmp_path: Path, version: str | None) -> None:
    path = weights.path_of(tmp_path, 3)
    weights.save(path, {"w": np.zeros(1)}, None if version is None else {"version": version})
    with pytest.raises(SettingError, match=r"is no file of `weights\.publish`: version is '.{0,60}'"):
        weights.load(path, lambda _: None)


def test_a_version_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        weights.publish(tmp_path, 0, {"a": object()})
    assert list(tmp_path.iterdir()) == []


def test_so_many_versions_stay(tmp_path: Path) -> None:
    for version in range(25):
        weights.publish(tmp_path, version, {"w": np.zeros(1)}, keep=3, keep_every=10)
    assert weights.versions(tmp_path) == [0, 10, 20, 22, 23, 24]
    assert len(list(tmp_path.iterdir())) == 6


def test_the_version_published_last_is_the_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trainer has gone back to a checkpoint: nobody loads what came after it."""
    loader, target = weights.Loader(tmp_path), model(9)
    for version in range(5):
        weights.publish(tmp_path, version, model(version).state_dict(), keep_every=2)
    assert loader.refresh(target) == 4
    with caplog.at_level("INFO"):
        weights.publish(tmp_path, 2, model(7).state_dict())
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"{tmp_path}: version 2 is published, so versions 3 to 4 that lay there are taken back")
    ]
    assert weights.versions(tmp_path) == [0, 1, 2]
    assert loader.refresh(target) == 2
    assert target.weight[0, 0] == 7


@pytest.mark.processes
def test_a_trainer_that_was_replaced_leaves_the_versions_of_the_newer_one(tmp_path: Path) -> None:
    """Its `trained` is refused, but it publishes before that."""
    weights.publish(tmp_path, 1, {"w": np.zeros(1)})
    newer = f"""
import numpy
from streamadv import weights

for version in (1, 2, 3):
    weights.publish({str(tmp_path)!r}, version, {{"w": numpy.ones(1)}})
"""
    subprocess.run([sys.executable, "-c", newer], check=True)
    weights.publish(tmp_path, 2, {"w": np.zeros(1)})
    assert weights.newest(tmp_path) == 3


@pytest.mark.parametrize(
    ("version", "options", "message"),
    [
        (-1, {}, "version is -1"),
        ("1", {}, "version is '1'"),
        (1, {"keep": 0}, "keep is 0"),
        (1, {"keep_every": True}, "k"),
    ],
)
def test_wrong_arguments(tmp_path: Path, version: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        weights.publish(tmp_path, version, {"w": np.zeros(1)}, **options)


def test_a_module_is_no_tensors_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"tensors is a Linear, needs .* model\.state_dict\(\)"):
        weights.publish(tmp_path, 1, torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_without_safetensors_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingDependencyError, match=r"needs safetensors: pip install 'streamadv\[torch\]'"):
        weights.publish(tmp_path, 0, {"w": np.zeros(1)})
