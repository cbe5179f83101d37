"""Which implementation serves each op: decided once, when a worker starts, and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .build import BuildError, build_library
from .kv_cache import kv_cache_shape, store_kv_reference
from .linear import Linear, PackLinear, linear_reference, pack_linear_reference
from .native import NativeOps
from .paged_attention import paged_attention_reference
from .rms_norm import add_rms_norm_reference, rms_norm_reference
from .rotary import rotary_reference
from .silu_and_mul import silu_and_mul_reference

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The ops of one device. Shapes and dtypes are those of each op's reference."""

    name: str
    set_num_threads: Callable[[int], None]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    pack_linear: PackLinear
    linear: Linear
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    kv_cache_shape: Callable[[int, int, int, int], tuple[int, ...]]
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]


REFERENCE = KernelSet(
    name="torch reference",
    set_num_threads=torch.set_num_threads,
    rms_norm=rms_norm_reference,
    add_rms_norm=add_rms_norm_reference,
    pack_linear=pack_linear_reference,
    linear=linear_reference,
    rotary=rotary_reference,
    kv_cache_shape=kv_cache_shape,
    store_kv=store_kv_reference,
    paged_attention=paged_attention_reference,
    silu_and_mul=silu_and_mul_reference,
)


def load_kernels(device: str, cpu_kernels: Literal["auto", "reference"] = "auto") -> KernelSet:
    """The fastest kernels that run on `device` ("cpu", "cuda" or "cuda:0").

    On the CPU the C kernels are compiled when they are first used; where that is impossible, or
    with cpu_kernels="reference", the torch references serve. They use one thread until
    `set_num_threads`.
    """
    kernels = REFERENCE
    if device == "cpu" and cpu_kernels == "auto":
        kernels = load_native() or REFERENCE
    logger.info("kernels for %s: every op by %s", device, kernels.name)
    return kernels


def load_native() -> KernelSet | None:
    """The C kernels, or None after a warning that says why not."""
    try:
        ops = NativeOps.load(build_library())
    except (BuildError, OSError) as error:
        logger.warning("no C kernels, the much slower torch references serve: %s", error)
        return None
    ops.set_num_threads(1)
    return KernelSet(
        name="C",
        set_num_threads=ops.set_num_threads,
        rms_norm=ops.rms_norm,
        add_rms_norm=ops.add_rms_norm,
        pack_linear=ops.pack_linear,
        linear=ops.linear,
        rotary=ops.rotary,
        kv_cache_shape=ops.kv_cache_shape,
        store_kv=ops.store_kv,
        paged_attention=ops.paged_attention,
        silu_and_mul=ops.silu_and_mul,
    )
