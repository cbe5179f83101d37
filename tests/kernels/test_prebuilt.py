"""Kernels compiled ahead: which a processor gets, and that they are those compiled on it."""

from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.ahead import compiled_ahead
from support.kernels.cases import (
    AFFINE,
    FORMATS,
    assert_close,
    exact_weight,
    make_affine,
    make_quantized,
)
from surestep_kernels import KernelSet, QuantizedWeight
from surestep_kernels.columns.cpu import prebuild
from surestep_kernels.columns.cpu.build import build_library, file_of, inventory
from surestep_kernels.columns.cpu.compiling import BuildError, processor_features
from surestep_kernels.columns.cpu.prebuilt import TARGETS, Target, fitting
from surestep_kernels.cpu import load_cpu
from surestep_kernels.linear import WeightFormat

V3, V4, VNNI, BF16 = (target.needs for target in reversed(TARGETS["x86_64"]))
HERE = set(processor_features().split())
FITS_HERE = [target.name for target in fitting(platform.machine(), HERE)]
# Compiling all of C takes minutes on a busy machine.
takes_long = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    ("machine", "features", "names"),
    [
        ("x86_64", BF16, ["x86-64-v4-bf16", "x86-64-v4-vnni", "x86-64-v4", "x86-64-v3"]),
        ("x86_64", VNNI, ["x86-64-v4-vnni", "x86-64-v4", "x86-64-v3"]),
        ("x86_64", V4 | {"amx_bf16"}, ["x86-64-v4", "x86-64-v3"]),
        ("x86_64", V4 - {"avx512vl"}, ["x86-64-v3"]),
        ("x86_64", V3 | {"avx512_bf16"}, ["x86-64-v3"]),
        ("x86_64", V3 - {"fma"}, []),
        ("x86_64", frozenset(), []),
        ("aarch64", {"fp", "asimd", "bf16"}, ["armv8-a"]),
        ("riscv64", V4, []),
    ],
)
def test_features_decide(machine: str, features: set[str], names: list[str]) -> None:
    assert [target.name for target in fitting(machine, features)] == names


@settings(deadline=None)
@given(st.sampled_from(sorted(TARGETS)), st.data())
def test_what_fits_needs_nothing_that_is_not_there(machine: str, data: st.DataObject) -> None:
    known = sorted(set().union(*(target.needs for target in TARGETS[machine])))
    features = data.draw(st.sets(st.sampled_from(known)))
    fit = fitting(machine, features)
    assert all(target.needs <= features for target in fit)
    assert all(target in fit or target.needs - features for target in TARGETS[machine])


@pytest.fixture
def folder(few_sources: Path, tmp_path: Path) -> Path:
    """Libraries of few sources."""
    prebuild.build_all(tmp_path / "ahead", platform.machine())
    return tmp_path / "ahead"


def test_one_compiled_ahead_is_taken_without_a_compiler_or_a_cache(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO):
        code = build_library(tmp_path / "cache", prebuilt=folder)
    (best,) = (t for t in TARGETS[platform.machine()] if t.name == FITS_HERE[0])
    assert code == best.file(folder).read_bytes()
    assert not (tmp_path / "cache").exists()
    assert [record.message for record in caplog.records] == [
        f"C kernels compiled ahead for {FITS_HERE[0]}"
    ]


def library(target: Target) -> KernelSet:
    return load_cpu(compiled_ahead(target).read_bytes())


@takes_long
@pytest.mark.rotates(2, turn=1)
def test_results_are_those_of_a_library_compiled_here(compiled: KernelSet) -> None:
    (best,) = (t for t in TARGETS[platform.machine()] if t.name == FITS_HERE[0])
    ahead, here = library(best), compiled
    generator = torch.Generator().manual_seed(3)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(13, 200, generator=generator).to(dtype)
        weight = torch.randn(77, 200, generator=generator).to(dtype)
        results = [ops.linear(x, ops.pack_linear(weight)) for ops in (ahead, here)]
        assert torch.equal(*results)
        norms = [ops.rms_norm(x, torch.ones(200), 1e-5) for ops in (ahead, here)]
        assert torch.equal(*norms)


PLAIN_C = {"x86_64": "-march=x86-64", "aarch64": "-march=armv8-a"}  # no wide vectors
PLAIN = Target("plain", (PLAIN_C[platform.machine()],), frozenset())
RUN_HERE = [*(t for t in TARGETS[platform.machine()] if t.name in FITS_HERE), PLAIN]


