"""What measures a GPU, on the CPU with tiny models: the figures mean nothing, their making does."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import gpu_decode
import gpu_divergence
import gpu_host
import gpu_trace
import machine
import pytest
import torch
from gpu_trace import STEP, Span, analyse, gaps, longest_kernels
from make_shaped_checkpoint import main as make_shaped

SMALL = ["--device", "cpu", "--context", "24", "--kv-memory", "0.01"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_shaped(["tiny-llama", str(folder)])
    return folder


def event(category: str, name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}


def steps(*bounds: float) -> list[dict[str, Any]]:
    pairs = itertools.pairwise(bounds)
    return [event("user_annotation", STEP, begin, end) for begin, end in pairs]


def test_gaps_of_overlapping_spans() -> None:
    window = Span(10, 100)
    assert gaps([], window) == [window]
    assert gaps([Span(0, 200)], window) == []
    busy = [Span(60, 70), Span(0, 20), Span(15, 18), Span(65, 80), Span(100, 110)]
    assert gaps(busy, window) == [Span(20, 60), Span(80, 100)]


def test_a_trace_of_a_device_that_waits() -> None:
    trace = [
        *steps(0, 50, 100, 200),  # the first is left out
        event("kernel", "gemm", 40, 60),
        event("gpu_memcpy", "Memcpy DtoH", 65, 70),
        event("kernel", "gemm", 120, 195),
        event("gpu_user_annotation", STEP, 50, 200),  # no work of its own
        event("cuda_runtime", "cudaLaunchKernel", 55, 56),
        event("cuda_runtime", "cudaStreamSynchronize", 20, 30),  # in the first
        event("cuda_runtime", "cudaStreamSynchronize", 110, 115),
        event("cuda_runtime", "cudaMemcpy", 120, 125),
        event("cuda_runtime", "cudaEventSynchronize", 150, 190),
        event("cuda_runtime", "cudaHostAlloc", 52, 54),
        event("cuda_runtime", "cudaMalloc", 20, 22),  # in the first
        event("cuda_driver", "cuModuleLoadData", 56, 58),
        event("cuda_runtime", "cudaDeviceSynchronize", 210, 220),  # the profiler's own
        {"ph": "M", "name": "process_name"},
    ]
    figures = analyse(trace)
    assert (figures.steps, figures.step_us, figures.device_activities) == (2, 75, 3)
    assert figures.device_idle_percent == pytest.approx(100 * (5 + 50 + 5) / 150)
    assert figures.longest_gap_us == 50
    assert (figures.host_syncs, figures.event_waits) == (2, 1)
    assert (figures.allocations, figures.module_loads) == (1, 1)
    assert longest_kernels(trace) == [("gemm", 2, 95)]
    with pytest.raises(ValueError, match="fewer than two steps"):
        analyse(steps(0, 50))


def test_a_trace_is_recorded_and_written(llama: Path, tmp_path: Path) -> None:
    out, trace = tmp_path / "trace.json", tmp_path / "chrome.json.gz"
    flags = ["--model", str(llama), *SMALL, "--batch", "2", "--steps", "4"]
    assert gpu_trace.main([*flags, "--out", str(out), "--trace", str(trace)]) == 0
    figures = json.loads(out.read_text())["trace"]
    assert (figures["steps"], figures["depth"], figures["host_syncs"]) == (3, 1, 0)
    names = {e["name"] for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert STEP in names


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3.5"])
@pytest.mark.rotates(2)
def test_decoding_is_timed_with_and_without_pipelining(tmp_path: Path, shape: str) -> None:
    make_shaped([shape, str(tmp_path)])
    out = tmp_path / "decode.json"
    flags = ["--model", str(tmp_path), *SMALL, "--batch", "1", "2", "--depth", "0", "1"]
    flags += [
        "--prompts",
        "50",
        "700",
        "--window",
        "2",
        "--dtype",
        "float32",
    ]  # the latter in two steps
    gpu_decode.main([*flags, "--out", str(out)])
    figures = json.loads(out.read_text())
    *decode, short, long = figures["decode"]
    kinds = [(line["batch"], line["window"], line["depth"]) for line in decode]
    assert kinds == [(b, *kind) for b in (1, 2) for kind in ((1, 0), (1, 1), (2, 0))]
    assert all(line["steps_per_s"] > 0 for line in decode)
    assert (short["prompt"], long["prompt"]) == (50, 700)
    assert long["first_token_ms"] > short["first_token_ms"] > 0
    assert figures["machine"]["seconds_to_ready"] > 0


@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3.5"])
@pytest.mark.rotates(2)
def test_in_float32_nothing_diverges(tmp_path: Path, shape: str) -> None:
    make_shaped([shape, str(tmp_path)])
    out = tmp_path / "divergence.json"
    flags = ["--model", str(tmp_path), "--device", "cpu", "--dtype", "float32", "--prompts", "2"]
    gpu_divergence.main([*flags, "--max-tokens", "12", "--prompt-tokens", "60", "--out", str(out)])
    figures = json.loads(out.read_text())["divergence"]
    assert figures["with drafts and without"]["equal"] == 2
    assert figures["ours and transformers"]["equal"] == 2


def test_a_divergence_is_told_with_its_place_and_the_gap_there() -> None:
    prompts, ours, theirs = [[1, 2], [3]], [[5, 6, 7], [8, 8, 8]], [[5, 9, 7], [8, 8, 8]]
    seen = list[list[int]]()

    class Model:
        device = "cpu"

        def __call__(self, ids: torch.Tensor) -> Any:
            seen.append(ids[0].tolist())
            self.logits = torch.tensor([[[0.0, 1.5, 4.0, 3.75]]])
            return self

    found = gpu_divergence.report(Model(), prompts, ours, theirs)
    assert seen == [[1, 2, 5]]  # what both agree on
    assert (found["answers"], found["equal"], found["largest_gap"]) == (2, 1, 0.25)
    (first,) = found["first_differences"]
    assert (first["prompt"], first["position"]) == (0, 1)
    assert (first["tokens"], first["best"]) == ((6, 9), (2, 3))


def test_the_host_time_of_steps_is_measured(tmp_path: Path) -> None:
    """Decode rows, a prompt among them, and one too long for any captured step."""
    for prompt, has_bucket in ((0, True), (20, True), (2000, False)):
        out = tmp_path / f"{prompt}.json"
        gpu_host.main(["--rows", "1", "5", "--prompt", str(prompt), "--out", str(out)])
        lines = json.loads(out.read_text())["host"]
        assert [line["rows"] for line in lines] == [1, 5]
        assert all(line["tensors_us"] > 0 for line in lines)
        assert [("in_place_us" in line) for line in lines] == [has_bucket] * 2


def test_seconds_since_start_counts_from_the_process() -> None:
    before = machine.seconds_since_start()
    time.sleep(0.05)
    assert 0.04 < machine.seconds_since_start() - before < 30
    assert 0 < before < 1e6


# Stands in for an interpreter: parts succeed, but for one that fails and one that does not end.
FAKE_PYTHON = """#!/bin/bash
case "$1 $2" in
  "- "*) cat > /dev/null ;;
  *make_shaped*) mkdir -p "$3" && echo x >> "$MADE" ;;
  *gpu_trace*) exit 3 ;;
  *gpu_ops*) sleep 60 ;;
