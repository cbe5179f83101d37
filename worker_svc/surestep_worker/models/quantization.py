"""Quantised checkpoints: what config.json says of them, and how each scheme stores a weight."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import QuantizedWeight
from surestep_kernels.quantized import GROUP_MULTIPLE, MAX_GROUP
from torch import Tensor

from surestep_worker.json_fields import Fields

_MAX_BLOCK = 1 << 20  # rows or columns that share a scale

FLOATS = ("F32", "BF16", "F16")
_FP8 = "F8_E4M3"
_FP8_NAN = 0x7F
_WORD = 8  # outputs in one int32 of AutoAWQ, and the place of each in it
_WORD_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Stored(NamedTuple):
    """A tensor that a checkpoint must hold, and the safetensors types it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


class Share(NamedTuple):
    """The part that a rank keeps of a linear weight [N, K]."""

    module: str
    rows: range  # of 0..N
    columns: range  # of 0..K
    inputs: int  # K


Read = Callable[[str, slice, slice], Tensor]  # part of a stored matrix, by its name


class Types(Protocol):
    """The tensors of a checkpoint and their safetensors types."""

    def __contains__(self, name: str) -> bool: ...

    def dtype(self, name: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Quantization(ABC):
    """The scheme of a checkpoint. Which modules use it is for the tensors in its files to say."""

    not_converted: tuple[str, ...]  # modules listed as plain

    def lists_as_plain(self, module: str) -> bool:
        """Whether `module` or one around it is listed, by whole parts of the dotted name:
        "mlp.gate" does not mean "mlp.gate_proj"."""
        return any(f".{name}." in f".{module}." for name in self.not_converted)

    @abstractmethod
    def holds(self, module: str, types: Types) -> bool:
        """Whether the checkpoint has any tensor of the quantised form of a module."""

    @abstractmethod
    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """What holds a quantised weight [rows, columns], by name.

        Raises InvalidRequest when the scheme cannot store this size.
        """

    @abstractmethod
    def read(self, share: Share, read: Read) -> QuantizedWeight:
        """Raises InvalidRequest for a share that is cut inside a group, and for NaN."""


@dataclass(frozen=True, slots=True)
class Fp8(Quantization):
    """E4M3 weights with a scale per block of rows and columns.

    Blocks are squares as DeepSeek and Qwen publish them, or whole rows, the "channels" of
    compressed-tensors. Every row gets a copy of its block's scales, so that weights may be merged
    and cut anywhere between rows.
    """

    block: tuple[int, int]  # rows, columns
    scale: str = "weight_scale_inv"  # the name of the scales, which multiply in spite of it

    def holds(self, module: str, types: Types) -> bool:
        """A scale, or a weight that needs one."""
        weight, scale = f"{module}.weight", f"{module}.{self.scale}"
        return scale in types or (weight in types and types.dtype(weight) == _FP8)

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Blocks at the lower and right borders may be smaller."""
        blocks = -(-rows // self.block[0]), -(-columns // self.block[1])
        return {
            f"{module}.weight": Stored((rows, columns), (_FP8,)),
            f"{module}.{self.scale}": Stored(blocks, FLOATS),
        }

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        """See Quantization."""
        module, (height, width) = share.module, self.block
        group_size = _group_size(width, share)
        codes = read(f"{module}.weight", _slice(share.rows), _slice(share.columns)).contiguous()
        if (codes.view(torch.uint8) & _FP8_NAN == _FP8_NAN).any():
            raise InvalidRequest(f"{module}.weight holds NaN", param="model")
        rows, columns = _slice(share.rows, height), _slice(share.columns, width)
        blocks = read(f"{module}.{self.scale}", rows, columns).float()
        by_row = blocks[_blocks(share.rows, height)]
        scales = by_row[:, _blocks(share.columns, width, group_size)].contiguous()
        return QuantizedWeight(codes, scales, None, group_size)


@dataclass(frozen=True, slots=True)
class Awq(Quantization):
    """4-bit weights, a scale and a zero point per output and group of inputs (Lin et al., 2024).

    Stored as AutoAWQ's "gemm": transposed, the codes of eight neighbouring outputs in one int32.
    """

    group_size: int  # inputs; -1: all

    def holds(self, module: str, types: Types) -> bool:
        """Plain modules have none of these."""
        return any(f"{module}.{name}" in types for name in ("qweight", "qzeros", "scales"))

    def stored(self, module: str, rows: int, columns: int) -> dict[str, Stored]:
        """Groups and words must be full."""
        group = self._group(columns)
        if rows % _WORD or columns % group:
            raise InvalidRequest(
                f"{module}: AWQ cannot store {rows} outputs, which are not a multiple of {_WORD}, "
                f"or {columns} inputs, which are not a multiple of the group size {group}",
                param="model",
            )
        words, groups = rows // _WORD, columns // group
        return {
            f"{module}.qweight": Stored((columns, words), ("I32",)),
            f"{module}.qzeros": Stored((groups, words), ("I32",)),
            f"{module}.scales": Stored((groups, rows), ("F16", "BF16")),
        }

    def read(self, share: Share, read: Read) -> QuantizedWeight:
        """See Quantization."""
        module, group = share.module, self._group(share.inputs)
        group_size = _group_size(group, share)
        words, groups = _slice(share.rows, _WORD), _slice(share.columns, group)
        first = share.rows.start - words.start * _WORD
        rows = slice(first, first + len(share.rows))
        owners = _blocks(share.columns, group, group_size)
        codes = _unpack(read(f"{module}.qweight", _slice(share.columns), words))[rows].contiguous()
        zeros = _unpack(read(f"{module}.qzeros", groups, words))[rows, owners].contiguous()
        scales = (
            read(f"{module}.scales", groups, _slice(share.rows)).float().T[:, owners].contiguous()
        )
        return QuantizedWeight(codes, scales, zeros, group_size)

    def _group(self, inputs: int) -> int:
        return inputs if self.group_size == -1 else self.group_size


def read_quantization(raw: Fields) -> Quantization | None:
    """From config.json; None for a plain checkpoint.

    Raises InvalidRequest naming a scheme, or a variant of one, that is not served.
    """
    config = raw.object("quantization_config")
    if not config:
        return None
    method = config.text("quant_method", "unknown")
    if method not in _READERS:
        served = ", ".join(_READERS)
        message = f"quantized weights ({method}) are not supported; supported: {served}"
        raise InvalidRequest(message, param="model")
    return _READERS[method](config)


def _read_fp8(config: Fields) -> Quantization:
    _require("fp8", "activation_scheme", config.text("activation_scheme", "dynamic"), "dynamic")
    _require("fp8", "fmt", config.text("fmt", "e4m3"), "e4m3")
    match config.sizes("weight_block_size", _MAX_BLOCK):
        case (rows, columns) if rows and columns:
            return Fp8(config.texts("modules_to_not_convert"), (rows, columns))
        case other:
            shown = list(other) or None
            message = f"fp8 with weight_block_size {shown} is not supported; it takes two numbers"
            raise InvalidRequest(message, param="model")


def _read_awq(config: Fields) -> Quantization:
    _require("awq", "bits", config.size("bits", _MAX_BLOCK, default=4), 4)
    _require("awq", "zero_point", config.flag("zero_point", default=True), True)
    _require("awq", "version", config.text("version", "gemm"), "gemm")
    group_size = config.size("group_size", _MAX_BLOCK, least=-1, default=128)
    if group_size != -1 and (group_size <= 0 or group_size % GROUP_MULTIPLE):
        raise InvalidRequest(f"awq with group_size {group_size} is not supported", param="model")
    return Awq(config.texts("modules_to_not_convert"), group_size)


def _read_compressed(config: Fields) -> Quantization:
    """What llm-compressor calls FP8_DYNAMIC and FP8_BLOCK.

    Which modules are plain is for the tensors to say: patterns among the names are passed over.
    """
    method = "compressed-tensors"
    _require(method, "format", config.text("format", "unknown"), "float-quantized")
    groups = config.objects("config_groups")
    _require(method, "number of config_groups", len(groups), 1)
    (group,) = groups
    weights, inputs = group.object("weights"), group.object("input_activations")
    _require(method, "weights of type", weights.text("type", "int"), "float")
    _require(method, "num_bits", weights.size("num_bits", _MAX_BLOCK, default=8), 8)
    _require(method, "dynamic activations", inputs.flag("dynamic", default=True), True)
    plain = tuple(name for name in config.texts("ignore") if not name.startswith("re:"))
    strategy = weights.text("strategy", "tensor")
    if strategy == "channel":
        return Fp8(plain, (1, _MAX_BLOCK), "weight_scale")
    _require(method, "strategy", strategy, "block")
    match weights.sizes("block_structure", _MAX_BLOCK):
        case (rows, columns) if rows and columns:
            return Fp8(plain, (rows, columns), "weight_scale")
        case other:
            message = f"{method} with block_structure {list(other)} is not supported"
            raise InvalidRequest(message, param="model")


_READERS = {"awq": _read_awq, "compressed-tensors": _read_compressed, "fp8": _read_fp8}


def _require(method: str, key: str, given: object, served: object) -> None:
    if (given.lower() if isinstance(given, str) else given) != served:
        message = f"{method} with {key} {given} is not supported; supported: {served}"
        raise InvalidRequest(message, param="model")


def _slice(part: range, block: int = 1) -> slice:
    """The blocks that hold a part, as a slice of all."""
    return slice(part.start // block, -(-part.stop // block))


def _blocks(part: range, block: int, step: int = 1) -> Tensor:
    """Which of them holds each element, or each group of `step` elements; i64."""
    return torch.arange(part.start, part.stop, step) // block - part.start // block


def _group_size(stored: int, share: Share) -> int:
    """The largest groups of inputs that begin where the share does and lie in one stored group."""
    size = math.gcd(stored, share.columns.start, MAX_GROUP)
    if size % GROUP_MULTIPLE == 0:
        return size
    raise InvalidRequest(
        f"{share.module}: inputs {share.columns.start} to {share.columns.stop} of {share.inputs} "
        f"cut groups of {stored} where parts are not multiples of {GROUP_MULTIPLE}",
        param="tensor_parallel_size",
    )


def _unpack(words: Tensor) -> Tensor:
    """Codes u8[8 * W, K] of AutoAWQ's words i32[K, W]."""
    codes = [(words >> 4 * place & 0xF).to(torch.uint8) for place in _WORD_PLACES]
    return torch.stack(codes, dim=-1).flatten(1).T
