"""What one rank of the tensor-parallel tests runs; a module of its own, to import little."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from support.checkpoints.deepseek import make_tiny_deepseek
from support.checkpoints.gpt_oss import make_tiny_gpt_oss
from support.checkpoints.hybrid import FAMILIES, make_tiny_hybrid
from support.checkpoints.quantize import quantize
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.stepping import Row, in_one_group, pack
from surestep_common.errors import Unavailable
from surestep_kernels import load_kernels
from surestep_kernels.fingerprint import row_fingerprints
from surestep_kernels.linear import ROUNDINGS
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.cache.recurrent import RecurrentCache
from surestep_worker.checkpoint.weight_store import WeightStore
from surestep_worker.distributed.peer_memory import gather_strings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import ModelSource, load_model
from torch import Tensor, distributed

BLOCK_SIZE = 16
SLICES = ((0, 9), (0, 1), (0, 5), (3, 4), (4, 8))  # of rows that ranks sum
TIMEOUT_S = 60.0
VARIANTS: dict[str, dict[str, Any]] = {
    "split-kv-heads": {"kv_heads": 2, "vocab": 384},
    "shared-kv-head-odd-vocab": {"kv_heads": 1, "vocab": 385},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen3-tied": {"family": "qwen3", "tie": True, "vocab": 383},
    "qwen3_next": {"family": "qwen3_next"},
    "qwen3_5-tied": {"family": "qwen3_5", "tie": True, "vocab": 383},
    "qwen3_5_moe": {"family": "qwen3_5_moe"},
    "qwen3_next-expert-parallel": {"family": "qwen3_next"},
    "qwen3_5_moe-expert-parallel": {"family": "qwen3_5_moe"},
    **{
        f"qwen3_moe-{method}{how}": {"family": "qwen3_moe", "hidden": 128, "intermediate": 128}
        for method in ("awq", "gptq")
        for how in ("", "-expert-parallel")
    },
    "gpt-oss": {},
    "gpt-oss-shared-kv-head": {"num_key_value_heads": 1},
    "gpt-oss-expert-parallel": {},
    "deepseek": {"family": "deepseek_v3", "vocab": 383},
    "deepseek-glm-expert-parallel": {"family": "glm_moe_dsa"},
    "deepseek-glm-4": {"family": "glm4_moe"},
}


def make_variant(path: Path, name: str) -> None:
    """Write the checkpoint of a variant."""
    variant = VARIANTS[name]
    if name.startswith("gpt-oss"):
        make_tiny_gpt_oss(path / name, **variant)
        return
    if name.startswith("deepseek"):
        make_tiny_deepseek(path / name, **variant)
        return
    if name.startswith("qwen3_moe"):
        sizes: dict[str, Any] = {
            "moe_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        }
        source = make_tiny_checkpoint(path / f"{name}-source", **variant, **sizes)
        method = name.split("-")[1]
        quantize(source, method, plain=("gate",), group_size=32).quantized.rename(path / name)
        return
    make = make_tiny_hybrid if variant.get("family") in FAMILIES else make_tiny_checkpoint
    make(path / name, **variant)


STEPS = (
    [Row([*range(40, 55)], 0, (3, 1), slot=1), Row([8, 8, 1], 0, (2, 4))],
    [Row([4, 5, 6], 15, (3, 1), slot=1, window=True), Row([6, 382, 3], 3, (2, 4), window=True)],
)


@torch.inference_mode()
def run_steps(
    path: Path,
    tp: TensorParallel,
    cpu_kernels: Literal["auto", "reference"] = "auto",
    store: WeightStore | None = None,
) -> dict[str, Tensor]:
    """Logits and fingerprint of every step. "NAME+int8": those of checkpoint NAME, rounded."""
    kernels, (name, _, rounding) = load_kernels("cpu", cpu_kernels), path.name.partition("+")
    model = load_model(
        ModelSource(path.with_name(name), store),
        dtype="auto",
        device="cpu",
        tp=tp,
        kernels=kernels,
        expert_parallel=name.endswith("expert-parallel"),
        rounding=ROUNDINGS.get(rounding),
    )
    kv, spec = (
        KVCache(in_one_group(model.kv_spec(BLOCK_SIZE)), 5, kernels, "cpu"),
        model.recurrent_spec(),
    )
    caches = Caches(kv, RecurrentCache(spec, 2, 4, 0, "cpu") if spec else None)
    hidden = [model.forward(pack(rows, BLOCK_SIZE), caches) for rows in STEPS]
    return {
        "logits": tp.broadcast(torch.cat([model.logits(h) for h in hidden])),
        "fingerprints": torch.stack([row_fingerprints(h).sum() for h in hidden]),
    }


def rank_main(rank: int, address: str, folder: Path, names: Sequence[str]) -> None:
    """Run the checkpoints `names` in `folder`, and write the results there."""
    torch.set_num_threads(1)
    tp = TensorParallel.connect(rank, 2, address, "cpu", TIMEOUT_S)
    results = {name: run_steps(folder / name, tp) for name in names}
    results["collectives"] = {
        "reduced": tp.all_reduce(torch.full((2, 3), 1.5 + rank, dtype=torch.bfloat16)),
        "gathered": tp.all_gather(torch.full((2, 2), float(rank))),
        "first": tp.gather_to_first(torch.full((2, 2), float(1 + rank)), 3),
        "broadcast": tp.broadcast(torch.tensor([rank + 7])),
    }
    torch.save(results, folder / f"rank{rank}.pt")
    tp.close()


def addends(rank: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """What a rank has of [rows, width]; sums of three or more depend on their order."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sum_main(rank: int, size: int, address: str, folder: Path) -> None:
    """Sum the same rows among more rows and fewer."""
    torch.set_num_threads(1)
    tp = TensorParallel.connect(rank, size, address, "cpu", TIMEOUT_S)
    sums = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = addends(rank, 9, 33, dtype)
        for first, last in SLICES:
            sums[dtype, first, last] = tp.all_reduce(x[first:last].clone())
    torch.save(sums, folder / f"rank{rank}.pt")
    group = distributed.group.WORLD
    assert group is not None
    (folder / f"told{rank}").write_text("; ".join(gather_strings(group, f"I am {rank}")))
    tp.close()


def lonely_main(address: str, folder: Path) -> None:
    start = time.monotonic()
    try:
        TensorParallel.connect(0, 2, address, "cpu", timeout_s=1.0)
    except Unavailable as error:
        (folder / "error").write_text(error.message)
    (folder / "waited").write_text(f"{time.monotonic() - start}")


def waiting_main(rank: int, address: str, folder: Path) -> None:
    """Rank 0 waits in a collective that rank 1 does not enter before the file says so."""
    tp = TensorParallel.connect(rank, 2, address, "cpu", TIMEOUT_S)
    tp.bound(0.5)
    if rank:
        while not (folder / "error").exists():
            time.sleep(0.02)
        return
    start = time.monotonic()
    try:
        tp.broadcast(tp.all_reduce(torch.ones(2)))
    except RuntimeError:
        (folder / "waited").write_text(f"{time.monotonic() - start}")
    (folder / "error").touch()