esac
"""


def gpu_check(tmp_path: Path, *parts: str) -> subprocess.CompletedProcess[str]:
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    own = {"PYTHON": str(python), "OUT": str(tmp_path / "out"), "WHEELS": str(tmp_path / "none")}
    env = os.environ | own | {"BUDGET_S": "7", "MADE": str(tmp_path / "made")}
    script = Path(gpu_trace.__file__).parents[1] / "scripts" / "gpu_check"
    return subprocess.run([script, *parts], env=env, capture_output=True, text=True, timeout=60)


def test_gpu_check_goes_on_behind_a_part_that_fails(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "decode", "trace", "ops", "divergence")
    table = done.stdout.splitlines()[-5:]
    told = [" ".join(line.split()[:-2]) for line in table]
    assert told[:3] == ["make-llama-3.2-1b ok", "decode ok", "trace rc 3"]
    assert told[3:] == ["ops ran too long", "divergence no time left"]
    assert done.returncode == 1
    assert (tmp_path / "made").read_text() == "x\n"  # once for all who want it


def test_gpu_check_knows_its_parts(tmp_path: Path) -> None:
    done = gpu_check(tmp_path, "decode", "nonsense")
    assert done.returncode == 2
    assert "no part nonsense" in done.stderr
    assert not (tmp_path / "made").exists()
    assert gpu_check(tmp_path, "decode").returncode == 0
