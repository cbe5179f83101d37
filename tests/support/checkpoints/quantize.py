"""Quantised copies of checkpoints, as Qwen (FP8) and AutoAWQ (4 bits) write them, and plain copies
that hold exactly the weights which the quantised ones stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.changes import change_config
from surestep_kernels.linear import ROUNDINGS, Rounding
from torch import Tensor

BLOCK = 128
METHODS = ("fp8", "awq")
_AWQ_NIBBLES = (
    0,
    2,
    4,
    6,
    1,
    3,
    5,
    7,
)  # which of eight outputs lies in nibble 0, 1, ... of an int32


class Twins(NamedTuple):
    """Two checkpoints of one model."""

    quantized: Path
    plain: Path


class Matrix(NamedTuple):
    """One weight: how it is stored, by suffix, and what that means."""

    stored: dict[str, Tensor]
    meaning: Tensor


def quantize(
    source: Path,
    method: str,
    *,
    plain: Sequence[str] = (),
    listed: Sequence[str] | None = None,
    group_size: int = 16,
) -> Twins:
    """Write two folders beside `source`.

    Linear layers with an entry of `plain` among the parts of their names stay as they are; modules_to_not_convert
    names these, or what is `listed`. AWQ has groups of `group_size` inputs.
    """

    def convert(module: str, weight: Tensor) -> Matrix | None:
        if any(f".{part}." in f".{module}." for part in plain):
            return None
        return _QUANTIZE[method](weight.float(), group_size)

    twins = write_twins(source, (f"-{method}", f"-{method}-plain"), convert)
    names = list(plain if listed is None else listed)
    quantization = scheme(method, group_size) | {"modules_to_not_convert": names}
    change_config(twins.quantized, quantization_config=quantization)
    return twins


def write_twins(
    source: Path, ends: tuple[str, str], convert: Callable[[str, Tensor], Matrix | None]
) -> Twins:
    """Write two folders whose names end so beside `source`; `convert` is given the module and the
    weight of each linear layer, and returns None for one that stays as it is."""
    twins = Twins(*(source.with_name(f"{source.name}{end}") for end in ends))
    for folder in twins:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.index.json"))
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        matrix = convert(module, tensor) if is_linear(name, tensor) else None
        if matrix is None:
            stored[name] = meant[name] = tensor
            continue
        stored |= {f"{module}.{suffix}": part for suffix, part in matrix.stored.items()}
        meant[name] = matrix.meaning
    save_file(stored, twins.quantized / "model.safetensors")
    save_file(meant, twins.plain / "model.safetensors")
    return twins


def scheme(method: str, group_size: int = 16) -> dict[str, Any]:
    """The quantization_config of a method."""
    if method == "fp8":
        blocks = {"weight_block_size": [BLOCK, BLOCK]}
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **blocks}
    sizes = {"bits": 4, "group_size": group_size}
    if method == "gptq":
        return {"quant_method": "gptq", "sym": False, "desc_act": False, **sizes}
    return {"quant_method": "awq", "version": "gemm", "zero_point": True, **sizes}


def fp8(weight: Tensor) -> Matrix:
    """Scales such that the largest element of a block becomes 448."""
    rows, columns = weight.shape
    shape = -(-rows // BLOCK), -(-columns // BLOCK)
    codes = torch.zeros_like(weight, dtype=torch.float8_e4m3fn)
    scales, meaning = torch.zeros(shape), torch.zeros_like(weight)
    for i in range(shape[0]):
        for j in range(shape[1]):
            at = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            meaning[at] = codes[at].float() * scales[i, j]
    return Matrix({"weight": codes, "weight_scale_inv": scales}, meaning)


class _Codes(NamedTuple):
    """Of so many bits per output and group, as whole numbers."""

    codes: Tensor  # [N, K]
    zeros: Tensor  # [N, groups]
    scales: Tensor  # f16[N, groups]
    meaning: Tensor  # [N, K]


def _codes(weight: Tensor, group_size: int, least_zero: int = 0, bits: int = 4) -> _Codes:
    rows, columns = weight.shape
    most = (1 << bits) - 1
    groups = weight.view(rows, columns // group_size, group_size)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scales = ((high - low) / most).half()
    zeros = (-low / scales.float()).round().clamp(least_zero, most)
    codes = ((groups / scales.float()).round() + zeros).clamp(0, most)
    meaning = ((codes - zeros) * scales.float()).view(rows, columns)
    return _Codes(codes.view(rows, columns), zeros[:, :, 0], scales[:, :, 0], meaning)


def awq(weight: Tensor, group_size: int) -> Matrix:
    """Asymmetric 4-bit codes per output and group."""
    of = _codes(weight, group_size)
    stored = {
        "qweight": _words(of.codes.T, _AWQ_NIBBLES),
        "qzeros": _words(of.zeros.T, _AWQ_NIBBLES),
        "scales": of.scales.T.contiguous(),
    }
    return Matrix(stored, of.meaning)


def gptq(weight: Tensor, group_size: int, bits: int = 4, *, in_order: bool = True) -> Matrix:
    """The same as AutoGPTQ writes them: words of inputs, and zero points less 1; groups of
    neighbouring inputs, or of any."""
    columns = weight.shape[1]
    order = torch.arange(columns) if in_order else torch.randperm(columns)
    of, places = _codes(weight[:, order], group_size, 1, bits), range(32 // bits)
    owners = torch.empty(columns, dtype=torch.int32)
    owners[order] = torch.arange(columns, dtype=torch.int32) // group_size
    back = order.argsort()
    stored = {
        "qweight": _words(of.codes[:, back], places).T.contiguous(),
        "qzeros": _words(of.zeros.T - 1, places),
        "scales": of.scales.T.contiguous(),
        "g_idx": owners,
    }
    return Matrix(stored, of.meaning[:, back].contiguous())


def round_plain(source: Path, rounding: Rounding) -> Path:
    """Write a copy beside `source` whose weights are what those become when they are rounded.

    An output head that is the embedding becomes one of its own.
    """
    name = next(name for name, known in ROUNDINGS.items() if known == rounding)
    copy = source.with_name(f"{source.name}-as-{name}")
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.index.json"))
    config = json.loads((copy / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    text = config.get("text_config", config)
    if config.get("tie_word_embeddings") or text.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = next(v for k, v in tensors.items() if "embed_tokens" in k)
        config["tie_word_embeddings"] = text["tie_word_embeddings"] = False
        (copy / "config.json").write_text(json.dumps(config))
    input_major = "gpt_oss" in config["model_type"]
    meant = {n: _meant(n, tensor, rounding, input_major) for n, tensor in tensors.items()}
    save_file(meant, copy / "model.safetensors")
    return copy


def _meant(name: str, tensor: Tensor, rounding: Rounding, input_major: bool) -> Tensor:
    fused = ".experts." in name and tensor.dim() == 3
    if fused and input_major:
        return torch.stack([rounding(e.T).dequantize().T for e in tensor]).contiguous()
    if fused:
        return torch.stack([rounding(expert).dequantize() for expert in tensor])
    if name == "lm_head.weight":
        finer = rounding.keeping(8)
        return tensor.clone() if finer is None else finer(tensor).dequantize()
    exact = any(f".{part}.weight" in name for part in _NEVER_ROUNDED)
    return tensor if exact or not is_linear(name, tensor) else rounding(tensor).dequantize()


_NEVER_ROUNDED = ("mlp.gate", "router", "shared_expert_gate", "weights_proj")
_QUANTIZE = {"fp8": lambda weight, _: fp8(weight), "awq": awq, "gptq": gptq}


def _words(codes: Tensor, places: Sequence[int]) -> Tensor:
    """Codes [R, C] to int32[R, C / n]; place 0, 1, ... has which of n."""
    count = len(places)
    packed = sum(codes[:, n::count].long() << 32 // count * at for at, n in enumerate(places))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int().contiguous()


def is_linear(name: str, tensor: Tensor) -> bool:
    other = ("embed_tokens", "lm_head", "visual", "norm")
    return name.endswith(".weight") and tensor.dim() == 2 and not any(o in name for o in other)
