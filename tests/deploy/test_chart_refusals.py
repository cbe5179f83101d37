"""Values that are wrong: each is refused before anything reaches the cluster, in words that name it."""

from __future__ import annotations

from typing import Any

import pytest
from support.processes.helm_chart import needs_helm, refusal

pytestmark = needs_helm


def model(**more: Any) -> dict[str, Any]:
    return {"models": [{"name": "m", **more}]}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gatway": {}}, ["gatway"]),
        ({"gateway": {"replica": 2}}, ["/gateway", "replica"]),
        ({"gateway": {"replicas": "two"}}, ["/gateway/replicas", "integer"]),
        ({"workers": {"device": "gpu"}}, ["device", "cpu", "cuda"]),
        ({"workers": {"resources": {"requests": {"memory": "3 GB"}}}}, ["/memory"]),
        ({"models": []}, ["/models", "minItems"]),
        ({"models": [{}, {}]}, ["default: two models with this name"]),
        ({"gateway": {"rollingUpdate": {"maxSurge": "0%"}}}, ["replaces no pod"]),
        (model(source="/models/x") | {"modelCache": {"gateways": "own"}}, ["gateways own"]),
        ({"extraObjects": ["x"]}, ["/extraObjects/0"]),
        (model(workers={"autoscaling": {"kind": "hpa", "minReplicas": 0}}), ["an HPA keeps one"]),
        (model(name="No Capitals"), ["/models/0/name"]),
        (model(source="just-a-name"), ["/models/0/source"]),
        (model(settings={"max_num_seq": 3}), ["/models/0/settings", "max_num_seq"]),
        (model(settings={"port": 3}), ["/models/0/settings", "port"]),
        (
            model(tensorParallelSize=3, podsPerReplica=2),
            ["tensorParallelSize 3", "podsPerReplica 2"],
        ),
        ({"models": [{"name": "m"}, {"name": "m"}]}, ["m: two models with this name"]),
        (
            model(
                tensorParallelSize=2, podsPerReplica=2, workers={"autoscaling": {"kind": "keda"}}
            ),
            ["LeaderWorkerSet"],
        ),
        ({"modelCache": {"kind": "hostPath"}}, ["modelCache.hostPath"]),
        (
            model(source="/models/x") | {"modelCache": {"kind": "emptyDir"}},
            ["/models/x", "emptyDir is empty"],
        ),
        ({"gateway": {"httpRoute": {"enabled": True}}}, ["parentRefs"]),
        ({"gateway": {"inferencePool": {"enabled": True}}}, ["picker"]),
        ({"apiKeys": {"existingSecret": "Not A Name"}}, ["/apiKeys/existingSecret"]),
        ({"probes": {"grpc": "yes"}}, ["/probes/grpc"]),
    ],
)
def test_wrong_values(values: dict[str, Any], words: list[str]) -> None:
    said = refusal(values)
    shown = said.replace("'", "").replace(".", "/") + said
    for word in words:
        assert word in shown, said


def test_what_a_cluster_is_too_old_for() -> None:
    said = refusal({"workers": {"autoscaling": {"kind": "hpa"}}}, version="1.22.0")
    assert "needs Kubernetes 1.23" in said
