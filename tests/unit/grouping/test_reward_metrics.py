"""The grouper reports the rewards of all groups that end, also of those that a filter drops."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from streamadv import metrics
from streamadv.store.connection import Connection
from tests.support import group_all, join, producing, trajectory


@pytest.fixture(autouse=True)
def _first_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests before may have used up the number of sources that have labels of their own."""
    monkeypatch.setattr(metrics, "_sources", set[str]())


def counted(source: str, kept: str) -> tuple[float, float]:
    """Number and sum of the rewards of groups of this data source."""
    found = {"rewards_total": 0.0, "positive": 0.0, "negative": 0.0}
    for family in text_string_to_metric_families(generate_latest(metrics.REGISTRY).decode()):  # type: ignore[arg-type]
        for sample in family.samples:
            labels = sample.labels
            if sample.name.endswith("_total") and (labels.get("data_source"), labels.get("kept")) == (
                source,
                kept,
            ):
                found[labels.get("sign", sample.name.removeprefix("streamadv_"))] = sample.value
    return found["rewards_total"], found["positive"] - found["negative"]


@pytest.mark.parametrize("has_filter", [True, False])
def test_the_rewards_of_all_groups_are_reported(fake: Connection, has_filter: bool) -> None:
    source = f"maths {has_filter}"
    with producing(fake, "r", {"zero_variance_filter": has_filter}) as producer:
        run = join(fake, "r")
        for group_id, rewards in (("mixed", (1.0, -0.5)), ("solved", (1.0, 1.0))):
            producer.push(
                [
                    trajectory(group_id, index, reward=reward, data_source=source)
                    for index, reward in enumerate(rewards)
                ]
            )
        group_all(run)
    if has_filter:
        assert (counted(source, "yes"), counted(source, "no")) == ((2, 0.5), (2, 2.0))
    else:
        assert (counted(source, "yes"), counted(source, "no")) == ((4, 2.5), (0, 0.0))


def test_the_reward_of_a_baseline_is_none_of_the_policy(fake: Connection) -> None:
    with producing(fake, "r") as producer:
        run = join(fake, "r")
        members = [
            trajectory("g", 0, reward=1.0, data_source="has a baseline"),
            trajectory("g", 1, reward=0.25, data_source="has a baseline"),
        ]
        producer.push([members[0], members[1].model_copy(update={"role": "baseline"})])
        group_all(run)
    assert counted("has a baseline", "yes") == (1, 1.0)
