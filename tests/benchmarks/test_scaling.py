"""`streamadv bench scaling`: the model's arithmetic, and a pipeline measured on a cluster of two primaries."""

from __future__ import annotations

import pytest

from benchmarks import crew as crews
from benchmarks import scaling
from benchmarks.cluster import cluster
from benchmarks.lines import Line
from benchmarks.scaling import LONG, PARTS, SHORT, UTILISATION, Costs, Linear
from streamadv.store.connection import Connection


def costs(**each: float) -> Costs:
    parts = {part: Linear(each.get(part, 10.0), 0.0) for part in PARTS}
    return Costs(parts, naming=5.0, bytes_in=Linear(0, 20), bytes_out=Linear(100, 0))


def test_a_line_goes_through_both_measurements() -> None:
    line = Linear.through(100.0, 1000.0)
    assert line(SHORT) == pytest.approx(100)
    assert line(LONG) == pytest.approx(1000)


def test_the_rate_is_set_by_the_busiest_process_or_by_the_cores() -> None:
    assert costs().rate(SHORT, cores=1) == pytest.approx(1e6 / (10 * len(PARTS)))
    assert costs(advantage=500.0).rate(SHORT, cores=64) == pytest.approx(1e6 / 500)


def test_a_plan_has_a_core_for_what_is_spent() -> None:
    plan = costs(advantage=500.0).plan(tokens_per_second=1e8, tokens=1000)
    assert plan["trajectories_per_second"] == 1e5
    assert plan["advantage"] == pytest.approx(1e5 * 500e-6 / UTILISATION, abs=1)
    assert plan["shards"] == plan["producer"] == plan["grouper"] == 2
    assert plan["trainer"] == 1  # half of its 10 microseconds is naming, which further ranks do not share
    assert plan["runs"] == 1
    assert plan["gigabits_in"] == pytest.approx(1e5 * 20 * 1000 * 8 / 1e9)
    assert plan["gigabits_out"] == pytest.approx(1e5 * 100 * 8 / 1e9)


@pytest.mark.processes
@pytest.mark.server
@pytest.mark.slow
def test_a_pipeline_is_measured_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crews, "QUIET_S", 0.2)
    monkeypatch.setattr(crews, "LEAST_REPORTS", 2)
    line = Line(scaling.KIND, 64, "scaling-test")
    with cluster(2) as (url, servers), scaling._crew(line, url, servers) as crew:
        record = scaling._record("two", line, len(servers), crew.measure(0.2, 0.1))
        with Connection(url) as connection:
            sizes = [
                connection.scripts.dbsize(target_nodes=node) for node in connection.scripts.get_primaries()
            ]
    assert record["per_second"] > 0
    assert record["kilobytes_in"] > 0  # so short a window may hold more that is trained than that is pushed
    assert all(size > 0 for size in sizes)  # both have a shard
