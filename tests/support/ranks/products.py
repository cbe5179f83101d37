"""Ranks that settle on a family of products; a module of its own, for processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from support.ranks.tensor_parallel import TIMEOUT_S
from surestep_kernels.columns.products import probe
from surestep_kernels.columns.products.families import Products
from surestep_kernels.columns.products.probe_results import ProbeResult
from surestep_kernels.dispatch import load_triton
from surestep_kernels.linear import pack_linear_reference
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.startup.products import choose_products
from surestep_worker.step.heartbeat import Heartbeat

CASES = {  # of each rank: what its card says, and which card it is
    "both equal": (("", "a"), ("", "a")),
    "one unequal": (("", "a"), ("something", "a")),
    "other cards": (("", "a"), ("", "b")),
}


def settle_main(rank: int, address: str, folder: Path) -> None:
    """Leaves the family of each case in `folder`."""
    tp = TensorParallel.connect(rank, 2, address, "cpu", TIMEOUT_S)
    identity = probe.identity
    found = {}
    for name, ranks in CASES.items():
        unequal, card = ranks[rank]
        probe.probe = lambda *_, unequal=unequal, **__: ProbeResult(unequal)
        probe.identity = lambda *of, card=card: identity(*of) | {"device": card}
        kernels = load_triton()
        assert isinstance(kernels.products, Products)
        kernels.products.register([pack_linear_reference(torch.ones(3 + rank, 8).bfloat16())])
        kept = folder / f"{name}-{rank}"
        device = torch.device("cpu")
        choose_products(kernels, tp, device, Heartbeat.local(), folder=kept)
        found[name] = kernels.linear_backend
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    tp.close()
