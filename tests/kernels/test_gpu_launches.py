"""How many launches a layer takes on a GPU; benchmarks/gpu_launches.py counts them without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Of a layer with its MLP, at one row; and of what stands around the layers, sampling included.
MOST = {
    "dense": 10,
    "dense with norms of heads": 10,
    "gated attention": 11,
    "gated delta": 12,
    "gated attention with experts": 15,
}
AROUND = 21


@pytest.mark.timeout(300)
@pytest.mark.rotates(3, turn=2)
def test_a_layer_takes_no_more_launches_than_it_may() -> None:
    """In a process of its own, where kernels are not those of the interpreter."""
    path = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, str(ROOT / "benchmarks/gpu_launches.py"), "--batch", "1"]
    done = subprocess.run(
        [*command, "--kinds", *MOST],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {line["kind"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert {kind: line["layer"] for kind, line in found.items()} == MOST
    assert {line["step"] for line in found.values()} <= set(range(AROUND + 1))
    # Products there are, in the number that a layer has: nothing is missing from the count.
    assert found["dense"]["of_layer"]["_plain_linear_kernel"] == 4
