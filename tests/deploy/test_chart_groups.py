"""Replicas of several ranks, in one pod or in several, as the Helm chart lays them out."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
from chart import Rendered, environ, needs_helm, render

pytestmark = needs_helm


def model(**more: Any) -> dict[str, Any]:
    return {"models": [{"name": "m", **more}]}


def ports_of(rendered: Rendered, service: str) -> dict[int, str]:
    return {p["port"]: p["name"] for p in rendered.one("Service", service)["spec"]["ports"]}


@pytest.mark.parametrize("pods", [1, 2, 4])
@pytest.mark.parametrize("kind", ["StatefulSet", "LeaderWorkerSet"])
def test_every_rank_has_an_address_at_its_scheduler(pods: int, kind: str) -> None:
    values = model(replicas=2, tensorParallelSize=4, podsPerReplica=pods)
    rendered = render(values | {"workers": {"kind": kind}})
    for replica in range(2):
        pod = rendered.pod(f"r-surestep-m-scheduler-{replica}")
        env = environ(pod["containers"][0])
        ranks = json.loads(env["SURESTEP_WORKER_ADDRESSES"])
        supervisors = json.loads(env["SURESTEP_SUPERVISOR_ADDRESSES"])
        assert len(set(ranks)) == len(set(supervisors)) == 4
        for rank, (mine, its) in enumerate(zip(ranks, supervisors, strict=True)):
            pod_index, local = divmod(rank, 4 // pods)
            service = f"r-surestep-m-worker-{replica}-{pod_index}"
            assert mine == f"{service}:{50100 + local}"
            assert its == f"{service}:{50200 + local}"
            ports = ports_of(rendered, service)
            assert ports[50100 + local] == f"rank-{local}"
            assert ports[50200 + local] == f"supervisor-{local}"
            names = {
                p["name"] for p in rendered.pod("r-surestep-m-worker")["containers"][0]["ports"]
            }
            assert set(ports.values()) <= names


@pytest.mark.parametrize(
    ("host", "rank", "master"),
    [
        ("r-surestep-m-worker-0", 0, "10.0.0.9"),
        ("r-surestep-m-worker-1", 2, "r-surestep-m-worker-0-0"),
        ("r-surestep-m-worker-2", 0, "10.0.0.9"),
        ("r-surestep-m-worker-3", 2, "r-surestep-m-worker-1-0"),
    ],
)
def test_a_pod_of_a_group_knows_its_ranks(host: str, rank: int, master: str) -> None:
    """The command as a shell runs it, with `python` replaced by `env`."""
    rendered = render(model(replicas=2, tensorParallelSize=4, podsPerReplica=2))
    (worker,) = rendered.pod("r-surestep-m-worker")["containers"]
    assert environ(worker)["SURESTEP_LOCAL_RANKS"] == "2"
    script = re.sub("exec python.*", "exec env", worker["command"][2])
    said = subprocess.run(
        ["sh", "-c", script],
        env={"HOSTNAME": host, "POD_IP": "10.0.0.9", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    variables = dict(line.split("=", 1) for line in said.splitlines())
    assert variables["SURESTEP_RANK"] == str(rank)
    assert variables["SURESTEP_TP_MASTER"] == f"{master}:50300"
    assert variables["SURESTEP_WORKER_LISTEN"] == f"0.0.0.0:{50100 - rank}"  # and rank r: port + r


def test_gpus() -> None:
    values = model(tensorParallelSize=8) | {"workers": {"device": "cuda"}}
    spec = render(values).pod("r-surestep-m-worker")
    (worker,) = spec["containers"]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec[
        "tolerations"
    ]
    (shm,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    assert environ(worker)["SURESTEP_DEVICE"] == "cuda"
    assert worker["command"][2].rstrip().endswith("surestep_worker.local_group")


def test_a_group_across_nodes_ends_and_comes_back_together() -> None:
    values = model(tensorParallelSize=2, podsPerReplica=2, replicas=3)
    group = render(values | {"workers": {"kind": "LeaderWorkerSet"}}).one(
        "LeaderWorkerSet", "r-surestep-m-worker"
    )["spec"]
    assert group["replicas"] == 3
    assert group["leaderWorkerTemplate"]["size"] == 2
    assert group["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
