"""One test per vector file: every call in it, made through streamadv's public functions.

`STREAMADV_GOLDEN` names another folder of vectors. A function is mapped, or stands with its reason in the table of
those that are not in the catalogue (the file is still checked against its manifest entry). A call that raises in
the peer raises here too, or has the value that `defined.py` states; one that raises by a defect of the peer may give
anything. `REFUSED_HERE` lists calls that raise here alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

import pytest

from streamadv.errors import StreamadvError

from .compare import NotOfferedError, check_entry, compare, compare_stated, entries, function_of, inputs, load
from .defined import REFUSED_HERE, stated
from .mapping import MAPPING, METRICS_NOT_OFFERED, NOT_IN_CATALOGUE, OUTPUTS_NOT_OFFERED


def calls_of(entry: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(function_of(entry), variant["name"]) for variant in entry["variants"]}


#: One recording of a function has nearly all ways to call it; others repeat them on other shapes and rewards.
FIRST: Final = set[tuple[str, str]]().union(
    *(calls_of(entry) for entry in entries() if entry["id"].endswith("_o1"))
)


@pytest.mark.parametrize(
    "entry",
    [
        entry
        if entry["id"].endswith("_o1") or not calls_of(entry) <= FIRST
        else pytest.param(entry, marks=pytest.mark.release)
        for entry in entries()
    ],
    ids=lambda entry: str(entry["id"]),
)
def test_vectors(entry: Mapping[str, Any]) -> None:
    arrays = load(entry)
    check_entry(entry, arrays)
    name = function_of(entry)
    if name in NOT_IN_CATALOGUE:
        return
    assert name in MAPPING, f"{name} is neither mapped nor listed in NOT_IN_CATALOGUE"
    for variant in entry["variants"]:
        where = f"{entry['id']}.{variant['name']}"
        kwargs = dict(variant["kwargs"])
        given = inputs(arrays, variant)
        if variant.get("peer_defect"):
            with contextlib.suppress(StreamadvError):
                MAPPING[name](given, kwargs)
            continue
        if f"{name}.{variant['name']}" in REFUSED_HERE:
            with pytest.raises(StreamadvError):
                MAPPING[name](given, kwargs)
            continue
        expected = stated(name, variant["name"], given, kwargs) if variant.get("raises") else None
        if variant.get("raises") and expected is None:
            with pytest.raises(StreamadvError):
                MAPPING[name](given, kwargs)
            continue
        try:
            got = MAPPING[name](given, kwargs)
        except NotOfferedError:
            continue
        if expected is not None:
            compare_stated(got, expected, where)
            continue
        prefix = f"out.{variant['name']}."
        want = {output: arrays[prefix + output] for output in variant.get("outputs", ())}
        if name in METRICS_NOT_OFFERED:
            want.pop("metric_names", None)
        for output in OUTPUTS_NOT_OFFERED.get(name, ()):
            want.pop(output, None)
        compare(got, want, where, variant.get("tolerance"))


def test_tables_do_not_overlap() -> None:
    assert not MAPPING.keys() & NOT_IN_CATALOGUE.keys()
