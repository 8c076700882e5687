"""Weights as files: whole or not there, by version, from torch or numpy."""

from __future__ import annotations

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


def test_numpy_users_need_no_torch(tmp_path: Path) -> None:
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7)}
    uri = weights.publish(tmp_path, 3, arrays)
    loaded: dict[str, Any] = {}
    assert weights.load(uri, loaded.update) == 3
    assert {name: array.tolist() for name, array in loaded.items()} == {"w": [[0, 1, 2], [3, 4, 5]], "n": 7}


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


def test_unfinished_and_foreign_files_are_no_versions(tmp_path: Path) -> None:
    (tmp_path / ".weights-000007.safetensors.123").write_bytes(b"half")
    (tmp_path / "weights-7.safetensors").write_bytes(b"")
    assert weights.newest(tmp_path) is None
    weights.path_of(tmp_path, 7).write_bytes(b"no such file")
    with pytest.raises(SettingError, match=r"is no file of `weights\.publish`"):
        weights.Loader(tmp_path).refresh(model(0))


def test_a_version_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        weights.publish(tmp_path, 0, {"a": object()})
    assert list(tmp_path.iterdir()) == []


def test_so_many_versions_stay(tmp_path: Path) -> None:
    for version in range(25):
        weights.publish(tmp_path, version, {"w": np.zeros(1)}, keep=3, keep_every=10)
    assert weights.versions(tmp_path) == [0, 10, 20, 22, 23, 24]
    assert len(list(tmp_path.iterdir())) == 6


def test_versions_that_are_taken_back_are_gone(tmp_path: Path) -> None:
    loader, target = weights.Loader(tmp_path), model(9)
    for version in range(4):
        weights.publish(tmp_path, version, model(version).state_dict())
    assert loader.refresh(target) == 3
    weights.withdraw(tmp_path, above=2)
    assert loader.refresh(target) == 2
    weights.publish(tmp_path, 3, model(7).state_dict())
    assert loader.refresh(target) == 3
    assert target.weight[0, 0] == 7


def test_newer_weights_in_the_folder_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for version in range(3):
        weights.publish(tmp_path, version, {"w": np.zeros(1)})
    assert caplog.messages == []
    weights.publish(tmp_path, 0, {"w": np.zeros(1)})  # of another run
    (message,) = caplog.messages
    assert (
        "holds weights of version 2, and version 0 is published there: loaders take the newest one" in message
    )
    weights.withdraw(tmp_path, above=0)
    weights.publish(tmp_path, 1, {"w": np.zeros(1)})
    assert len(caplog.messages) == 1


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
