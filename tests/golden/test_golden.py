"""One test per vector file: every call in it, made through streamadv's public functions.

`STREAMADV_GOLDEN` names another folder of vectors. A function is mapped, or stands with its reason in one of
the tables of `mapping.py`: functions not in the catalogue (the file is still checked against its
manifest entry) and calls that raise in the peer but have a defined result here. A third one names functions
that raise in the peer when there are too few tokens for a statistic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest

from streamadv.errors import StreamadvError

from .compare import check_entry, compare, entries, function_of, inputs, load, trainable_tokens
from .mapping import DEFINED_FOR_FEW_TOKENS, DEFINED_HERE, MAPPING, NOT_IN_CATALOGUE


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
        given = inputs(arrays, variant)
        if variant.get("raises"):
            defined = {name, f"{name}.{variant['name']}"} & DEFINED_HERE.keys() or (
                name in DEFINED_FOR_FEW_TOKENS and trainable_tokens(given) < 2
            )
            with contextlib.suppress(StreamadvError) if defined else pytest.raises(StreamadvError):
                MAPPING[name](given, kwargs)
            continue
        got = MAPPING[name](given, kwargs)
        prefix = f"out.{variant['name']}."
        want = {output: arrays[prefix + output] for output in variant.get("outputs", ())}
        compare(got, want, where)


def test_tables_do_not_overlap() -> None:
    assert not MAPPING.keys() & NOT_IN_CATALOGUE.keys()
