"""docker-compose.yml: what containers may do, and what of the shell's variables reaches them."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.faults.private_mounts import needs_mounts
from support.processes.stack import environment
from surestep_cli.dynamo.command import Dynamo
from surestep_gateway.settings.config import GatewaySettings
from surestep_scheduler.config import KVEventsConfig

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = shutil.which("docker-compose")
SERVICES = ("gateway", "scheduler", "worker", "worker-gpu")
PROFILES = ("--profile", "gpu", "--profile", "observability")
# What Triton's driver does before it launches anything, and what a worker says of the folder first.
STUB = """
from surestep_common.errors import InvalidRequest
from surestep_kernels.columns.gpu.compilations import check_kernel_cache
from triton.runtime.build import compile_module_from_src
SOURCE = '#include <Python.h>\\nstatic struct PyModuleDef d = {PyModuleDef_HEAD_INIT, "stub"};' \\
    'PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&d); }'
try:
    check_kernel_cache()
except InvalidRequest as error:
    print(error)
try:
    compile_module_from_src(SOURCE, "stub")
    print("loaded")
except ImportError as error:
    print("ImportError", error)
"""
needs_compose = pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not installed")


@functools.cache
def config(*flags: str, **variables: str) -> dict[str, Any]:
    """The file as docker-compose reads it with these variables."""
    assert COMPOSE is not None
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SURESTEP_", "COMPOSE_"))}
    done = subprocess.run(
        (COMPOSE, "-f", str(ROOT / "docker-compose.yml"), *flags, "config"),
        env=own | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load(done.stdout)
    assert isinstance(read, dict)
    return read


@needs_compose
def test_no_container_has_more_rights_than_it_needs() -> None:
    for name, service in config(*PROFILES)["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert any(mount.startswith("/tmp:") for mount in service["tmpfs"]), name
        assert service["logging"]["options"]["max-size"], name
        for port in service.get("ports", []):
            assert str(port if isinstance(port, str) else port["published"]).startswith("127."), (
                name
            )


@needs_compose
def test_variables_reach_the_services_that_read_them() -> None:
    given = {
        "SURESTEP_MAX_NUM_SEQS": "4",
        "SURESTEP_TOOL_CALL_PARSER": "hermes",
        "SURESTEP_API_KEY": "k",
        "SURESTEP_GRPC_API_KEY": "g",
        "SURESTEP_SPECULATIVE_CONFIG": '{"method":"ngram","num_speculative_tokens":4}',
        "SURESTEP_LOG_LEVEL": "DEBUG",
    }
    services = config(*PROFILES, **given)["services"]
    reached = {
        variable: {
            name
            for name, service in services.items()
            if service.get("environment", {}).get(variable) == value
        }
        for variable, value in given.items()
    }
    workers = {"worker", "worker-gpu"}
    assert reached == {
        "SURESTEP_MAX_NUM_SEQS": {"scheduler", *workers},
        "SURESTEP_TOOL_CALL_PARSER": {"gateway"},
        "SURESTEP_API_KEY": {"gateway"},
        "SURESTEP_GRPC_API_KEY": {"scheduler"},
        "SURESTEP_SPECULATIVE_CONFIG": workers,
        "SURESTEP_LOG_LEVEL": {"gateway", "scheduler", *workers},
    }


@needs_compose
@pytest.mark.parametrize(
    ("given", "status"),
    [({"SURESTEP_TENSOR_PARALLEL_SIZE": "2"}, 2), ({"SURESTEP_PORT": "80"}, 2), ({}, 0)],
)
def test_what_the_file_decides_is_refused_by_name(
    tmp_path: Path, given: dict[str, str], status: int
) -> None:
    """By the first container, without which none starts."""
    model = config(SURESTEP_MODEL="a/b", **given)["services"]["model"]
    environ = {name: value for name, value in model["environment"].items() if value is not None}
    environ |= {"SURESTEP_WORKER_LISTEN": "0.0.0.0:50061"}  # of the image; Compose v2 leaves it
    command = [part.replace("$$", "$") for part in model["command"]]
    stand_in = tmp_path / "surestep"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        command, env=environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    if given:
        assert done.stdout.startswith(f"{next(iter(given))} is decided by docker-compose.yml")
    else:
        assert done.stdout.splitlines()[-1] == "fetch --link /shared/model a/b"


@needs_compose
def test_what_nobody_has_set_is_left_to_the_services() -> None:
    environ = config()["services"]["worker"]["environment"]
    assert environ["SURESTEP_MAX_NUM_SEQS"] is None
    assert environ["SURESTEP_MODEL"] == "/shared/model"


@needs_compose
def test_another_model_replaces_whoever_has_read_the_one_before() -> None:
    labels = [
        [service["labels"] for name, service in read["services"].items() if name in SERVICES]
        for read in (config(), config(SURESTEP_MODEL="a/b"), config(SURESTEP_REVISION="v2"))
    ]
    assert all(len({str(each[i]) for each in labels}) == 3 for i in range(3))


@needs_compose
def test_nobody_waits_for_anybodys_health() -> None:
    """`up` gives up where a service turns unhealthy while another one waits for it."""
    for service in config(*PROFILES)["services"].values():
        conditions = {wait["condition"] for wait in service.get("depends_on", {}).values()}
        assert conditions <= {"service_completed_successfully", "service_started"}


@needs_compose
def test_a_worker_is_stopped_when_nobody_needs_it_any_more() -> None:
    services = config()["services"]
    assert "worker" in services["scheduler"]["depends_on"]
    assert "scheduler" in services["gateway"]["depends_on"]


@needs_compose
def test_images_are_those_of_a_registry_and_a_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert config()["services"]["gateway"]["image"] == f"surestep-gateway:{version}"
    released = config(SURESTEP_REGISTRY="r.example/llm/", SURESTEP_VERSION="9.9")["services"]
    assert released["worker"]["image"] == "r.example/llm/surestep-worker:9.9"
    assert released["model"]["image"] == released["worker"]["image"]


@needs_compose
def test_a_gpu_worker_takes_the_others_place() -> None:
    services = config("--profile", "gpu", SURESTEP_CPU_WORKERS="0")["services"]
    assert services["worker"]["scale"] == 0
    gpu = services["worker-gpu"]
    assert gpu["environment"]["SURESTEP_DEVICE"] == "cuda"
    assert gpu["environment"]["SURESTEP_MODEL"] == "/shared/model"
    assert gpu["networks"]["default"]["aliases"] == ["worker"]
    assert gpu["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    # Both at once would be two workers under one name: one name for both containers forbids it.
    assert gpu["container_name"] == services["worker"]["container_name"]


@needs_compose
@needs_mounts
def test_compiled_kernels_are_kept_where_they_can_be_loaded(tmp_path: Path) -> None:
    """Not in /tmp: Docker mounts it noexec unless told otherwise. Triton's own stub says which works."""
    gpu = config("--profile", "gpu")["services"]["worker-gpu"]
    image = re.search(r"TRITON_CACHE_DIR=(\S+)", (ROOT / "Dockerfile").read_text())
    assert image is not None
    volumes = {str(volume).split(":")[1] for volume in gpu["volumes"] if ":ro" not in str(volume)}
    assert any(Path(image[1]).is_relative_to(volume) for volume in volumes)
    (tmpfs,) = gpu["tmpfs"]
    assert "exec" not in tmpfs
    as_docker_does = f"mount -t tmpfs -o noexec,nosuid,nodev,size=64m tmpfs {tmp_path}/tmp"
    script = f'{as_docker_does}\nexec "$@"'
    (tmp_path / "tmp").mkdir()
    said = {
        name: subprocess.run(
            [*("unshare", "--mount", "sh", "-ec", script), *("sh", sys.executable, "-c", STUB)],
            env=environment({"TRITON_CACHE_DIR": f"{tmp_path}/{name}/triton"}),
            capture_output=True,
            text=True,
        ).stdout
        for name in ("tmp", "kernels")
    }
    assert said["kernels"] == "loaded\n"
    assert "ImportError" in said["tmp"]
    assert f"cannot be kept in {tmp_path}/tmp/triton: it is mounted noexec; set TRI" in said["tmp"]


