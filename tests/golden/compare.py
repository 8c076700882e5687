"""Reading the vector files and comparing results with them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from streamadv.trajectory.columns import Array

TOLERANCE: Final = 3e-5  # float64 redone from the recorded inputs differs from the peers by half of it

Inputs = dict[str, Any]


class NotOfferedError(Exception):
    """A mapped function was called in a way that streamadv does not offer; says why."""


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

    "variant" holds the call's name: some functions are recorded under one name with equal kwargs. The keyword argument
    dtype "bfloat16" rounds the numbers.
    """
    given: Inputs = {"variant": variant["name"]}
    rounded = variant["kwargs"].get("dtype") == "bfloat16"
    for key, array in arrays.items():
        if key.startswith("in."):
            name = key.removeprefix("in.")
            given[name] = array.tolist() if array.dtype.kind in "U" else torch.from_numpy(array)
            if rounded and array.dtype.kind == "f":
                given[name] = given[name].to(torch.bfloat16).to(torch.float32)
    for name, value in variant["kwargs"].items():
        if name not in given:
            continue
        if value is None:
            given[name] = None
        elif value == "all zeros":
            given[name] = torch.zeros_like(given[name])
        elif isinstance(value, str) and value in given and value != "variant":
            given[name] = given[value]
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


def compare(
    got: Mapping[str, Any],
    want: Mapping[str, Array],
    where: str,
    tolerance: Mapping[str, float] | None = None,
) -> None:
    """Every recorded output is there and equal: exactly for whole numbers, text and masks.

    tolerance: the call's own, relative and absolute, where the peer computes in bfloat16 or its float32 is inexact.
    NAME_f32 is the peer's float32 result of a call in bfloat16; a function that computes in float32 anyway has NAME.
    """
    metric_tolerance = None if any(name.endswith("_f32") for name in want) else tolerance
    for name, expected in want.items():
        if name == "metric_values":
            continue
        if name == "metric_names":
            _compare_metrics(got["metrics"], expected, want["metric_values"], where, metric_tolerance)
            continue
        result = got[name] if name in got else got[name.removesuffix("_f32")]
        if expected.dtype.kind == "U":
            assert [str(item) for item in np.asarray(result).ravel()] == expected.ravel().tolist(), (
                f"{where}.{name}"
            )
            continue
        result = np.asarray(result.detach() if isinstance(result, torch.Tensor) else result)
        if expected.dtype.kind in "iub" or "mask" in name:
            np.testing.assert_array_equal(result.astype(np.float64), expected.astype(np.float64), where)
        else:
            assert_close(result, expected, f"{where}.{name}", None if name.endswith("_f32") else tolerance)


def compare_stated(got: Mapping[str, Any], stated: Mapping[str, Array], where: str) -> None:
    """Each array of a result is the stated one; `no_metrics` states that there are none."""
    for name, result in got.items():
        if name == "metrics":
            assert not stated.get("no_metrics", False) or result == {}, f"{where}: {result}"
        elif result is not None:
            assert_close(np.asarray(result), stated[name], f"{where}.{name}")


def assert_close(
    result: Array, expected: Any, where: str, tolerance: Mapping[str, float] | None = None
) -> None:
    """Equal within TOLERANCE of the array's largest value (of 1 for smaller ones); NaN and inf at the same places.

    What float32 leaves of a sum depends on the largest numbers in it: a share of each element would be too strict
    where they cancel and too lax for the largest.
    """
    result, expected = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    assert result.shape == expected.shape, f"{where}: shape {result.shape}, not {expected.shape}"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(result[~finite], expected[~finite], where)
    if tolerance:
        np.testing.assert_allclose(result[finite], expected[finite], **tolerance, err_msg=where)
        return
    largest = np.abs(expected[finite]).max(initial=1.0)
    np.testing.assert_allclose(result[finite], expected[finite], 0, TOLERANCE * largest, err_msg=where)


def _compare_metrics(
    got: Mapping[str, float], names: Array, values: Array, where: str, tolerance: Mapping[str, float] | None
) -> None:
    missing = [name for name in names.tolist() if name not in got]
    assert not missing, f"{where}: metrics {missing} missing"
    for name, value in zip(names.tolist(), values, strict=True):
        assert_close(np.asarray(float(got[name])), value, f"{where}.{name}", tolerance)
