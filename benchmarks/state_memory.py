"""Memory of the recurrent state of one request, against a copy of the state per draft position.

python benchmarks/state_memory.py

Arithmetic, not a measurement: sizes are those of published models, and the formula is the one by
which the worker allocates (a test compares it with what is allocated).
"""

from __future__ import annotations

import json

import torch
from surestep_worker.cache.recurrent import RecurrentSpec

_MIB = 1 << 20
_MODELS = {  # linear layers, key heads, value heads
    "Qwen3-Next-80B-A3B": (36, 16, 32),
    "Qwen3.5-27B": (48, 16, 48),
    "Qwen3.5-35B-A3B": (30, 16, 32),
}


def rows(num_drafts: int) -> dict[str, dict[str, float]]:
    """MiB per request for each model, float32 state and bfloat16 convolution inputs."""
    table = {}
    for name, (layers, k_heads, v_heads) in _MODELS.items():
        spec = RecurrentSpec(
            num_layers=layers,
            num_k_heads=k_heads,
            num_v_heads=v_heads,
            k_dim=128,
            v_dim=128,
            taps=4,
            dtype=torch.bfloat16,
        )
        ours, copies = spec.slot_bytes(num_drafts + 1), (num_drafts + 1) * spec.snapshot_bytes
        table[name] = {
            "state_and_records_mib": round(ours / _MIB, 1),
            "copies_mib": round(copies / _MIB, 1),
            "share": round(ours / copies, 3),
        }
    return table


if __name__ == "__main__":
    for k in range(1, 5):
        print(json.dumps({"num_speculative_tokens": k, "models": rows(k)}))
