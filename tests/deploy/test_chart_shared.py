"""Several models behind one Service, as the Helm chart lays them out."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from support.processes.helm_chart import needs_helm, refusal, render
from surestep_gateway.settings.config import GatewaySettings

pytestmark = needs_helm


def _shared(*more: dict[str, Any], **values: Any) -> dict[str, Any]:
    first = {"name": "small", "source": "o/small", "settings": {"max_n": 2, "ui": False}}
    return {"gateway": {"shared": True}, "models": [first, *more], **values}


CODER = {
    "name": "coder",
    "source": "o/coder",
    "servedNames": ["coder", "c"],
    "replicas": 2,
    "settings": {"tool_call_parser": "hermes", "max_num_seqs": 4},
}


def test_one_service_for_all_models() -> None:
    """Its gateways are told of each model, and what is said of one is not said of another."""
    policy = {"networkPolicy": {"enabled": True}, "monitoring": {"kind": "ServiceMonitor"}}
    rendered = render(_shared(CODER, **policy))
    services = [one["metadata"]["name"] for one in rendered.of_kind("Service")]
    assert [name for name in services if "gateway" in name] == ["r-surestep-small-gateway"]
    assert len(rendered.of_kind("ServiceMonitor")) == 1
    pod = rendered.one("Deployment", "r-surestep-small-gateway")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environ = {one["name"]: one.get("value") for one in container["env"]}
    assert not environ.keys() & {"SURESTEP_MODEL", "SURESTEP_SCHEDULER_URL"}
    settings = yaml.safe_load(
        rendered.one("ConfigMap", "r-surestep-small-settings")["data"]["gateway.yaml"]
    )
    assert settings == {"ui": False}
    first, second = GatewaySettings(models=environ["SURESTEP_MODELS"], **settings).each
    assert (first.model_names, second.model_names) == (("o/small",), ("coder", "c"))
    assert (first.max_n, second.max_n) == (2, 128)
    assert (first.tool_call_parser, second.tool_call_parser) == (None, "hermes")
    assert second.scheduler_url == tuple(f"r-surestep-coder-scheduler-{n}:50051" for n in (0, 1))
    assert first.admission_timeout_s == second.admission_timeout_s == 300
    fetched = {one["name"]: one["command"][-1] for one in pod["initContainers"]}
    assert fetched == {"fetch-small": str(first.model), "fetch-coder": str(second.model)}
    allowed = rendered.one("NetworkPolicy", "r-surestep-coder-scheduler")["spec"]["ingress"]
    (peer,) = allowed[0]["from"]
    assert peer["podSelector"]["matchLabels"]["surestep.dev/model"] == "r-surestep-small"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"settings": {"ui": True}}, "settings.ui is the same for all models of a shared gateway"),
        ({"source": "/models/x"}, "gateway.shared needs one volume for all models"),
        (
            {"workers": {"kind": "StatefulSet", "autoscaling": {"kind": "keda", "minReplicas": 0}}},
            "gateway.shared sees no requests of one model alone",
        ),
    ],
)
def test_what_a_shared_service_cannot_have(model: dict[str, Any], reason: str) -> None:
    assert reason in refusal(_shared(CODER | model))
