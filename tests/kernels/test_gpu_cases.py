"""The benchmark of the kernels still runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from inspect import isfunction

import pytest
import torch
from gpu import cases as gpu_cases
from gpu import ops as gpu_ops
from surestep_kernels import KernelSet
from surestep_kernels.table import StepOps

TINIES = gpu_cases.TINY, gpu_cases.TINY_GPT_OSS
CASES = [case for cases in gpu_cases.OPS.values() for tiny in TINIES for case in cases(tiny)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.shape}")
def test_every_case_runs_at_tiny_sizes(gpu: str, case: gpu_cases.Case) -> None:
    work = case.make(gpu)
    work.run()
    assert work.nbytes > 0


def test_every_op_has_cases_for_some_model() -> None:
    for cases in gpu_cases.OPS.values():
        assert max(len(list(cases(sizes))) for sizes in gpu_cases.MODELS) >= 4


def test_every_op_of_a_step_is_timed() -> None:
    """But for what only happens when a model loads, and what no kernel for GPUs does."""
    loading = {"pack_linear", "pack_quantized", "pack_experts", "kv_cache_shape"}
    no_ops = {"name", "set_num_threads", "step", "compilations", "code", "products", "delta_chunk"}
    no_ops |= {"synchronous", "affine", "latent", "multiply_heads", "route_sigmoid", "dense_layers"}
    no_ops |= {"soft_cap", "digest_pages", "pack_heads"}
    names = {field.name for field in (*fields(KernelSet), *fields(StepOps))}
    names |= {name for name, made in vars(KernelSet).items() if isfunction(made) and name[0] != "_"}
    assert names - loading - no_ops <= gpu_cases.OPS.keys()


def test_the_command_runs_without_a_device() -> None:
    command = [sys.executable, "-m", "gpu.ops", "--smoke", "--ops", "silu_and_mul"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["shape"] for line in lines] == ["T=1 I=136", "T=3 I=136"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_timed_line_is_complete() -> None:
    case = next(gpu_cases.linear(gpu_cases.TINY))
    figures = gpu_ops._measure(case, copy_gb_s=1000.0)
    assert figures.keys() == {"us", "bytes", "gb_s", "copy_percent", "tflop_s"}
    assert min(figures.values()) >= 0


def test_the_table_has_a_line_per_case() -> None:
    table = gpu_ops._table([{"op": "linear", "us": 1.5}, {"op": "ngram", "tflop_s": 2.0}])
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["linear", "1.5"],
        ["ngram", "2.0"],
    ]
