"""Manifests for other projects' kinds have the fields of their CRDs, and pods within are valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from support.processes.helm_chart import HELM, render

DEPLOY = Path(__file__).parents[2] / "deploy"
PICKED = {"gateway": {"inferencePool": {"enabled": True, "picker": "epp"}}}
TEXT, COUNT, ANY = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "object"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def closed(needed: str = "", **fields: Any) -> dict[str, Any]:
    """An object with these fields alone; `needed` names those that it must have."""
    schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return schema | {"required": needed.split()}


# What we use of their CRDs, and what that must be.
POOL = closed(  # inference.networking.k8s.io/v1, bundle 1.6.0
    "targetPorts selector endpointPickerRef",
    targetPorts={
        "type": "array",
        "minItems": 1,
        "maxItems": 8,
        "items": closed("number", number=PORT),
    },
    selector=closed("matchLabels", matchLabels=TEXTS),
    endpointPickerRef=closed(
        "name port",
        name=TEXT | {"minLength": 1},
        port=closed("number", number=PORT),
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)
KSERVE = closed(  # serving.kserve.io/v1alpha2, KServe 0.20
    "model",
    model=closed("uri", uri=TEXT, name=TEXT),
    replicas=COUNT,
    labels=TEXTS,
    router=closed(gateway=ANY, route=ANY, scheduler=ANY),
    template=ANY,
)
SERVICE = closed(componentType=TEXT, replicas=COUNT, envs={"type": "array"}, extraPodSpec=ANY)
DYNAMO = closed(services={"type": "object", "additionalProperties": SERVICE})  # nvidia.com/v1alpha1


def pool() -> dict[str, Any]:
    if HELM is None:
        pytest.skip("helm is not installed")
    return render(PICKED).one("InferencePool", "r-surestep-default-gateway")


def documented_pool() -> Any:
    page = (DEPLOY.parent / "docs" / "use" / "interop.md").read_text()
    return yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])


def kserve() -> Any:
    return yaml.safe_load((DEPLOY / "kserve" / "llminferenceservice.yaml").read_text())


def dynamo() -> Any:
    return yaml.safe_load((DEPLOY / "dynamo" / "graph.yaml").read_text())


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Specs of the pods that its operator makes of it, as far as they are ours."""
    spec = manifest["spec"]
    if "template" in spec:
        return [spec["template"]]
    found = []
    for service in spec.get("services", {}).values():
        pod = dict(service["extraPodSpec"])
        main = {"name": "main", "env": service["envs"]} | pod.pop("mainContainer")
        found.append(pod | {"containers": [main, *pod.get("containers", ())]})
    return found


@pytest.mark.parametrize(
    ("made", "version", "schema", "num_pods"),
    [
        (pool, "inference.networking.k8s.io/v1", POOL, 0),
        (documented_pool, "inference.networking.k8s.io/v1", POOL, 0),
        (kserve, "serving.kserve.io/v1alpha2", KSERVE, 1),
        (dynamo, "nvidia.com/v1alpha1", DYNAMO, 2),
    ],
)
def test_manifests_have_the_fields_of_their_kind(
    made: Any, version: str, schema: dict[str, Any], num_pods: int
) -> None:
    manifest = made()
    assert manifest["apiVersion"] == version
    jsonschema.validate(manifest["spec"], schema)
    found = pods(manifest)
    assert len(found) == num_pods
    for spec in found:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec}
        kubernetes_validate.validate(pod, "1.35", strict=True)


def test_a_pool_has_the_gateways_and_outlives_its_picker() -> None:
    spec = pool()["spec"]
    gateway = render(PICKED).one("Deployment", "r-surestep-default-gateway")["spec"]
    assert spec["selector"]["matchLabels"] == gateway["selector"]["matchLabels"]
    assert gateway["template"]["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm"
    ports = [
        port["containerPort"] for port in gateway["template"]["spec"]["containers"][0]["ports"]
    ]
    assert spec["targetPorts"][0]["number"] in ports
    assert spec["endpointPickerRef"]["failureMode"] == "FailOpen"
