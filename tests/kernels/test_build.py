from __future__ import annotations

import logging
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from surestep_kernels import load_kernels
from surestep_kernels.build import SOURCES, BuildError, build_library, default_cache
from surestep_kernels.native import NativeOps


def test_concurrent_builds_leave_one_library(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        built = list(pool.map(build_library, [tmp_path] * 3))
    assert len(set(built)) == 1
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["libsurestep.so"]
    assert NativeOps.load(files[0])


def test_a_built_library_is_used_again(tmp_path: Path) -> None:
    library = build_library(tmp_path)
    before = library.stat().st_mtime_ns
    assert build_library(tmp_path, compiler="no-such-compiler") == library
    assert library.stat().st_mtime_ns == before
    assert CDLL(str(library)).surestep_panel_width() in (16, 32)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of another machine")
def test_the_sources_compile_for_processors_without_wide_vectors(tmp_path: Path) -> None:
    sources = sorted(str(path) for path in SOURCES.glob("*.c"))
    flags = ("-std=gnu11", "-O0", "-march=x86-64-v2", "-w", "-fPIC", "-shared")
    library = tmp_path / "plain.so"
    subprocess.run(["cc", *flags, "-o", str(library), *sources, "-lm"], check=True)
    assert CDLL(str(library)).surestep_panel_width() == 16


def test_without_a_compiler_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no-such-compiler"):
        build_library(tmp_path, compiler="no-such-compiler")
    with pytest.raises(BuildError, match="false failed"):
        build_library(tmp_path, compiler="false")
    assert not list(tmp_path.rglob("*.so"))


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "surestep" / "kernels"


def test_references_serve_where_nothing_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO):
        kernels = load_kernels("cpu")
    assert kernels.name == "torch reference"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_references_on_request_and_on_cuda() -> None:
    assert load_kernels("cpu", cpu_kernels="reference").name == "torch reference"
    kernels = load_kernels("cuda")
    x = torch.randn(2, 8)
    assert kernels.rms_norm(x, torch.ones(8), 1e-5).shape == (2, 8)
