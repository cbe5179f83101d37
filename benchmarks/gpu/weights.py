"""Weights of the sizes that gpu/ops.py times, in each of their forms."""

from __future__ import annotations

from collections.abc import Callable

import torch
from surestep_kernels import PackedLinear, QuantizedWeight
from surestep_kernels.linear import MXFP4_GROUP

from gpu.sizes import activations, floats, kernels, size

GROUP, NVFP4_GROUP = 128, 16

Pack = Callable[[str, int, int], PackedLinear]


def _pack_plain(device: str, n: int, k: int) -> PackedLinear:
    return kernels().pack_linear(activations(device, n, k))


def _pack_fp8(device: str, n: int, k: int) -> PackedLinear:
    codes = (torch.randn(n, k, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = floats(device, n, -(-k // GROUP))
    return kernels().pack_quantized(QuantizedWeight(codes, scales, None, GROUP))


def _pack_int4(device: str, n: int, k: int) -> PackedLinear:
    groups = -(-k // GROUP)
    codes, zeros = (
        torch.randint(16, (n, columns), dtype=torch.uint8, device=device) for columns in (k, groups)
    )
    scales = floats(device, n, groups).half().float()
    return kernels().pack_quantized(QuantizedWeight(codes, scales, zeros, GROUP))


def _pack_mxfp4(device: str, n: int, k: int) -> PackedLinear:
    codes = torch.randint(16, (n, k), dtype=torch.uint8, device=device)
    scales = torch.randint(119, 125, (n, k // MXFP4_GROUP), dtype=torch.uint8, device=device)
    return kernels().pack_quantized(QuantizedWeight(codes, scales, None, MXFP4_GROUP))


def _pack_nvfp4(device: str, n: int, k: int) -> PackedLinear:
    codes = torch.randint(16, (n, k), dtype=torch.uint8, device=device)
    scales = floats(device, n, k // NVFP4_GROUP)
    return kernels().pack_quantized(QuantizedWeight(codes, scales, None, NVFP4_GROUP))


PACK: dict[str, Pack] = {"bf16": _pack_plain, "fp8": _pack_fp8, "int4": _pack_int4}
EXPERT_PACK: dict[str, Pack] = {**PACK, "mxfp4": _pack_mxfp4, "nvfp4": _pack_nvfp4}


def weight_bytes(packed: PackedLinear) -> int:
    """Bytes that a product has to read."""
    return size(packed.data, packed.scales, packed.zeros)