@pytest.fixture(scope="module", params=RUN_HERE, ids=lambda target: target.name)
def quantised_ops(request: pytest.FixtureRequest) -> KernelSet:
    """The ops as each library has them that runs here."""
    ops = library(request.param)
    if request.param is PLAIN:
        assert CDLL(str(file_of(ops.code))).surestep_panel_width() == 16
    return ops


@takes_long
@pytest.mark.rotates(2, turn=1)
@pytest.mark.parametrize("make", [make_quantized, make_affine])
def test_every_library_multiplies_quantised_weights(
    quantised_ops: KernelSet, make: Callable[[WeightFormat, int, int, int], QuantizedWeight]
) -> None:
    """Few rows and many, which take other ways to the same bits."""
    for format_ in FORMATS if make is make_quantized else AFFINE:
        weight = make(format_, 77, 200, 32)
        packed, x = quantised_ops.pack_quantized(weight), torch.randn(40, 200)
        expected = (x.double() @ exact_weight(weight).T).float()
        together = quantised_ops.linear(x, packed)
        assert_close(together, expected)
        alone = [quantised_ops.linear(row, packed) for row in x.split(1)]
        assert torch.equal(torch.cat(alone), together)


def test_each_way_to_kernels_is_told(few_sources: Path, tmp_path: Path) -> None:
    cache, ahead = tmp_path / "cache", tmp_path / "ahead"

    def told(compiler: str = "cc") -> str:
        found = inventory(cache, compiler, ahead)
        assert found["instructions"] == FITS_HERE[0]
        return found["kernels"]

    assert told("no-such-compiler").startswith("reference, with --allow-slow: no C compiler")
    assert told().startswith("to be compiled at the first start by cc (")
    assert told("false").startswith("to be compiled at the first start by false, which fails")
    build_library(cache)
    assert told("no-such-compiler") == "compiled here"
    prebuild.build_all(ahead, platform.machine())
    assert told("no-such-compiler") == f"prebuilt for {FITS_HERE[0]}"


def test_what_is_there_is_not_compiled_again(folder: Path) -> None:
    made = {file: file.stat().st_mtime_ns for file in folder.iterdir()}
    removed = next(iter(made))
    removed.unlink()
    files = prebuild.build_all(folder, platform.machine())
    assert set(files) == set(folder.iterdir()) == set(made)  # and nothing half made
    assert {file for file in files if file.stat().st_mtime_ns != made[file]} == {removed}


def test_one_of_other_sources_is_not_found(folder: Path, tmp_path: Path) -> None:
    stale = tmp_path / "stale"
    stale.mkdir()
    for path in folder.iterdir():
        (stale / f"{path.stem[:-4]}0000.so").write_bytes(b"")
    with pytest.raises(BuildError, match="no kernels were compiled ahead"):
        build_library(tmp_path, "no-such-compiler", stale)


def test_a_processor_for_which_none_is_there_is_told_what_it_lacks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worst = TARGETS[platform.machine()][-1]
    lacking = sorted(worst.needs)[0]
    rest = " ".join(HERE - {lacking})
    monkeypatch.setattr("surestep_kernels.columns.cpu.prebuilt.processor_features", lambda: rest)
    told = f"no C compiler .*need {worst.name} at least: this processor lacks {lacking}: install"
    with pytest.raises(BuildError, match=told):
        build_library(tmp_path, "no-such-compiler", folder)


def test_a_cross_compiler_serves_another_machine(tmp_path: Path) -> None:
    other = next(machine for machine in TARGETS if machine != platform.machine())
    if shutil.which(f"{other}-linux-gnu-gcc") is None:
        with pytest.raises(BuildError, match=f"no compiler: {other}-linux-gnu-gcc"):
            prebuild.build_all(tmp_path, other)
        return
    files = prebuild.build_all(tmp_path, other)
    machines = {"aarch64": 183, "x86_64": 62}  # e_machine of ELF
    for file in files:
        assert int.from_bytes(file.read_bytes()[18:20], "little") == machines[other]


def test_a_machine_that_nobody_has_thought_of_is_refused(tmp_path: Path) -> None:
    command = (
        sys.executable,
        "-m",
        "surestep_kernels.columns.cpu.prebuild",
        "sparc",
        str(tmp_path),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "sparc: kernels are compiled ahead for x86_64 and aarch64" in done.stderr
