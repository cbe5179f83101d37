from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "compile_step_kernels.py"


@pytest.mark.timeout(300)
def test_the_kernels_of_a_step_compile_for_a_gpu() -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env=environ, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    assert "_limit_kernel" in run.stdout.split()
    products = [line for line in run.stdout.splitlines() if line.startswith("_plain_linear_kernel")]
    assert len(products) == 5
    # Few rows and many are multiplied by one instruction, those of fp32 by none.
    wgmma = "_plain_linear_kernel wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
    assert set(products) == {wgmma, "_plain_linear_kernel"}
    quantized = [line for line in run.stdout.splitlines() if line.startswith("_linear_kernel")]
    assert len(quantized) == 4
    assert set(quantized) == {wgmma.replace("_plain", "")}
