"""What the Helm chart makes of its values."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes.helm_chart import (
    CHART,
    EXAMPLES,
    Rendered,
    environ,
    helm,
    needs_helm,
    render,
)

pytestmark = needs_helm


def model(**more: Any) -> dict[str, Any]:
    return {"models": [{"name": "m", **more}]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_lint_finds_nothing_to_say(example: Path) -> None:
    done = helm("lint", "--strict", str(CHART), "--values", str(example))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_no_pod_has_more_rights_than_it_needs(example: Path) -> None:
    for name, spec in render(yaml.safe_load(example.read_text())).pods():
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"] is True, name
            assert rights["allowPrivilegeEscalation"] is False, name
            assert rights["capabilities"] == {"drop": ["ALL"]}, name
            mounts = {one["mountPath"] for one in container.get("volumeMounts", [])}
            assert name.endswith("-test") or "/tmp" in mounts, name


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_whatever_a_pod_mounts_is_there(example: Path) -> None:
    rendered = render(yaml.safe_load(example.read_text()))
    for _, spec in rendered.pods():
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            for mount in container.get("volumeMounts", []):
                assert mount["name"] in volumes
        for volume in spec.get("volumes", []):
            if "configMap" in volume:
                data = rendered.one("ConfigMap", volume["configMap"]["name"])["data"]
                assert {item["key"] for item in volume["configMap"]["items"]} <= data.keys()
            if "persistentVolumeClaim" in volume:
                claims = rendered.names("PersistentVolumeClaim")
                assert volume["persistentVolumeClaim"]["claimName"] in claims


def _empty(at: str, value: Any) -> list[str]:
    """Return the places of values that a template left out: a server of Kubernetes refuses them."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return [place for key, each in parts for place in _empty(f"{at}.{key}", each)]
    return [at] if value is None else []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_no_value_is_left_out(example: Path) -> None:
    for manifest in render(yaml.safe_load(example.read_text())).all:
        assert _empty(manifest["kind"], manifest) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_selectors_select_the_pods_they_are_for(example: Path) -> None:
    for manifest in render(yaml.safe_load(example.read_text())).all:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            wanted = manifest["spec"]["selector"]["matchLabels"]
            assert wanted.items() <= manifest["spec"]["template"]["metadata"]["labels"].items()
        if manifest["kind"] == "StatefulSet":
            assert manifest["spec"]["serviceName"] == manifest["metadata"]["name"]


def test_the_gateway_knows_every_scheduler_that_there_may_be() -> None:
    keda = {"autoscaling": {"kind": "keda", "minReplicas": 1, "maxReplicas": 3}}
    rendered = render({"models": [{"name": "m", "workers": keda}]})
    env = environ(rendered.pod("r-surestep-m-gateway")["containers"][0])
    urls = [f"r-surestep-m-scheduler-{i}:50051" for i in range(3)]
    assert env["SURESTEP_SCHEDULER_URL"].split(",") == urls
    assert rendered.names("Deployment").count("r-surestep-m-scheduler-2") == 1
    assert "replicas" not in rendered.one("StatefulSet", "r-surestep-m-worker")["spec"]
    scaled = rendered.one("ScaledObject", "r-surestep-m-worker")["spec"]
    assert scaled["maxReplicaCount"] == 3
    assert "vllm:num_requests_waiting" in scaled["triggers"][0]["metadata"]["query"]


