"""One test per vector file: every call in it, made through streamadv's public functions.

`STREAMADV_GOLDEN` names another folder of vectors. A function is mapped, or stands with its reason in one of
the two tables of `mapping.py`: functions not in the catalogue (the file is still checked against its
manifest entry) and calls that raise in the peer but have a defined result here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest

from streamadv.errors import StreamadvError

from .compare import check_entry, compare, entries, function_of, inputs, load
from .mapping import DEFINED_HERE, MAPPING, NOT_IN_CATALOGUE


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: str(entry["id"]))
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
        if variant.get("raises"):
            if not {name, f"{name}.{variant['name']}"} & DEFINED_HERE.keys():
                with pytest.raises(StreamadvError):
                    MAPPING[name](inputs(arrays, variant), kwargs)
                continue
            with contextlib.suppress(StreamadvError):
                MAPPING[name](inputs(arrays, variant), kwargs)
            continue
        got = MAPPING[name](inputs(arrays, variant), kwargs)
        prefix = f"out.{variant['name']}."
        want = {output: arrays[prefix + output] for output in variant.get("outputs", ())}
        compare(got, want, where)


def test_tables_do_not_overlap() -> None:
    assert not MAPPING.keys() & NOT_IN_CATALOGUE.keys()
