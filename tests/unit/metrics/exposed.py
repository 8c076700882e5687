"""What `/metrics` can show: every instrument with a sample."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from streamadv import metrics
from streamadv.metrics import instruments
from streamadv.metrics.instruments import CLIP_SHARES, KL_ESTIMATES
from streamadv.status import exported

STAGES: dict[str, metrics.Kind] = {
    "producer": "producer",
    "grouper": "grouper",
    "judge": "scorer",
    "advantage": "advantage",
    "trainer": "trainer",
    "gateway": "gateway",
}


def report_everything() -> None:
    """Begin every stage and call every function, so that every metric of a process has a sample."""
    for stage, kind in STAGES.items():
        metrics.begin_stage(stage, kind)
    for event in instruments.EVENTS:
        metrics.entries("grouper", event, 2)  # type: ignore[arg-type]
    with metrics.timed("grouper", "take"), metrics.wait("producer"):
        pass
    metrics.retried("grouper", "connection")
    metrics.group_recreated("grouper")
    metrics.groups_ended([metrics.EndedGroup("complete", "math", [1.0, 0.0])])
    metrics.succeeded("producer")
    metrics.work_item_computed([0.5], [3], [1], [0], [2.0], is_weights=[1.0])
    metrics.training_metrics(
        dict.fromkeys([*KL_ESTIMATES, *CLIP_SHARES, "critic/kl_coef", metrics.IS_MEAN], 0.1)
    )
    metrics.batch_delivered(3, [1], [0], [1], 10, [2.0])


def of_processes() -> Iterator[Metric]:
    """Families that processes show, with samples; those of the client's own collectors too."""
    report_everything()
    yield from text_string_to_metric_families(generate_latest(metrics.REGISTRY).decode())


def label_names() -> dict[str, set[str]]:
    """Every sample name that `/metrics` can show, with its labels."""
    found = {sample.name: set(sample.labels) for family in of_processes() for sample in family.samples}
    found["streamadv_blocked"] = {"stage", "reason"}  # only while somebody is blocked
    for name, fact in exported.FACTS.items():
        found[exported.PREFIX + name] = set(fact.labels)
    return found