@pytest.mark.parametrize(
    ("discovery", "url"),
    [
        ("dns", "dns://r-surestep-m-schedulers:50051"),
        ("kubernetes", "k8s://default/r-surestep-m-schedulers:grpc"),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_gateways_find_schedulers(discovery: str, url: str, shared: bool) -> None:
    """They are not replaced for another number of replicas, and have no more rights than it takes."""
    models = [{"name": "m", "scheduler": {"discovery": discovery}}]
    values = {"gateway": {"shared": shared}, "modelCache": {"gateways": "own"}}

    def rendered(replicas: int) -> Rendered:
        own = [{"source": "o/m", "replicas": replicas, **models[0]}]
        return render(values | {"models": own + [{"name": "n", "source": "o/n"}] * shared})

    few, many = rendered(1), rendered(3)
    name = "r-surestep-m-gateway"
    assert few.one("Deployment", name) == many.one("Deployment", name)
    assert url in json.dumps(environ(many.pod(name)["containers"][0]))
    service = many.one("Service", "r-surestep-m-schedulers")["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    labels = many.one("Deployment", "r-surestep-m-scheduler-2")["spec"]["template"]["metadata"]
    assert service["selector"].items() <= labels["labels"].items()
    asks = discovery == "kubernetes"
    assert {owner: spec["automountServiceAccountToken"] for owner, spec in many.pods()} == {
        owner: asks and owner == name for owner, _ in many.pods()
    }
    roles = [rule for role in many.of_kind("Role") for rule in role["rules"]]
    assert [(rule["resources"], rule["verbs"]) for rule in roles] == (
        [(["endpointslices"], ["get", "list", "watch"])] if asks else []
    )
    assert len(many.of_kind("RoleBinding")) == asks


def test_a_setting_goes_to_the_services_that_read_it_and_replaces_no_other_pods() -> None:
    def checksums(settings: dict[str, Any]) -> dict[str, str]:
        rendered = render(model(settings=settings))
        return {
            manifest["metadata"]["name"]: manifest["spec"]["template"]["metadata"]["annotations"][
                "checksum/settings"
            ]
            for kind in ("Deployment", "StatefulSet")
            for manifest in rendered.of_kind(kind)
        }

    before = checksums({})
    changed = {"tool_call_parser": "hermes"}
    after = checksums(changed)
    assert {name for name in before if before[name] != after[name]} == {"r-surestep-m-gateway"}
    both = checksums({"max_num_seqs": 3})
    assert {name for name in before if before[name] != both[name]} == {
        "r-surestep-m-scheduler-0",
        "r-surestep-m-worker-0-0",
    }
    data = render(model(settings=changed)).one("ConfigMap", "r-surestep-m-settings")["data"]
    assert yaml.safe_load(data["gateway.yaml"])["tool_call_parser"] == "hermes"
    assert yaml.safe_load(data["worker.yaml"]) == {}


def test_requests_wait_as_long_as_a_pod_takes_to_come_back() -> None:
    rendered = render({"gateway": {"patienceSeconds": 400, "drainSeconds": 100}})
    pod = rendered.pod("r-surestep-default-gateway")
    data = rendered.one("ConfigMap", "r-surestep-default-settings")["data"]
    settings = yaml.safe_load(data["gateway.yaml"])
    for name in ("admission", "first_token", "inter_token", "resume"):
        assert settings[f"{name}_timeout_s"] == 400
    probe = pod["containers"][0]["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 400
    assert pod["terminationGracePeriodSeconds"] > 100 + 5
    own = render({"models": [{"name": "default", "settings": {"inter_token_timeout_s": 7}}]})
    data = own.one("ConfigMap", "r-surestep-default-settings")["data"]
    assert yaml.safe_load(data["gateway.yaml"])["inter_token_timeout_s"] == 7


@pytest.mark.parametrize(("version", "kind"), [("1.23.0", "exec"), ("1.24.0", "grpc")])
def test_probes_are_the_kubelets_own_where_it_has_them(version: str, kind: str) -> None:
    rendered = render({"workers": {"kind": "StatefulSet"}}, version=version)
    (worker,) = rendered.pod("r-surestep-default-worker")["containers"]
    startup = worker["startupProbe"]
    assert kind in startup
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    (scheduler,) = rendered.pod("r-surestep-default-scheduler-0")["containers"]
    live = scheduler["livenessProbe"]
    assert live.get("grpc", {}).get("service") == "live" or live["tcpSocket"] == {"port": 50051}
    forced = render({"probes": {"grpc": False}}, version="1.30")
    (own,) = forced.pod("r-surestep-default-scheduler-0")["containers"]
    assert "tcpSocket" in own["livenessProbe"]


def test_models_are_merged_over_what_holds_for_all() -> None:
    values = {
        "models": [
            {"name": "a", "gateway": {"podDisruptionBudget": {"enabled": False}, "replicas": 3}},
            {"name": "b", "source": "owner/name", "scheduler": {"drainSeconds": 4}},
        ],
        "gateway": {"replicas": 2},
    }
    rendered = render(values)
    assert rendered.one("Deployment", "r-surestep-a-gateway")["spec"]["replicas"] == 3
    assert rendered.one("Deployment", "r-surestep-b-gateway")["spec"]["replicas"] == 2
    assert "r-surestep-a-gateway" not in rendered.names("PodDisruptionBudget")
    assert "r-surestep-b-gateway" in rendered.names("PodDisruptionBudget")
    env = environ(rendered.pod("r-surestep-b-gateway")["containers"][0])
    assert env["SURESTEP_ROOT_PATH"] == "/b"
    assert env["SURESTEP_SERVED_MODEL_NAME"] == "owner/name"


def test_another_revision_is_another_folder() -> None:
    """Pods that start while an upgrade is under way must not find the other model's files."""

    def folder(**more: Any) -> str:
        spec = render(model(source="owner/name", **more)).pod("r-surestep-m-worker-0-0")
        (fetch,) = spec["initContainers"]
        own = environ(spec["containers"][0])["SURESTEP_MODEL"]
        assert fetch["command"][-1] == own
        return own

    assert folder() != folder(revision="abc")


def test_secrets_are_only_referred_to() -> None:
    values = {
        "grpcSecret": {"existingSecret": "s"},
        "apiKeys": {"existingSecret": "keys"},
        "adminKey": {"existingSecret": "admin"},
        "huggingFaceToken": {"existingSecret": "hub"},
    }
    rendered = render(values)
    assert rendered.of_kind("Secret") == []
    spec = rendered.pod("r-surestep-default-gateway")
    named = {v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v}
    assert named == {"s", "keys", "admin"}
    (fetch,) = rendered.pod("r-surestep-default-worker-0-0")["initContainers"]
    (token,) = [one for one in fetch["env"] if one["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert len(render().of_kind("Secret")) == 1  # drawn


def test_network_policies_let_in_who_calls() -> None:
    rendered = render(
        model(tensorParallelSize=2, podsPerReplica=2) | {"networkPolicy": {"enabled": True}}
    )
    assert len(rendered.of_kind("NetworkPolicy")) == 3
    worker = rendered.one("NetworkPolicy", "r-surestep-m-worker")["spec"]
    (rule,) = worker["ingress"]
    callers = {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]
    }
    assert callers == {"scheduler", "worker"}
    (rule,) = rendered.one("NetworkPolicy", "r-surestep-m-gateway")["spec"]["ingress"]
    assert "from" not in rule


def test_routes() -> None:
    values = {
        "gateway": {
            "ingress": {"enabled": True, "host": "a.example", "tlsSecret": "t"},
            "httpRoute": {
                "enabled": True,
                "parentRefs": [{"name": "gw"}],
                "hostnames": ["a.example"],
            },
        }
    }
    rendered = render(values)
    (rule,) = rendered.one("Ingress", "r-surestep-default-gateway")["spec"]["rules"]
    assert rule["host"] == "a.example"
    route = rendered.one("HTTPRoute", "r-surestep-default-gateway")["spec"]
    assert route["rules"][0]["backendRefs"] == [{"name": "r-surestep-default-gateway", "port": 80}]


def test_helm_test_runs_a_program_that_is_whole() -> None:
    spec = render().pod("r-surestep-default-test")
    program, url, name, _ = spec["containers"][0]["args"]
    ast.parse(program)
    assert url == "http://r-surestep-default-gateway:80"
    assert name == "SmolLM2-135M-Instruct"


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor"])
def test_monitors(kind: str) -> None:
    monitor = render({"monitoring": {"kind": kind, "labels": {"release": "p"}}}).one(
        kind, "r-surestep-default-gateway"
    )
    assert monitor["metadata"]["labels"]["release"] == "p"
    endpoints = "endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"
    assert monitor["spec"][endpoints][0]["path"] == "/metrics"


def test_names_fit_whatever_the_release_is_called() -> None:
    done = helm("template", "x" * 53, str(CHART), values=model() | model(name="n" * 30))
    assert done.returncode == 0, done.stderr
    for manifest in Rendered(done.stdout).all:
        assert len(manifest["metadata"]["name"]) <= 63
        for value in manifest["metadata"].get("labels", {}).values():
            assert len(value) <= 63


def _volume(rendered: Rendered, pod: str) -> dict[str, Any]:
    (volume,) = (v for v in rendered.pod(pod)["volumes"] if v["name"] == "models")
    return {key: value for key, value in volume.items() if key != "name"}


@pytest.mark.parametrize(
    ("model", "cache", "own"),
    [
        ({"source": "a/b"}, {}, {"emptyDir": {"sizeLimit": "1Gi"}}),
        ({"source": "a/b:Q4_K_M"}, {"size": "9Gi"}, {"emptyDir": {"sizeLimit": "9Gi"}}),
        ({"source": "a/b"}, {"accessModes": ["ReadWriteMany"]}, None),
        ({"source": "a/b"}, {"gateways": "volume"}, None),
        ({"source": "a/b"}, {"fetch": False}, None),
        ({"source": "/models/b"}, {}, None),
    ],
)
def test_gateways_run_where_the_weights_cannot_be_mounted(
    model: dict[str, Any], cache: dict[str, Any], own: dict[str, Any] | None
) -> None:
    """A volume of one node, behind a taint, is for the workers alone."""
    rendered = render({"models": [{"name": "m", **model}], "modelCache": cache})
    claim = {"persistentVolumeClaim": {"claimName": "r-surestep-m-models"}}
    assert _volume(rendered, "r-surestep-m-worker-0-0") == claim
    assert _volume(rendered, "r-surestep-m-gateway") == (own or claim)
    for fetch in rendered.pod("r-surestep-m-gateway").get("initContainers", []):
        assert ("--text-only" in fetch["args"]) == (own is not None)


def test_scratch_folders_have_limits() -> None:
    rendered = render({"models": [{"source": "a/b"}], "modelCache": {"kind": "emptyDir"}})
    for _, pod in rendered.pods():
        scratch = [volume["emptyDir"] for volume in pod.get("volumes", []) if "emptyDir" in volume]
        assert all("sizeLimit" in one for one in scratch), pod


def test_pods_are_spread_unless_told_otherwise() -> None:
    rendered = render({"workers": {"affinity": {"podAffinity": {}}}})
    for name in ("gateway", "scheduler-0"):
        (spread,) = rendered.pod(f"r-surestep-default-{name}")["topologySpreadConstraints"]
        assert spread["whenUnsatisfiable"] == "ScheduleAnyway"
        deployment = rendered.one("Deployment", f"r-surestep-default-{name}")
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert labels.items() >= spread["labelSelector"]["matchLabels"].items()
    assert "topologySpreadConstraints" not in rendered.pod("r-surestep-default-worker-0-0")


@pytest.mark.parametrize(("device", "image"), [("cpu", "worker"), ("cuda", "worker-cuda")])
def test_the_image_follows_the_device(device: str, image: str) -> None:
    pod = render({"workers": {"device": device}}).pod("r-surestep-default-worker-0-0")
    assert pod["containers"][0]["image"].startswith(f"surestep-{image}:")


def test_a_model_without_a_name_is_called_by_its_source() -> None:
    """The values are those that `--set models[0].source=...` leaves."""
    rendered = render({"models": [{"source": "Qwen/Qwen3-0.6B-GGUF:Q4_K_M"}, {"source": "a/b"}]})
    rendered.one("Deployment", "r-surestep-qwen3-0-6b-gguf-q4-k-m-gateway")
    rendered.one("Deployment", "r-surestep-b-gateway")


def test_what_values_add_is_there() -> None:
    extra = {"name": "extra", "image": "i"}
    part = {
        "envFrom": [{"secretRef": {"name": "s"}}],
        "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
        "initContainers": [extra],
        "containers": [extra],
    }
    objects = [
        {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "{{ .Release.Name }}-x"}}
    ]
    parts = dict.fromkeys(("gateway", "scheduler", "workers"), part)
    rendered = render({**parts, "extraObjects": objects})
    rendered.one("ConfigMap", "r-x")
    for name in ("gateway", "scheduler-0", "worker-0-0"):
        pod = rendered.pod(f"r-surestep-default-{name}")
        own, other = pod["containers"]
        assert other == extra == pod["initContainers"][0]
        assert own["envFrom"] == part["envFrom"]
        assert own["lifecycle"] == part["lifecycle"]


def test_the_chart_holds_files_and_no_links() -> None:
    assert [path for path in CHART.rglob("*") if path.is_symlink()] == []
