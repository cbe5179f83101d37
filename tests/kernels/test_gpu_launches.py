"""What a step launches on a GPU, counted without one: how often, and nothing it has to compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# A kernel is compiled twice, for two types; who serves is told when that begins and when it is over.
ANNOUNCE = """
import json, torch
from support.kernels.compile_launchers import Driver
from support.kernels.early_kernels import _storing_kernel as kernel
from surestep_kernels.columns.gpu.compilations import watch_compilations
from triton.runtime import driver
driver.set_active(Driver())
compilations, told = watch_compilations(), []
class Watch:
    def compiling(self): told.append("begins")
    def compiled(self): told.append("ends")
def launch(dtype):
    out, x = (torch.empty(1, dtype=dtype, device="meta") for _ in range(2))
    kernel.kernel.warmup(out, x, BLOCK=64, grid=(1,))
launch(torch.float32)
compilations.serve(Watch())
launch(torch.float32)
launch(torch.int32)
print(json.dumps([told, compilations.num_late]))
"""
# Of a layer with its MLP, at one row; and of what stands around the layers, sampling included.
MOST = {
    "dense": 10,
    "dense with norms of heads": 10,
    "gated attention": 11,
    "gated delta": 12,
    "gated attention with experts": 15,
}
AROUND = 21


def run(*command: str) -> list[Any]:
    """Lines of JSON of a process of its own, where kernels are not those of the interpreter."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    env["TRITON_INTERPRET"] = "0"
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return list(map(json.loads, done.stdout.splitlines()))


@pytest.mark.timeout(300)
@pytest.mark.rotates(3, turn=2)
def test_a_layer_takes_no_more_launches_than_it_may() -> None:
    program = str(ROOT / "benchmarks/gpu/launches.py")
    found = {line["kind"]: line for line in run(program, "--batch", "1", "--kinds", *MOST)}
    assert {kind: line["layer"] for kind, line in found.items()} == MOST
    assert {line["step"] for line in found.values()} <= set(range(AROUND + 1))
    # Products there are, in the number that a layer has: nothing is missing from the count.
    assert found["dense"]["of_layer"]["_plain_linear_kernel"] == 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", ["dense", "experts", "hybrid", "hybrid with an MTP head", "latent", "gpt-oss"]
)
@pytest.mark.rotates(5)
def test_no_step_asks_for_a_kernel_that_the_warm_up_has_not_made(kind: str) -> None:
    """Or all streams would wait for a compiler, by the length of a prompt."""
    (found,) = run(str(ROOT / "tests/support/kernels/late_variants.py"), kind)
    assert found["warm"] > 30
    assert found["late"] == []


@pytest.mark.timeout(300)
def test_the_compiler_is_announced_while_serving() -> None:
    assert run("-c", ANNOUNCE) == [[["begins", "ends"], 1]]