@needs_compose
def test_models_may_lie_in_a_folder_of_the_machine() -> None:
    services = config(SURESTEP_MODELS_FOLDER="/srv/models")["services"]
    for name in ("model", "worker", "gateway"):
        assert any(str(v).startswith("/srv/models:/models") for v in services[name]["volumes"])


@needs_compose
def test_what_is_mounted_of_the_checkout_is_there() -> None:
    services = config(*PROFILES)["services"]
    mounted = [
        Path(volume.split(":")[0])
        for name in ("prometheus", "grafana")
        for volume in services[name]["volumes"]
        if volume.startswith("/")
    ]
    assert len(mounted) == 4
    assert all(path.exists() for path in mounted)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_its_configuration() -> None:
    command = (
        "promtool",
        "check",
        "config",
        str(ROOT / "deploy" / "prometheus" / "prometheus.yml"),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_grafana_is_told_where_everything_is() -> None:
    provisioning = ROOT / "deploy" / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    boards = yaml.safe_load((provisioning / "dashboards" / "surestep.yml").read_text())
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    assert "prometheus" in compose["services"]
    mounts = [str(volume).split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert boards["providers"][0]["options"]["path"] in mounts


@needs_compose
def test_a_second_model_has_services_of_its_own() -> None:
    """And the gateway, which is told of both, takes that for settings."""
    second = ("-f", str(ROOT / "deploy" / "two-models.yml"))
    services = config(*second, SURESTEP_SECOND_MODEL="owner/second", SURESTEP_MODEL="owner/first")
    environ = services["services"]["gateway"]["environment"]
    given = {
        name.removeprefix("SURESTEP_").lower(): value
        for name, value in environ.items()
        if value is not None and name.startswith("SURESTEP_")
    }
    first, other = GatewaySettings(**given | {"grpc_secret_file": None}).each
    assert (first.model_names, other.model_names) == (("owner/first",), ("owner/second",))
    for one, name in ((first, "scheduler"), (other, "second-scheduler")):
        assert one.scheduler_url == (f"{name}:50051",)
        addresses = services["services"][name]["environment"]["SURESTEP_WORKER_ADDRESSES"]
        assert addresses == f'["{name.replace("scheduler", "worker")}:50061"]'
        assert f"{name.replace('scheduler', 'worker')}" in services["services"]


def test_dynamos_workers_read_the_events_of_their_schedulers() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "dynamo" / "compose.yaml").read_text())["services"]
    for name in ("", "second-"):
        surestep, command, *words = services[f"{name}dynamo-worker"]["command"]
        assert (surestep, command) == ("surestep", "dynamo")
        worker, scheduler = Dynamo.load(words), services[f"{name}scheduler"]["environment"]
        assert worker.scheduler == f"{name}scheduler:50051"
        events = KVEventsConfig(**json.loads(scheduler["SURESTEP_KV_EVENTS_CONFIG"]))
        assert events.publishes
        assert worker.kv_events_endpoint == events.endpoint.replace("*", f"{name}scheduler")
