"""Choose what multiplies by weights on a GPU, the same for all ranks."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from surestep_kernels import KernelSet
from surestep_kernels.columns.products.probe_results import (
    Identity,
    ProbeResult,
    default_folder,
    digest_of,
    load_result,
    save_result,
)
from surestep_proto import supervisor_pb2
from surestep_proto import worker_pb2 as pb

from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.step.heartbeat import Heartbeat

if TYPE_CHECKING:
    from surestep_kernels.columns.products.families import ProductFamily, Products

logger = logging.getLogger(__name__)

_PROBE_S = 30.0  # limit of the probe, compiling included; collectives wait longer


@torch.inference_mode()
def choose_products(
    kernels: KernelSet,
    tp: TensorParallel,
    device: torch.device,
    heartbeat: Heartbeat,
    known: pb.ProfileResult | None = None,
    folder: Path | None = None,
) -> None:
    """Choose a family, unless the settings have done so or there is nothing to choose.

    Called by all ranks, with their weights loaded. What an earlier rank had chosen, if it is
    `known`, stays, since its requests go on. Results of probes are kept in `folder`.
    """
    heartbeat.progress(supervisor_pb2.WARMING_UP)
    if kernels.products is None:
        return
    from surestep_kernels.columns.products.families import Products

    products = kernels.products
    assert isinstance(products, Products)
    if products.is_open and products.weights:
        _choose(products, tp, device, heartbeat, known, folder or default_folder())


def _choose(
    products: Products,
    tp: TensorParallel,
    device: torch.device,
    heartbeat: Heartbeat,
    known: pb.ProfileResult | None,
    folder: Path,
) -> None:
    from surestep_kernels.columns.products.families import ProductFamily
    from surestep_kernels.columns.products.probe import identity

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    about = identity(products.weights, device)
    result = load_result(about, folder)
    if known is not None and known.linear_backend:
        family = ProductFamily(known.linear_backend)
    else:
        if result is None:
            result = _probe_gpu(products, device, heartbeat)
            save_result(result, about, folder)
        family = _agree(result, identity([], device), tp)
    serves = family is ProductFamily.SEQUENTIAL and result is not None and result.equal
    cublas = result.cublas if result is not None and serves else frozenset()
    narrow = result is not None and result.narrow
    products.use(family, cublas, narrow=narrow)
    logger.info(
        "products: %s, for many rows cuBLAS by %d weights, by quantised weights %s instructions",
        family,
        len(cublas),
        "narrow" if narrow else "wide",
    )


def _probe_gpu(products: Products, device: torch.device, heartbeat: Heartbeat) -> ProbeResult:
    """Probe the GPU within _PROBE_S. If it cannot be probed, its bits count as unequal."""
    from surestep_kernels.columns.products.probe import probe
    from triton.errors import TritonError

    began = time.monotonic()

    def go_on() -> bool:
        heartbeat.progress(supervisor_pb2.WARMING_UP)
        return time.monotonic() - began < _PROBE_S

    try:
        result = probe(products.weights, device, go_on, fp8_rows=products.fp8_rows)
    except (RuntimeError, TritonError) as error:
        logger.warning("the GPU cannot be probed for equal products: %s", error)
        return ProbeResult("", finished=False)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # caches are as large as what is free
    what = "equal bits" if result.equal else result.unequal or "not found out in time"
    logger.info("products of this GPU: %s (%.1f s)", what, time.monotonic() - began)
    return result


def _agree(result: ProbeResult, gpu: Identity, tp: TensorParallel) -> ProductFamily:
    """Return one family for all ranks: SPLITS if the result or the GPU of any of them differs."""
    from surestep_kernels.columns.products.families import ProductFamily

    own = torch.tensor([int(digest_of(gpu)[:15], 16)])
    alike = torch.equal(own, tp.broadcast(own.clone()))
    votes = tp.all_reduce(torch.tensor([int(result.equal and alike)]))
    return ProductFamily.SEQUENTIAL if int(votes.item()) == tp.size else ProductFamily.SPLITS
