"""The Helm chart: what it renders is valid, fits the command line, and wrong values are refused. No cluster needed."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml

from streamadv.cli import make_parser
from streamadv.run.manifest import RunSettings
from streamadv.settings import Settings
from streamadv.store.urls import PREFIX

from .rendered import CHART, EXAMPLES, ROOT, Manifest, environment_of, example, pod_of, render

KUBERNETES = ("1.29", "1.33")
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
SERVER = {"server": {"url": "redis://redis:6379/0"}}


def workloads(manifests: dict[tuple[str, str], Manifest]) -> list[Manifest]:
    return [manifest for (kind, _), manifest in manifests.items() if kind in ("Deployment", "StatefulSet")]


def deployments(manifests: dict[tuple[str, str], Manifest]) -> list[Manifest]:
    return [manifest for (kind, _), manifest in manifests.items() if kind == "Deployment"]


# Valid


def check(manifest: Manifest) -> None:
    """Raise where the schema of its kind does not allow it; a field the schema does not know is an error too."""
    import cloudcoil.models.keda.v1alpha1 as keda
    import cloudcoil.models.prometheus_operator.v1 as operator
    import kubernetes_validate

    models = {
        "ScaledObject": keda.ScaledObject,
        "PodMonitor": operator.PodMonitor,
        "PrometheusRule": operator.PrometheusRule,
    }
    if model := models.get(manifest["kind"]):
        known = model.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_unset=True)
        unknown = names_in(manifest) - names_in(known)
        assert not unknown, f"{manifest['kind']}: {unknown}"
        return
    for version in KUBERNETES:
        kubernetes_validate.validate(manifest, version, strict=True)


def names_in(value: Any, path: str = "") -> set[str]:
    """Paths of all fields, list positions left out."""
    if isinstance(value, dict):
        return set().union({path}, *(names_in(item, f"{path}.{name}") for name, item in value.items()))
    if isinstance(value, list):
        return set().union({path}, *(names_in(item, path) for item in value))
    return {path}


@pytest.mark.parametrize("name", NAMES)
def test_what_an_example_renders_is_valid(name: str) -> None:
    manifests = render(example(name))
    for manifest in manifests.values():
        check(manifest)
    assert {workload["metadata"]["name"] for workload in workloads(manifests)} >= {
        "demo-streamadv-grouper",
        "demo-streamadv-advantage",
        "demo-streamadv-exporter",
    }


@pytest.mark.parametrize(
    ("kind", "field"), [("Deployment", "replica"), ("ScaledObject", "maxReplicas"), ("PodMonitor", "selectr")]
)
def test_the_check_itself_refuses_unknown_fields(kind: str, field: str) -> None:
    manifest = copy.deepcopy(next(m for (k, _), m in render(example("gpu")).items() if k == kind))
    manifest["spec"][field] = 3
    with pytest.raises(Exception, match=field):
        check(manifest)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"servr": {}}, "servr"),
        ({**SERVER, "grouper": {"replica": 3}}, "replica"),
        ({**SERVER, "runSettings": {"group_deadline": 60}}, "group_deadline"),
        ({**SERVER, "advantage": {"device": "gpu"}}, "/advantage/device"),
        ({**SERVER, "advantage": {"resources": {"limit": {}}}}, "limit"),
        ({**SERVER, "scorers": [{"name": "math"}]}, "function"),
        (
            {**SERVER, "scorers": [{"name": "m", "function": "a:b"}, {"name": "m", "function": "a:c"}]},
            "twice",
        ),
        ({"server": {"url": "redis://user:secret@redis:6379/0"}}, "/server/url"),
        ({}, "exactly one of server.url"),
        ({**SERVER, "valkey": {"enabled": True, "withoutUsers": True}}, "exactly one of server.url"),
        ({"valkey": {"enabled": True}}, "valkey.aclSecret.name"),
        ({"valkey": {"enabled": True, "aclSecret": {"name": "users"}}}, "server.passwordSecret.name"),
        ({**SERVER, "advantage": {"autoscaling": {"enabled": True}}}, "prometheus.address"),
        ({**SERVER, "advantage": {"device": "cpu", "gpu": {"count": 1}}}, "advantage.gpu.count"),
        ({**SERVER, "logFormat": "yaml"}, "/logFormat"),
        (
            {"server": {"urlSecret": {"name": "u"}}, "exporter": {"passwordSecret": {"name": "o"}}},
            "exporter.passwordSecret.name",
        ),
        ({**SERVER, "terminationGracePeriodSeconds": 5}, "terminationGracePeriodSeconds"),
    ],
)
def test_wrong_values_are_refused_by_name(values: Manifest, words: str) -> None:
    import helm_python

    with pytest.raises(helm_python.HelmError) as raised:
        render(values)
    assert words in str(raised.value)


def test_every_value_has_a_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(value: Any, part: Manifest, path: str) -> None:
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        if isinstance(value, dict) and "properties" in part:
            assert set(value) <= set(part["properties"]), path
            for name, inner in value.items():
                compare(inner, part["properties"][name], f"{path}.{name}")

    compare(values, schema, "")


def test_lint_has_nothing_to_say() -> None:
    import helm_python

    report = helm_python.lint(CHART, values=SERVER)
    assert not report["errors"]
    assert [message for message in report["messages"] if message["severity"] > 1] == []


# Fits the command line


@pytest.mark.parametrize("name", NAMES)
def test_processes_start_with_arguments_and_variables_that_exist(name: str) -> None:
    known = {f"{PREFIX}{field.upper()}" for field in Settings.model_fields}
    for deployment in deployments(render(example(name))):
        words = pod_of(deployment)["containers"][0]["args"]
        make_parser(words).parse_args(words)
        ours = {variable for variable in environment_of(deployment) if variable.startswith(PREFIX)}
        assert ours <= known


@pytest.mark.parametrize("name", ["json", "text"])
def test_processes_log_as_the_values_say(name: str) -> None:
    values = SERVER if name == "json" else {**SERVER, "logFormat": name}
    for deployment in deployments(render(values)):
        assert environment_of(deployment)["STREAMADV_LOG_FORMAT"] == name


def test_the_run_is_created_with_its_settings_before_any_worker_starts() -> None:
    settings = {
        "shards": 3,
        "group_deadline_s": 0.5,
        "redundancy": 2,
        "partial_min_usable": 2,
        "zero_variance_filter": False,
        "difficulty_low": -1.5,
        "difficulty_high": 2,
        "filter_by": "format",
        "max_trajectory_bytes": 2000000,
        "max_bytes": "4gb",
        "dedupe_groups": 12000000,
        "dead_bytes": "64mb",
    }
    manifests = render(
        {**SERVER, "runSettings": settings, "scorers": [{"name": "math", "function": "rewards:score"}]}
    )
    for component in ("grouper", "advantage", "scorer-math"):
        (first,) = pod_of(manifests["Deployment", f"demo-streamadv-{component}"])["initContainers"]
        assert first["args"][:2] == ["runs", "create"]
        given = vars(make_parser(first["args"]).parse_args(first["args"]))
        for name, value in settings.items():
            expected = {"4gb": 4 << 30, "64mb": 64 << 20}.get(str(value), value)
            assert given[name] == expected, (component, name)
        assert list(given["scorers"]) == ["math"]
    for deployment in (*deployments(render(SERVER)), manifests["Deployment", "demo-streamadv-exporter"]):
        assert "initContainers" not in pod_of(deployment)


def test_the_schema_has_the_settings_of_a_run() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    at_worker = set(RunSettings.model_fields) - {"scorers", "batch_groups", "max_staleness"}
    assert set(schema["properties"]["runSettings"]["properties"]) == at_worker


# What each part promises


@pytest.mark.parametrize("name", NAMES)
def test_every_container_is_confined(name: str) -> None:
    for workload in workloads(render(example(name))):
        pod = pod_of(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert not container["image"].endswith((":", ":latest"))


def test_processes_are_probed_and_have_time_to_end() -> None:
    for deployment in deployments(render(example("gpu"))):
        pod = pod_of(deployment)
        (container,) = pod["containers"]
        paths = {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}
        assert paths == {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
        assert pod["terminationGracePeriodSeconds"] >= 15


@pytest.mark.parametrize(
    ("values", "build"),
    [
        ({}, "torch"),
        ({"device": "cuda"}, "cuda"),
        ({"gpu": {"count": 1}}, "cuda"),
        ({"device": "cpu"}, "torch"),
    ],
)
def test_workers_with_a_gpu_have_an_image_with_cuda(values: Manifest, build: str) -> None:
    advantage = render({**SERVER, "advantage": values})["Deployment", "demo-streamadv-advantage"]
    assert pod_of(advantage)["containers"][0]["image"].endswith(f"-{build}")


def test_gpus_are_asked_for_and_replicas_left_to_keda() -> None:
    manifests = render(example("gpu"))
    advantage = manifests["Deployment", "demo-streamadv-advantage"]
    (container,) = pod_of(advantage)["containers"]
    assert container["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": 1}
    assert container["image"] == "registry.example/estimators:7"
    assert "replicas" not in advantage["spec"]
    scaled = manifests["ScaledObject", "demo-streamadv-advantage"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == advantage["metadata"]["name"]
    assert [trigger["metadata"]["query"] for trigger in scaled["triggers"]] == [
        'max(streamadv_run_stream_entries{run="exp1",stream="work"})',
        'max(streamadv_run_stream_oldest_seconds{run="exp1",stream="work"})',
    ]
    scorer = manifests["ScaledObject", "demo-streamadv-scorer-math"]["spec"]
    assert all('stream="scoring:math"' in trigger["metadata"]["query"] for trigger in scorer["triggers"])
    assert manifests["Deployment", "demo-streamadv-scorer-judge"]["spec"]["replicas"] == 4


def test_passwords_and_certificates_come_from_secrets() -> None:
    manifests = render(example("valkey"))
    grouper = manifests["Deployment", "demo-streamadv-grouper"]
    variables = environment_of(grouper)
    assert variables["STREAMADV_REDIS_URL"] == "rediss://streamadv-pipeline@demo-streamadv-valkey:6380/0"
    mounts = {mount["mountPath"] for mount in pod_of(grouper)["containers"][0]["volumeMounts"]}
    for name in ("REDIS_PASSWORD_FILE", "TLS_CA_FILE", "TLS_CERT_FILE", "TLS_KEY_FILE"):
        assert variables[f"{PREFIX}{name}"].rpartition("/")[0] in mounts
    url = environment_of(render(example("sentinel"))["Deployment", "demo-streamadv-grouper"])[
        "STREAMADV_REDIS_URL"
    ]
    assert url == {"secretKeyRef": {"name": "streamadv-server", "key": "url"}}


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("valkey", "rediss://{}@demo-streamadv-valkey:6380/0"),
        ("gpu", "rediss://{}@redis.example:6380/0"),
        ("cluster", "redis+cluster://{}@redis-0.redis:6379"),
    ],
)
@pytest.mark.parametrize("has_secret", [False, True])
def test_the_exporter_only_reads_where_it_has_a_password_of_its_own(
    name: str, url: str, has_secret: bool
) -> None:
    values = example(name)
    if not has_secret:
        del values["exporter"]
    manifests = render(values)
    for component, role in (("exporter", "observer" if has_secret else "pipeline"), ("grouper", "pipeline")):
        workload = manifests["Deployment", f"demo-streamadv-{component}"]
        assert environment_of(workload)["STREAMADV_REDIS_URL"] == url.format(f"streamadv-{role}")
        secrets = {volume["name"]: volume.get("secret") for volume in pod_of(workload)["volumes"]}
        assert secrets["password"]["secretName"] == f"streamadv-{role}"


def test_a_user_is_put_into_a_url_without_one() -> None:
    values = {
        "server": {"url": "redis://redis:6379/0"},
        "exporter": {"user": "o", "passwordSecret": {"name": "s"}},
    }
    exporter = environment_of(render(values)["Deployment", "demo-streamadv-exporter"])
    assert exporter["STREAMADV_REDIS_URL"] == "redis://o@redis:6379/0"


def test_the_server_keeps_everything_and_lets_in_who_it_knows() -> None:
    manifests = render(example("valkey"))
    text = manifests["ConfigMap", "demo-streamadv-valkey"]["data"]["valkey.conf"]
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    settings = dict(line.split(" ", 1) for line in lines)
    assert len(settings) == len(lines)
    own = (ROOT / "deploy" / "redis" / "redis.conf").read_text()
    expected = dict(line.split(" ", 1) for line in own.splitlines() if line and not line.startswith("#"))
    expected |= {"appendfsync": "always", "maxmemory": "48gb", "port": "0", "tls-auth-clients": "yes"}
    assert expected.items() <= settings.items()
    assert settings["aclfile"] == "/secrets/users/users.acl"


def test_rules_and_dashboards_are_the_files_of_deploy() -> None:
    values = example("valkey")
    manifests = render(values)
    boards = {
        name: text
        for (kind, _), manifest in manifests.items()
        if kind == "ConfigMap" and manifest["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in manifest["data"].items()
    }
    files = (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json")
    assert boards == {file.name: file.read_text() for file in files}
    assert all(len(text) < 1_000_000 for text in boards.values()), "a ConfigMap holds 1 MiB"
    rules = [manifest["spec"] for (kind, _), manifest in manifests.items() if kind == "PrometheusRule"]
    assert rules
    assert rules == [
        yaml.safe_load(file.read_text()) for file in (ROOT / "deploy" / "prometheus" / "rules").glob("*.yml")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_selected_exists(name: str) -> None:
    """Labels that services, budgets, monitors and policies ask for are those of pods, and pods are told apart."""
    manifests = render(example(name))
    pods = {
        workload["metadata"]["name"]: workload["spec"]["template"]["metadata"]["labels"]
        for workload in workloads(manifests)
    }
    for workload in workloads(manifests):
        wanted = workload["spec"]["selector"]["matchLabels"].items()
        assert [pod for pod, labels in pods.items() if wanted <= labels.items()] == [
            workload["metadata"]["name"]
        ]
    for (kind, _), manifest in manifests.items():
        if kind in ("Service", "PodDisruptionBudget", "PodMonitor", "NetworkPolicy"):
            selector = manifest["spec"].get("selector") or manifest["spec"]["podSelector"]
            wanted = selector.get("matchLabels", selector).items()
            assert any(wanted <= labels.items() for labels in pods.values()), (kind, wanted)


def test_only_known_pods_reach_the_server() -> None:
    manifests = render(example("valkey"))
    (rule,) = manifests["NetworkPolicy", "demo-streamadv-valkey"]["spec"]["ingress"]
    assert rule["ports"] == [{"port": "valkey"}]
    assert len(rule["from"]) == 3
    (rule,) = manifests["NetworkPolicy", "demo-streamadv"]["spec"]["ingress"]
    assert rule["ports"] == [{"port": "metrics"}]
