"""What the Helm chart gives to those who watch, guard and drain a cluster."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.processes.helm_chart import CHART, Rendered, helm, needs_helm, refusal, render

pytestmark = needs_helm

ROOT = CHART.parents[1]


def model(**more: Any) -> dict[str, Any]:
    return {"models": [{"name": "m", **more}]}


def test_alerts_and_dashboards_come_with_the_chart() -> None:
    wanted = {
        "rules": {"enabled": True, "labels": {"release": "p"}, "runbookPrefix": "https://x/"},
        "dashboards": {"enabled": True},
    }
    rendered = render({"monitoring": wanted})
    rule = rendered.one("PrometheusRule", "r-surestep")
    assert rule["metadata"]["labels"]["release"] == "p"
    own = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
    for group in own["groups"]:
        for one in group["rules"]:
            one["annotations"]["runbook_url"] = (
                f"https://x/docs/run/operate.md#{one['alert'].lower()}"
            )
    assert rule["spec"] == own
    shown = rendered.one("ConfigMap", "r-surestep-dashboards")
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = {path.name: path for path in (ROOT / "deploy" / "grafana").glob("*.json")}
    assert shown["data"].keys() == {f"surestep-{name}" for name in files}
    for name, path in files.items():
        assert json.loads(shown["data"][f"surestep-{name}"]) == json.loads(path.read_text())
    assert len(json.dumps(shown)) < 1 << 20, "more than an object may have"


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor"])
def test_the_job_is_one_that_alerts_look_for(kind: str) -> None:
    rendered = render({"fullnameOverride": "llm", "monitoring": {"kind": kind}})
    (monitor,) = rendered.of_kind(kind)
    label = monitor["spec"]["jobLabel"]
    service = rendered.one("Service", "llm-default-gateway")
    pod = rendered.one("Deployment", "llm-default-gateway")["spec"]["template"]
    assert service["metadata"]["labels"][label] == pod["metadata"]["labels"][label] == "surestep"


def test_who_scrapes_and_who_tests_gets_in_where_clients_are_named() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    policy = {"enabled": True, "clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    rendered = render({"networkPolicy": policy | {"prometheus": [peer]}})
    policies = rendered.of_kind("NetworkPolicy")
    assert all(one["spec"]["policyTypes"] == ["Ingress"] for one in policies)  # all may go out
    (rule,) = rendered.one("NetworkPolicy", "r-surestep-default-gateway")["spec"]["ingress"]
    assert peer in rule["from"]
    labels = rendered.one("Pod", "r-surestep-default-test")["metadata"]["labels"]
    selectors = [one["podSelector"]["matchLabels"] for one in rule["from"] if "podSelector" in one]
    assert any(selector.items() <= labels.items() for selector in selectors)


@pytest.mark.parametrize(("version", "policy"), [("1.26.0", None), ("1.27.0", "AlwaysAllow")])
def test_a_pod_that_is_never_ready_does_not_keep_its_node(version: str, policy: str | None) -> None:
    for budget in render(version=version).of_kind("PodDisruptionBudget"):
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"].get("unhealthyPodEvictionPolicy") == policy


def test_another_version_of_the_chart_alone_replaces_no_pod() -> None:
    rendered = render(model(replicas=2))
    for kind in ("Deployment", "StatefulSet"):
        for owner in rendered.of_kind(kind):
            labels = owner["spec"]["template"]["metadata"]["labels"]
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys()
            assert "helm.sh/chart" in owner["metadata"]["labels"]


# Whole words of YAML's, and characters that mean something in it.
WORDS = ("123", "true", "1e3", "a: b", "x\ny: z", "#c", "{a", "*a", "'")
TEXTS = (
    ("image", "tag"),
    ("gateway", "priorityClassName"),
    ("gateway", "path"),
    ("gateway", "ingress", "className"),
    ("gateway", "ingress", "tlsSecret"),
    ("workers", "runtimeClassName"),
    ("workers", "autoscaling", "metric"),
    ("workers", "sharedMemory"),
    ("modelCache", "existingClaim"),
    ("modelCache", "storageClassName"),
    ("grpcSecret", "existingSecret"),
    ("grpcSecret", "key"),
    ("apiKeys", "existingSecret"),
    ("adminKey", "key"),
    ("huggingFaceToken", "existingSecret"),
    ("serviceAccount", "name"),
    ("nameOverride",),
)


@pytest.mark.parametrize("word", WORDS)
def test_texts_stay_texts(word: str) -> None:
    """All at once; those that the schema refuses for their characters are left out."""
    values: dict[str, Any] = {
        "models": [{"name": "m"}],
        "gateway": {"ingress": {"enabled": True}},
        "workers": {"kind": "StatefulSet", "autoscaling": {"kind": "hpa"}},
        "adminKey": {"existingSecret": "a"},
    }
    for path in TEXTS:
        inner = values
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = f"/{word}" if path[-1] == "path" else word
    done = helm("template", "r", str(CHART), "--kube-version", "1.30.0", values=values)
    while done.returncode:
        assert "values don't meet the specifications" in done.stderr, done.stderr
        assert _without_what_is_refused(values, done.stderr), done.stderr
        done = helm("template", "r", str(CHART), "--kube-version", "1.30.0", values=values)
    for manifest in Rendered(done.stdout).all:
        kubernetes_validate.validate(manifest, "1.30", strict=True)


def _without_what_is_refused(values: dict[str, Any], said: str) -> bool:
    removed = False
    for path in TEXTS:
        if f"'/{'/'.join(path)}'" in said:
            inner = values
            for key in path[:-1]:
                inner = inner[key]
            removed |= inner.pop(path[-1], None) is not None
    return removed


@pytest.mark.parametrize(
    ("release", "values"),
    [
        ("my.llm", {}),
        ("a" * 35 + "--b", {}),
        ("r", {"fullnameOverride": "x." * 20 + "y"}),
        ("r", {"nameOverride": "n" * 63}),
    ],
)
def test_names_are_those_of_services(release: str, values: dict[str, Any]) -> None:
    done = helm("template", release, str(CHART), "--kube-version", "1.30.0", values=values)
    assert done.returncode == 0, done.stderr
    for manifest in Rendered(done.stdout).all:
        kubernetes_validate.validate(manifest, "1.30", strict=True)
        name = manifest["metadata"]["name"]
        assert len(name) <= 63
        assert name.replace("-", "a").isalnum(), name
        assert name[0].isalpha(), name
        assert name[-1] != "-"


def test_a_release_whose_name_begins_with_a_digit_is_told_what_to_do() -> None:
    done = helm("template", "1st", str(CHART))
    assert "set fullnameOverride" in done.stderr


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"workers": {"autoscaling": {"kind": "keda", "minReplicas": 5}}},
            "m: workers.autoscaling.minReplicas is above maxReplicas",
        ),
        (
            {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 9}}},
            "gateway.autoscaling.minReplicas is above maxReplicas",
        ),
        (
            {"gateway": {"autoscaling": {"enabled": True}, "resources": {"requests": None}}},
            "gateway.resources.requests.cpu",
        ),
        (
            {"monitoring": {"kind": "PodMonitor"}} | model(settings={"protect_metrics": True}),
            "adminKey.existingSecret",
        ),
    ],
)
def test_values_that_do_not_go_together(values: dict[str, Any], words: str) -> None:
    assert words in refusal(model() | values)


def test_containers_that_fetch_have_resources_where_quotas_ask_for_some() -> None:
    wanted = {"requests": {"cpu": 1}, "limits": {"memory": "2Gi"}}
    rendered = render({"modelCache": {"fetchResources": wanted}})
    for owner in ("r-surestep-default-gateway", "r-surestep-default-worker-0-0"):
        (fetch,) = rendered.pod(owner)["initContainers"]
        assert fetch["resources"] == {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}}


@pytest.mark.parametrize(
    ("least", "triggers", "ready"), [(0, 2, "/health/live"), (1, 1, "/health/ready")]
)
def test_workers_sleep_until_a_gateway_has_a_request(least: int, triggers: int, ready: str) -> None:
    """Gateways stay ready for it: without them no request would come to wake the workers."""
    scaling = {"kind": "keda", "minReplicas": least}
    rendered = render(model(workers={"autoscaling": scaling}))
    (scaled,) = rendered.of_kind("ScaledObject")
    assert scaled["spec"]["minReplicaCount"] == least
    found = [trigger["metadata"] for trigger in scaled["spec"]["triggers"]]
    assert len(found) == triggers
    if least == 0:
        assert "surestep:gateway_open_requests" in found[1]["query"]
        assert found[1]["activationThreshold"] == "0"
    (gateway,) = rendered.pod("r-surestep-m-gateway")["containers"]
    assert gateway["readinessProbe"]["httpGet"]["path"] == ready
