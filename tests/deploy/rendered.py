"""The chart, rendered without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "streamadv"
EXAMPLES: Final = ROOT / "deploy" / "helm" / "examples"

Manifest = dict[str, Any]


def example(name: str) -> Manifest:
    """Values of an example."""
    values: Manifest = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return values


def render(values: Manifest, release: str = "demo") -> dict[tuple[str, str], Manifest]:
    """Manifests by kind and name. Raises helm_python.HelmError for values that the chart refuses."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values, name=release, namespace="rl")
    manifests = [
        manifest
        for path, text in files.items()
        if path.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest
    ]
    by_name = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}
    assert len(by_name) == len(manifests), "two manifests have the same kind and name"
    return by_name


def pod_of(workload: Manifest) -> Manifest:
    """The pod's spec of a Deployment or StatefulSet."""
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def environment_of(workload: Manifest) -> dict[str, Any]:
    """Variables of its first container: a value, or where it comes from."""
    return {
        variable["name"]: variable.get("value", variable.get("valueFrom"))
        for variable in pod_of(workload)["containers"][0]["env"]
    }
