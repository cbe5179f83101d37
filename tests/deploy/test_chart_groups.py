"""Replicas of several ranks, in one pod or in several, as the Helm chart lays them out."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.processes.helm_chart import Rendered, environ, needs_helm, render

pytestmark = needs_helm


def model(**more: Any) -> dict[str, Any]:
    return {"models": [{"name": "m", **more}]}


def worker_pod(rendered: Rendered, service: str) -> dict[str, Any]:
    """Whichever owner it has."""
    pods: dict[str, dict[str, Any]] = dict(rendered.pods())
    return pods.get(service) or pods["r-surestep-m-worker"]


def ports_of(rendered: Rendered, service: str) -> dict[int, str]:
    return {p["port"]: p["name"] for p in rendered.one("Service", service)["spec"]["ports"]}


@pytest.mark.parametrize("pods", [1, 2, 4])
@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "LeaderWorkerSet"])
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
            names = {p["name"] for p in worker_pod(rendered, service)["containers"][0]["ports"]}
            assert set(ports.values()) <= names


def variables(container: dict[str, Any], **environment: str) -> dict[str, str]:
    """What the container's command hands on, as a shell runs it."""
    script = re.sub("exec python.*", "exec env", container["command"][2])
    said = subprocess.run(
        ["sh", "-c", script],
        env={"POD_IP": "10.0.0.9", "PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return dict(line.split("=", 1) for line in said.splitlines())


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "LeaderWorkerSet"])
@pytest.mark.parametrize(("replica", "pod"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_pod_of_a_group_knows_its_ranks(kind: str, replica: int, pod: int) -> None:
    values = model(replicas=2, tensorParallelSize=4, podsPerReplica=2)
    rendered = render(values | {"workers": {"kind": kind}})
    (worker,) = worker_pod(rendered, f"r-surestep-m-worker-{replica}-{pod}")["containers"]
    assert environ(worker)["SURESTEP_LOCAL_RANKS"] == "2"
    told = variables(
        worker,
        HOSTNAME=f"r-surestep-m-worker-{2 * replica + pod}",
        GROUP_INDEX=str(replica),
        WORKER_INDEX=str(pod),
    )
    assert told["SURESTEP_RANK"] == str(2 * pod)
    assert told["SURESTEP_WORKER_LISTEN"] == f"0.0.0.0:{50100 - 2 * pod}"  # and rank r: port + r
    master = "10.0.0.9" if pod == 0 else f"r-surestep-m-worker-{replica}-0"
    assert told["SURESTEP_TP_MASTER"] == f"{master}:50300"


def test_a_single_replica_is_replaced_at_once_and_several_are_upgraded_one_by_one() -> None:
    alone = render(model())
    assert alone.of_kind("StatefulSet") == []
    (worker,) = alone.pod("r-surestep-m-worker-0-0")["containers"]
    # Its Service must find it while it loads, and not the pod before it.
    assert worker["readinessProbe"]["tcpSocket"] == {"port": "supervisor-0"}
    supervisor = environ(worker)["SURESTEP_SUPERVISOR_LISTEN"]
    assert supervisor.replace("0.0.0.0", "127.0.0.1") in worker["command"], "its watchdog asks it"
    service = alone.one("Service", "r-surestep-m-worker-0-0")["spec"]
    assert "publishNotReadyAddresses" not in service
    labels = alone.one("Deployment", "r-surestep-m-worker-0-0")["spec"]["template"]["metadata"]
    assert service["selector"].items() <= labels["labels"].items()
    several = render(model(replicas=2))
    assert several.one("StatefulSet", "r-surestep-m-worker")["spec"]["replicas"] == 2
    service = several.one("Service", "r-surestep-m-worker-1-0")["spec"]
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"] == {"statefulset.kubernetes.io/pod-name": "r-surestep-m-worker-1"}


def test_gpus() -> None:
    values = model(tensorParallelSize=8) | {"workers": {"device": "cuda"}}
    spec = render(values).pod("r-surestep-m-worker-0-0")
    (worker,) = spec["containers"]
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec[
        "tolerations"
    ]
    (shm,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    assert environ(worker)["SURESTEP_DEVICE"] == "cuda"
    assert worker["command"][2].rstrip().endswith("surestep_worker.distributed.local_group")


@pytest.mark.parametrize("fetched", [True, False])
def test_compiled_kernels_outlive_their_pod_where_models_do(fetched: bool, tmp_path: Path) -> None:
    """Beside the models, which the worker itself cannot write; else for as long as there is a pod."""
    values = model(source="owner/name" if fetched else "/models/name")
    spec = render(values | {"workers": {"device": "cuda"}}).pod("r-surestep-m-worker-0-0")
    (worker,) = spec["containers"]
    mounts = {mount["mountPath"]: mount for mount in worker["volumeMounts"]}
    for variable in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        assert environ(worker)[variable].startswith("/kernels")
    assert not mounts["/kernels"].get("readOnly")
    assert mounts["/models"]["readOnly"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == mounts["/kernels"]["name"]]
    assert ("persistentVolumeClaim" in volume) is fetched
    if fetched:
        (fetch,) = spec["initContainers"]
        command = [part.replace("/models", str(tmp_path)) for part in fetch["command"]]
        (tmp_path / "surestep").write_text('#!/bin/sh\necho "$@"\n')
        (tmp_path / "surestep").chmod(0o755)
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        said = subprocess.run([*command, "more"], env=env, capture_output=True, text=True).stdout
        assert (tmp_path / mounts["/kernels"]["subPath"]).is_dir()
        assert re.fullmatch(r"fetch --link \S+ more\n", said)
    cpu = render(values).pod("r-surestep-m-worker-0-0")["containers"][0]
    assert "/kernels" not in {mount["mountPath"] for mount in cpu["volumeMounts"]}


def test_a_group_across_nodes_ends_and_comes_back_together() -> None:
    values = model(tensorParallelSize=2, podsPerReplica=2, replicas=3)
    group = render(values | {"workers": {"kind": "LeaderWorkerSet"}}).one(
        "LeaderWorkerSet", "r-surestep-m-worker"
    )["spec"]
    assert group["replicas"] == 3
    assert group["leaderWorkerTemplate"]["size"] == 2
    assert group["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
