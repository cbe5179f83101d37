"""Which implementation serves each op: decided once, when a worker starts, and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .kv_cache import kv_cache_shape, store_kv_reference
from .linear import Linear, PackedLinear, linear_reference, pack_linear_reference
from .paged_attention import paged_attention_reference
from .rms_norm import add_rms_norm_reference, rms_norm_reference
from .rotary import rotary_reference
from .silu_and_mul import silu_and_mul_reference

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The ops of one device. Shapes and dtypes are those of each op's reference."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    pack_linear: Callable[[Tensor, Tensor | None], PackedLinear]
    linear: Linear
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    kv_cache_shape: Callable[[int, int, int, int], tuple[int, ...]]
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]


REFERENCE = KernelSet(
    name="reference",
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


def load_kernels(device: str) -> KernelSet:
    """The fastest kernels that run on `device` ("cpu", "cuda" or "cuda:0")."""
    logger.info("kernels for %s: %s", device, REFERENCE.name)
    return REFERENCE
