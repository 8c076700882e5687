"""What status says admission reserves is what the scripts reserve, whatever a shard's hash `sizes` holds."""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

import fakeredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamadv.status.shard import Reservation, reservation_of
from tests.shares import examples

_LIB: Final = resources.files("streamadv") / "lua" / "lib"
LIBRARY: Final = "\n".join((_LIB / name).read_text() for name in ("sizes.lua", "slot_bytes.lua"))
SCRIPT: Final = f"""
{LIBRARY}
local known = read_sizes(KEYS[1])
local bytes = slot_bytes(known, tonumber(ARGV[1]))
return {{string.format('%.0f', reserved_bytes(known, bytes)), string.format('%.0f', bytes)}}
"""

COUNTS: Final = st.integers(0, 5000)
#: A few payloads that are larger than all others: whether they are rare decides.
HISTOGRAMS: Final = st.dictionaries(
    st.one_of(st.integers(0, 100), st.integers(0, 250)).map("h{}".format),
    st.one_of(st.integers(0, 4), COUNTS),
    max_size=12,
)
UNFILLED: Final = st.dictionaries(st.integers(1, 1 << 30).map("u{}".format), st.integers(1, 500), max_size=6)
TOTALS: Final = st.fixed_dictionaries(
    {}, optional={"in": st.integers(0, 1 << 40), "out": st.integers(0, 1 << 40)}
)
#: Sums stay below 2^53: Lua counts in doubles.
LIMITS: Final = st.one_of(st.just(1 << 40), st.integers(1, 1 << 32))
FOREIGN: Final = st.dictionaries(
    st.sampled_from(["n", "h", "u", "h-1", "hx", "u1.5", "n2", "h" + "9" * 16, "u" + "9" * 16]),
    COUNTS,
    max_size=3,
)


@pytest.fixture(scope="module")
def client() -> Any:
    return fakeredis.FakeRedis()


@settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(histogram=HISTOGRAMS, unfilled=UNFILLED, totals=TOTALS, foreign=FOREIGN, limit=LIMITS)
def test_python_reserves_what_lua_reserves(
    client: Any,
    histogram: dict[str, int],
    unfilled: dict[str, int],
    totals: dict[str, int],
    foreign: dict[str, int],
    limit: int,
) -> None:
    fields = {name: str(count) for name, count in {**foreign, **histogram, **unfilled, **totals}.items()}
    client.flushall()
    if fields:
        client.hset("sizes", mapping=fields)
    total, slot = map(int, client.eval(SCRIPT, 1, "sizes", limit))
    assert reservation_of(fields, limit) == Reservation(total_bytes=total, slot_bytes=slot)
