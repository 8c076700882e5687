"""Every promise of docs/reference/guarantees.md names the tests that hold it, and they are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest

from streamadv.advantage import worker
from streamadv.batch.progress import DURABILITY_WINDOW_S
from streamadv.grouping.grouper import HOUSEKEEPING_S
from streamadv.producer.resend import MAX_RESEND_BYTES, RESEND_WINDOW_S
from streamadv.run import hangs, heartbeats
from streamadv.run.dead_letters import DEAD_KEPT
from streamadv.run.manifest import DEFAULTS
from streamadv.trajectory.adapters.records import MAX_FILE_BYTES
from streamadv.trajectory.interchange import MAX_LINE_BYTES
from streamadv.trajectory.packet import MAX_HEADER_BYTES, SCHEMA_VERSION

from .story import ROOT

PAGE: Final = "docs/reference/guarantees.md"
#: Sections without promises.
WITHOUT: Final = ("# Guarantees", "## Not promised", "## Prompts of other trainers")
HELD_BY: Final = "*Held by* "
#: What begins a block: a list item, a row of a table (its first two lines are none), or a paragraph.
ITEM: Final = re.compile(r"^(?=- )", re.MULTILINE)

EXAMPLE: Final = """\
# Guarantees

Introduction.

## A section

One.

*Held by* `test_a`,
`test_b`.

Two.

- Three.
  *Held by* `test_c`.
- Four.

| what | held by |
|---|---|
| Five `test_no` | `test_d` |
| Six | |

## Not promised

Seven.
"""


class Promise(NamedTuple):
    """One paragraph, list item or row of a table, and the tests that it names."""

    text: str
    tests: list[str]


def names_of(text: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", text)


def promises(page: str) -> Iterator[Promise]:
    for section in re.split(r"^(?=#+ )", page, flags=re.MULTILINE):
        title, _, body = section.partition("\n")
        if title in ("", *WITHOUT):
            continue
        blocks = re.split(r"\n{2,}", body.strip())
        for block, after in zip(blocks, [*blocks[1:], ""], strict=True):
            if block.startswith("| "):
                yield from (Promise(row, names_of(row.split("|")[-2])) for row in block.splitlines()[2:])
            elif block.startswith("- "):
                for item in filter(None, ITEM.split(block)):
                    text, _, held_by = item.partition(HELD_BY)
                    yield Promise(text, names_of(held_by))
            elif not block.startswith(HELD_BY):
                yield Promise(block, names_of(after) if after.startswith(HELD_BY) else [])


TEST: Final = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)
PROMISES: Final = list(promises((ROOT / PAGE).read_text()))


@pytest.fixture(scope="module")
def defined() -> set[str]:
    """Names of all test functions."""
    return {name for path in (ROOT / "tests").rglob("test_*.py") for name in TEST.findall(path.read_text())}


def test_a_promise_without_a_test_is_found() -> None:
    assert [promise.tests for promise in promises(EXAMPLE)] == [
        ["test_a", "test_b"],
        [],
        ["test_c"],
        [],
        ["test_d"],
        [],
    ]


def test_every_promise_names_the_tests_that_hold_it() -> None:
    assert len(PROMISES) > 40
    assert [promise.text for promise in PROMISES if not promise.tests] == []


def test_the_tests_that_it_names_are_there(defined: set[str]) -> None:
    assert [name for promise in PROMISES for name in promise.tests if name not in defined] == []


@pytest.mark.parametrize(
    ("text", "figure"),
    [
        ("`dedupe_groups` (10^6)", DEFAULTS["dedupe_groups"] == 10**6),
        ("stop counting in pacing after 30 s", heartbeats.PRODUCER_TIMEOUT_S == 30),
        ("the next round of a grouper (each second)", HOUSEKEEPING_S == 1),
        ("a time of more than 10 s", heartbeats.HEARTBEAT_S == 10),
        ("counts as 5 s", heartbeats.WRITE_S == 5),
        ("whose trainer sent a heartbeat within 30 s", heartbeats.RANK_TIMEOUT_S == 30),
        ("a shard keeps at most 10,000", DEAD_KEPT == 10_000),
        ("at every heartbeat (10 s at most)", heartbeats.HEARTBEAT_S == 10),
        ("`resend_window` (5 s, at most 256 MiB)", (RESEND_WINDOW_S, MAX_RESEND_BYTES) == (5, 256 << 20)),
        ("`durability_window` (10 s)", DURABILITY_WINDOW_S == 10),
        ("a header has at most 1 MiB", MAX_HEADER_BYTES == 1 << 20),
        (
            "has at most 64 MiB, a recorded file 1 GiB",
            (MAX_LINE_BYTES, MAX_FILE_BYTES) == (64 << 20, 1 << 30),
        ),
        ("was created with (now 3)", SCHEMA_VERSION == 3),
        ("a scoring function has 5 s for that", hangs.GRACE_S == 5),
        ("advantage worker waits 8 s for the server", worker.SHUTDOWN_S == 8),
    ],
)
def test_figures_of_the_page_are_those_of_the_code(text: str, figure: bool) -> None:
    page = " ".join((ROOT / PAGE).read_text().split())
    assert text in page
    assert figure


def test_so_many_removed_items_and_damaged_inputs_as_the_page_says() -> None:
    """They stand in a script, in the Makefile and in the tests."""
    page = " ".join((ROOT / PAGE).read_text().split())
    for text, file, code in (
        ("the last 1,000 of each shard are kept", "streamadv/lua/lib/malformed.lua", "MALFORMED_KEPT = 1000"),
        ("in 100,000 ways", "Makefile", "STREAMADV_FUZZ_CASES:-100000}"),
        ("3,000 in `make test`", "tests/fuzz/mutations.py", '"STREAMADV_FUZZ_CASES", "3000"'),
    ):
        assert text in page
        assert code in (ROOT / file).read_text(), file
