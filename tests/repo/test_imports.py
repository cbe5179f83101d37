"""proto, common <- gateway | scheduler | worker; kernels <- worker; torch where tensors are."""

from __future__ import annotations

import subprocess
import sys

import pytest
from repo.source import PACKAGES, ROOT, Source, eager_imports, imports, product

_SHARED = {"surestep_proto", "surestep_common"}
_MAY_IMPORT = {
    "surestep_proto": set[str](),
    "surestep_common": {"surestep_proto"},
    "surestep_kernels": {"surestep_common"},
    "surestep_gateway": _SHARED,
    "surestep_scheduler": _SHARED,
    "surestep_worker": _SHARED | {"surestep_kernels"},
    "surestep_cli": set(PACKAGES) - {"surestep_kernels"},
    "surestep": _SHARED | {"surestep_cli"},  # that it is started by a module's name
}
_NO_TORCH = {
    "surestep_proto",
    "surestep_common",
    "surestep_gateway",
    "surestep_scheduler",
    "surestep_cli",
    "surestep",
}
# The policy core decides from its arguments alone: no I/O, no clock, no tensors.
_PURE = tuple(
    f"scheduler_svc/surestep_scheduler/{path}"
    for path in (*("core/", "cache/", "policy/", "engine/wire.py", "speculation/draft_length.py"),)
)
_IMPURE = {"torch", "grpc", "asyncio", "time", "socket", "os", "threading", "logging", "random"}


def _root(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("source", product(), ids=lambda s: s.name)
def test_imports_point_the_right_way(source: Source) -> None:
    assert source.package is not None
    allowed = _MAY_IMPORT[source.package] | {source.package}
    wrong = [
        f"{source.name}:{line} {name}"
        for line, name in imports(source)
        if _root(name) in PACKAGES and _root(name) not in allowed
    ]
    assert wrong == []


def test_torch_stays_with_the_tensors() -> None:
    wrong = [
        f"{source.name}:{line} {name}"
        for source in product()
        if source.package in _NO_TORCH
        for line, name in imports(source)
        if _root(name) in {"torch", "triton"}
    ]
    assert wrong == []


def test_an_api_knows_no_other() -> None:
    """But for the one path that takes requests of all kinds."""
    apis = "surestep_gateway.apis."
    crossing = {
        (source.name.split("/")[3], name.removeprefix(apis).split(".")[0])
        for source in product()
        if source.name.startswith("gateway/surestep_gateway/apis/") and source.name.count("/") > 3
        for _, name in imports(source)
        if name.startswith(apis) and name.count(".") > 2
    }
    others = {(one, other) for one, other in crossing if one != other}
    assert others == {("invocations", "openai"), ("invocations", "embeddings")}


def test_the_policy_core_is_pure() -> None:
    core = [source for source in product() if source.name.startswith(_PURE)]
    assert all(any(s.name.startswith(path) for s in core) for path in _PURE)
    wrong = [
        f"{source.name} {name}"
        for source in core
        for name in eager_imports(source)
        if _root(name) in _IMPURE
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module",
    ["surestep_gateway.settings.config", "surestep_scheduler.config", "surestep_worker.config"],
)
def test_settings_load_without_tensors(module: str) -> None:
    _assert_light(module, {"torch", "transformers", "fastapi"})


def test_the_command_line_is_light() -> None:
    _assert_light("surestep_cli.main", {"torch", "transformers", "fastapi", "aiohttp"})


def test_the_client_is_light() -> None:
    """Nothing more is needed than docs/use/grpc.md installs: gRPC's packages alone."""
    heavy = {
        "torch",
        "transformers",
        "numpy",
        "tokenizers",
        "rich",
        "starlette",
        "aiohttp",
        "uvloop",
    }
    _assert_light("surestep.client", heavy)


def _assert_light(module: str, heavy: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted({heavy!r} & set(sys.modules)))"
    path = ":".join(str(ROOT / folder) for folder in PACKAGES.values())
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == []
