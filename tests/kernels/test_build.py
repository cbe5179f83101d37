from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet, load_kernels
from surestep_kernels.columns.cpu.build import build_key, build_library, default_cache, file_of
from surestep_kernels.columns.cpu.compiling import BuildError
from surestep_kernels.cpu import load_cpu


def test_concurrent_builds_leave_one_library(few_sources: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(build_library, [tmp_path / "cache"] * 2))
    (file,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert file == tmp_path / "cache" / build_key() / "libsurestep.so"
    assert file.read_bytes() in codes
    assert all(CDLL(str(file_of(code))) for code in codes)


def test_a_built_library_is_used_again(few_sources: Path, tmp_path: Path) -> None:
    build_library(tmp_path)
    library = tmp_path / build_key() / "libsurestep.so"
    before = library.stat().st_mtime_ns
    code = build_library(tmp_path, compiler="no-such-compiler")
    assert code == library.read_bytes()
    assert library.stat().st_mtime_ns == before
    assert CDLL(str(file_of(code))).surestep_panel_width() == 16
    (few_sources / "one.c").write_text("int surestep_panel_width(void) { return 32; }\n")
    assert CDLL(str(file_of(build_library(tmp_path)))).surestep_panel_width() == 32


def test_a_library_is_loaded_once_and_from_memory(compiled: KernelSet) -> None:
    code = compiled.code
    assert file_of(code) == file_of(bytes(bytearray(code)))
    assert load_cpu(code).code == code
    inode = str(file_of(code).stat().st_ino)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert sum(line[4] == inode and "x" in line[1] for line in mapped) == 1


def test_a_cache_that_cannot_be_written_costs_only_the_cache(
    few_sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    cache.write_text("a file where a folder should be")
    code = build_library(cache)
    assert CDLL(str(file_of(code))).surestep_panel_width() == 16
    (record,) = (r for r in caplog.records if r.levelname == "WARNING")
    assert record.message.startswith(f"the compiled kernels cannot be kept in {cache}")


def test_without_a_compiler_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no-such-compiler"):
        build_library(tmp_path, compiler="no-such-compiler")
    with pytest.raises(BuildError, match="false failed"):
        build_library(tmp_path, compiler="false")
    assert not list(tmp_path.rglob("*.so"))


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "surestep" / "kernels"


@pytest.fixture
def nothing_to_compile_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("nothing_to_compile_with")
def test_without_kernels_and_a_compiler_nothing_serves() -> None:
    told = r"^no C kernels: no C compiler \(cc\), and no .* ahead: install gcc; --allow-slow serves"
    with pytest.raises(InvalidRequest, match=told):
        load_kernels("cpu")


@pytest.mark.usefixtures("nothing_to_compile_with")
def test_references_serve_where_they_are_allowed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        kernels = load_kernels("cpu", allow_slow=True)
    assert kernels.name == "torch reference"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_references_on_request_and_on_cuda() -> None:
    assert load_kernels("cpu", cpu_kernels="reference").name == "torch reference"
    kernels = load_kernels("cuda")
    x = torch.randn(2, 8)
    assert kernels.rms_norm(x, torch.ones(8), 1e-5).shape == (2, 8)
