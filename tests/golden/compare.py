"""Reading the vector files and comparing results with them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamadv.columns import Array

RTOL, ATOL = 1e-4, 1e-5

Inputs = dict[str, Any]
Function = Callable[[Inputs, dict[str, Any]], Mapping[str, Any]]


def folder() -> Path:
    return Path(os.environ.get("STREAMADV_GOLDEN") or Path(__file__).parent / "vectors")


def entries() -> list[dict[str, Any]]:
    manifest: dict[str, Any] = json.loads((folder() / "manifest.json").read_text())
    listed: list[dict[str, Any]] = manifest["entries"]
    return listed


def function_of(entry: Mapping[str, Any]) -> str:
    return str(entry["id"]).rsplit("_", 1)[0]


def load(entry: Mapping[str, Any]) -> dict[str, Array]:
    with np.load(folder() / entry["file"], allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def inputs(arrays: Mapping[str, Array], variant: Mapping[str, Any]) -> Inputs:
    """The call's inputs as tensors (text as lists), with the replacements its kwargs ask for.

    "variant" holds the call's name: some functions are recorded under one name with equal kwargs.
    """
    given: Inputs = {"variant": variant["name"]}
    for key, array in arrays.items():
        if key.startswith("in."):
            given[key.removeprefix("in.")] = (
                array.tolist() if array.dtype.kind in "U" else torch.from_numpy(array)
            )
    for name, value in variant["kwargs"].items():
        if name not in given:
            continue
        if value is None:
            given[name] = None
        elif value == "all zeros":
            given[name] = torch.zeros_like(given[name])
    return given


def trainable_tokens(given: Inputs) -> int:
    """How many there are in a call's mask."""
    mask = given["response_mask"] if "response_mask" in given else given["mask"]
    return int((mask != 0).sum())


def check_entry(entry: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """The file holds what the manifest says."""
    for item in entry["inputs"]:
        array = arrays[f"in.{item['name']}"]
        assert list(array.shape) == item["shape"], item["name"]
        assert str(array.dtype) == item["dtype"] or array.dtype.kind == "U", item["name"]
    for variant in entry["variants"]:
        for output in variant.get("outputs", ()):
            assert f"out.{variant['name']}.{output}" in arrays


def compare(got: Mapping[str, Any], want: Mapping[str, Array], where: str) -> None:
    """Every recorded output is there and equal: exactly for whole numbers, text and masks."""
    for name, expected in want.items():
        if name == "metric_values":
            continue
        if name == "metric_names":
            _compare_metrics(got["metrics"], expected, want["metric_values"], where)
            continue
        result = got[name]
        if expected.dtype.kind == "U":
            assert [str(item) for item in np.asarray(result).ravel()] == expected.ravel().tolist(), (
                f"{where}.{name}"
            )
            continue
        result = np.asarray(result.detach() if isinstance(result, torch.Tensor) else result)
        assert result.shape == expected.shape, f"{where}.{name}: shape {result.shape}, not {expected.shape}"
        exact = expected.dtype.kind in "iub" or "mask" in name
        _close(result, expected, f"{where}.{name}", exact)


def _compare_metrics(got: Mapping[str, float], names: Array, values: Array, where: str) -> None:
    missing = [name for name in names.tolist() if name not in got]
    assert not missing, f"{where}: metrics {missing} missing"
    for name, value in zip(names.tolist(), values, strict=True):
        _close(np.asarray(float(got[name])), value, f"{where}.{name}", exact=False)


def _close(result: Array, expected: Array, where: str, exact: bool) -> None:
    if exact:
        np.testing.assert_array_equal(result.astype(np.float64), expected.astype(np.float64), where)
    else:
        result, expected = result.astype(np.float64), np.asarray(expected).astype(np.float64)
        np.testing.assert_allclose(result, expected, RTOL, ATOL, equal_nan=True, err_msg=where)
