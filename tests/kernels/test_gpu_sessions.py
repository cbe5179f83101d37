"""What tests on a GPU stand on: native kernels, and failures that are known at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from support.suite import gpu_failures

TESTS = """
def test_first(): assert 1 + 1 == 3
def test_second(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_third(): pass
"""


def test_kernels_are_interpreted_where_torch_sees_no_gpu() -> None:
    assert triton.knobs.runtime.interpret is not torch.cuda.is_available()


@pytest.mark.parametrize(("sees", "expected"), [(True, "0"), (False, "1")])
@pytest.mark.rotates(1)
def test_torch_decides_and_no_file_nor_variable(sees: bool, expected: str) -> None:
    program = f"import os, torch; torch.cuda.is_available = lambda: {sees}; import conftest; "
    program += "print(os.environ['TRITON_INTERPRET'])"
    root = Path(gpu_failures.__file__).parents[2]
    env = os.environ | {"TRITON_INTERPRET": "0" if expected == "1" else "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=env, capture_output=True, text=True
    )
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.rotates(1)
def test_failures_are_written_and_a_poisoned_worker_ends_alone(tmp_path: Path) -> None:
    (tmp_path / "test_made_up.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    failures = tmp_path / "failures.txt"
    plugins = ["-p", gpu_failures.__name__, "--failures", str(failures), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-n", "1", *plugins, "-rA"]
    env = os.environ | {"PYTHONPATH": str(Path(gpu_failures.__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "worker 'gw0' crashed" in done.stdout
    told = failures.read_text()
    assert told.count("=== ") == 2
    assert "assert (1 + 1) == 3" in told
    assert "illegal memory access" in told
