"""Quantised checkpoints: what config.json says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn

from surestep_common.errors import InvalidRequest
from surestep_kernels.linear import GROUP_MULTIPLE

from surestep_worker.checkpoint.formats import (
    Awq,
    Format,
    Fp8,
    Gguf,
    Gptq,
    Int8,
    Mixed,
    ModelOptFp8,
    Mxfp4Blocks,
    Mxfp4Packed,
    Mxfp6,
    Mxfp8,
    Nvfp4,
    PackedIntegers,
    PairedIntegers,
    Quantization,
    targeted,
)
from surestep_worker.checkpoint.json_fields import Fields

_MAX_BLOCK = 1 << 20  # rows or columns that share a scale
_PACKED_BITS = range(2, 9)
_ONE_WORD_BITS = 2, 3, 4, 8  # that all packers of GPTQ place alike


def read_quantization(raw: Fields) -> Quantization | None:
    """From config.json; None for a plain checkpoint.

    Raises InvalidRequest naming a scheme, or a variant of one, that is not served.
    """
    config = raw.object("quantization_config")
    if not config:
        return None
    method = config.text("quant_method", "unknown")
    reader = _READERS.get(method.split("/")[-1])  # also intel/auto-round
    if reader is None:
        served = ", ".join(_READERS)
        message = f"quantized weights ({method}) are not supported; supported: {served}"
        raise InvalidRequest(message, param="model")
    return reader(config)


def _read_fp8(config: Fields) -> Quantization:
    """With a scale of each block, or, without blocks, of each row or of the whole weight."""
    _require("fp8", "fmt", config.text("fmt", "e4m3"), "e4m3")
    plain = config.texts("modules_to_not_convert")
    match config.sizes("weight_block_size", _MAX_BLOCK):
        case ():
            return Fp8(plain, None, "weight_scale")
        case (rows, columns) if rows and columns:
            return Fp8(plain, (rows, columns))
        case other:
            message = f"fp8 with weight_block_size {list(other)} is not supported; it takes two"
            raise InvalidRequest(f"{message} numbers", param="model")


def _read_awq(config: Fields) -> Quantization:
    _require("awq", "bits", config.size("bits", _MAX_BLOCK, default=4), 4)
    config.flag("zero_point", default=True)  # the middle has tensors, too
    _require("awq", "version", config.text("version", "gemm"), "gemm")
    return Awq(config.texts("modules_to_not_convert"), _read_group_size("awq", config))


def _read_gptq(config: Fields) -> Quantization:
    """With what modules have of their own in `dynamic`: patterns, "-:" before those left plain."""
    offsets = {"gptq": 1, "gptq_v2": 0, "gptq_p": 0}
    form = config.text("checkpoint_format", "gptq")
    if form not in offsets:
        _require("gptq", "checkpoint_format", form, " or ".join(offsets))
    plain, offset = config.texts("modules_to_not_convert"), offsets[form]

    def format_of(own: Fields) -> Gptq:
        bits, planes = _read_bits("gptq", own), form == "gptq_p"
        if not planes and bits not in _ONE_WORD_BITS:
            _require("gptq", f"{bits} bits and checkpoint_format", form, "gptq_p")
        return Gptq(plain, _read_group_size("gptq", own), offset, bits, planes=planes)

    named = config.objects("dynamic").items()
    own = {name: each for name, each in named if not name.startswith("-:")}
    variants = {
        f"re:{name.removeprefix('+:')}": format_of(own[name].or_else(config)) for name in own
    }
    return _mixed(format_of(config), variants)


def _read_auto_round(config: Fields) -> Quantization:
    """AutoRound, in the layouts of GPTQ, AWQ and compressed-tensors; modules may have bits of
    their own."""
    method, kind = "auto-round", config.text("data_type", "int")
    if kind != "int":
        floats = f"{kind} of {config.size('bits', _MAX_BLOCK, default=4)} bits"
        if floats not in _ROUNDED_FLOATS:
            _require(method, "data_type", floats, ", ".join(["int", *_ROUNDED_FLOATS]))
        return _ROUNDED_FLOATS[floats]
    packing = config.text("packing_format", "auto_round:auto_gptq")
    if "awq" in packing:
        _require(method, "bits", config.size("bits", _MAX_BLOCK, default=4), 4)
        return Awq((), _read_group_size(method, config))
    if packing not in _ROUNDED_AS_GPTQ:
        _require(method, "packing_format", packing, " or ".join([*_ROUNDED_AS_GPTQ, "..awq"]))
    offset, has_index = _ROUNDED_AS_GPTQ[packing]

    def format_of(own: Fields) -> Gptq:
        bits, size = _read_bits(method, own), _read_group_size(method, own)
        return Gptq((), size, offset, bits, has_index=has_index)

    own = {
        _pattern(name): each.or_else(config)
        for name, each in config.objects("extra_config").items()
        if each.size("bits", _MAX_BLOCK, default=4) <= max(_PACKED_BITS)  # others are plain
    }
    return _mixed(format_of(config), {name: format_of(each) for name, each in own.items()})


_ROUNDED_FLOATS: Mapping[str, Quantization] = {
    "fp of 8 bits": Fp8((), None, "weight_scale"),
    "mx_fp of 4 bits": Mxfp4Packed(()),
    "mx_fp of 6 bits": Mxfp6(()),
    "mx_fp of 8 bits": Mxfp8(()),
    "nv_fp of 4 bits": Nvfp4(()),
}

# By packing_format: what is taken from zero points, and whether there is a g_idx.
_ROUNDED_AS_GPTQ = {
    "auto_round:auto_gptq": (1, False),
    "auto_round:gptqmodel": (0, True),
    "auto_round": (0, False),
}


def _pattern(name: str) -> str:
    """Return a target for a name that may be a pattern itself."""
    return name if re.fullmatch(r"[\w.]+", name) else f"re:{name}"


def _mixed(usual: Gptq, own: Mapping[str, Gptq]) -> Quantization:
    """Return the usual format, of which some modules have variants."""
    if not own:
        return usual
    targets = [targeted((name,), variant) for name, variant in own.items()]
    return Mixed(usual.not_converted, (*targets, targeted(("Linear",), usual)))


def _read_bits(method: str, config: Fields) -> int:
    bits = config.size("bits", _MAX_BLOCK, default=4)
    if bits not in _PACKED_BITS:
        _require(method, "bits", bits, ", ".join(map(str, _PACKED_BITS)))
    return bits


def _read_group_size(method: str, config: Fields) -> int:
    """Inputs; -1: all."""
    group_size = config.size("group_size", _MAX_BLOCK, least=-1, default=128)
    if group_size != -1 and (group_size <= 0 or group_size % GROUP_MULTIPLE):
        message = f"{method} with group_size {group_size} is not supported"
        raise InvalidRequest(message, param="model")
    return group_size


def _read_compressed(config: Fields) -> Quantization | None:
    """Read the formats of compressed-tensors, one for each group of modules; None where it is only
    keys and values that have scales.

    Which modules are plain is for the tensors to say: patterns among the names are passed over.
    """
    plain = tuple(name for name in config.texts("ignore") if not name.startswith("re:"))
    usual = config.text("format", "unknown")
    named_groups = config.objects("config_groups").values()
    groups = [group for group in named_groups if len(group.object("weights"))]
    if not groups and len(config.object("kv_cache_scheme")):
        return None
    if not groups:
        _unserved(_CT, "config_groups", "{}")
    sparsity = config.object("sparsity_config").text("format", "dense")
    _require(_CT, "sparsity_config of format", sparsity, "dense")
    if config.object("transform_config"):
        _unserved(_CT, "transform_config", "given")
    formats = [_read_group(group, group.text("format", usual)) for group in groups]
    if len(formats) == 1:
        return replace(formats[0], not_converted=plain)
    named = [targeted(group.texts("targets"), f) for group, f in zip(groups, formats, strict=True)]
    return Mixed(plain, tuple(named))


def _read_group(group: Fields, form: str) -> Format:
    """Read the format of a group of modules."""
    if form not in _COMPRESSED:
        _require(_CT, "format", form, ", ".join(_COMPRESSED))
    return _COMPRESSED[form](group.object("weights"))


def _compressed_floats(weights: Fields) -> Format:
    """Read what llm-compressor calls FP8, FP8_DYNAMIC and FP8_BLOCK."""
    _require(_CT, "weights of type", weights.text("type", "int"), "float")
    _require(_CT, "num_bits", weights.size("num_bits", _MAX_BLOCK, default=8), 8)
    strategy = weights.text("strategy", "tensor")
    if strategy in ("tensor", "channel"):
        return Fp8((), None, "weight_scale")
    if strategy == "group":
        return Fp8((), (1, _read_group_size(_CT, weights)), "weight_scale")
    _require(_CT, "strategy", strategy, "block")
    blocks = weights.sizes("block_structure", _MAX_BLOCK)
    if len(blocks) != 2 or not all(blocks):
        _unserved(_CT, "block_structure", list(blocks))
    return Fp8((), (blocks[0], blocks[1]), "weight_scale")


def _compressed_words(weights: Fields) -> Format:
    """Read W4A16 and its kin."""
    _require(_CT, "weights of type", weights.text("type", "int"), "int")
    bits = weights.size("num_bits", _MAX_BLOCK, default=8)
    if bits not in _PACKED_BITS:
        _require(_CT, "num_bits", bits, ", ".join(map(str, _PACKED_BITS)))
    strategy, size = weights.text("strategy", "group"), -1
    if strategy == "group":
        size = _read_group_size(_CT, weights)
    elif strategy != "channel":
        _unserved(_CT, "strategy", strategy)
    symmetric = weights.flag("symmetric", default=True)
    in_order = "actorder" not in weights or weights.text("actorder") != "group"
    return PackedIntegers((), size, bits, symmetric, in_order)


def _compressed_bytes(weights: Fields) -> Format:
    """Read W8A8 and its kin, whose numbers of fewer bits stand in bytes, too."""
    _require(_CT, "weights of type", weights.text("type", "int"), "int")
    weights.size("num_bits", max(_PACKED_BITS), default=8)
    strategy, size = weights.text("strategy", "channel"), -1
    if strategy == "group":
        size = _read_group_size(_CT, weights)
    elif strategy not in ("tensor", "channel"):
        _unserved(_CT, "strategy", strategy)
    return Int8((), weights.flag("symmetric", default=True), size, strategy != "tensor")


def _compressed_naively(weights: Fields) -> Format:
    """Read numbers in a type of torch's."""
    is_int = weights.text("type", "int") == "int"
    return (_compressed_bytes if is_int else _compressed_floats)(weights)


def _microscaled(made: Format) -> Callable[[Fields], Format]:
    def read(weights: Fields) -> Format:
        _require(_CT, "group_size", weights.size("group_size", _MAX_BLOCK, default=32), 32)
        return made

    return read


_CT = "compressed-tensors"
_COMPRESSED = {
    "float-quantized": _compressed_floats,
    "int-quantized": _compressed_bytes,
    "mxfp4-pack-quantized": _microscaled(Mxfp4Packed(())),
    "mxfp6-pack-quantized": _microscaled(Mxfp6(())),
    "mxfp8-quantized": _microscaled(Mxfp8(())),
    "naive-quantized": _compressed_naively,
    "nvfp4-pack-quantized": lambda weights: Nvfp4(()),
    "pack-quantized": _compressed_words,
}


def _read_modelopt(config: Fields) -> Quantization:
    """Read NVIDIA's ModelOpt, several formats in one checkpoint too. Types and shapes of tensors
    tell which, and the groups of NVFP4."""
    algorithm = config.text("quant_algo", "unknown")
    if algorithm.upper() not in _MODELOPT:
        _require("modelopt", "quant_algo", algorithm, ", ".join(_MODELOPT))
    nvfp4 = Nvfp4((), "weight", "weight_scale_2", divides=False)
    if config.flag("has_zero_point", default=False):
        _unserved("modelopt", "has_zero_point", "true")
    floats = nvfp4, Mxfp4Packed((), "weight"), ModelOptFp8(()), Mxfp8(())
    found = PairedIntegers(()), *floats, Int8((), symmetric=True)
    return Mixed((), tuple(targeted((), each) for each in found))


_MODELOPT = (
    "NVFP4",
    "W4A16_AWQ",
    "W4A16_NVFP4",
    "W4A8_AWQ",
    "W4A8_NVFP4_FP8",
    "MXFP4",
    "W4A8_MXFP4_FP8",
    "MXFP8",
    "FP8",
    "FP8_PB_WO",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "W8A16",
    "W8A8_SQ_PER_CHANNEL",
    "MIXED_PRECISION",
)


def _read_gguf(config: Fields) -> Quantization:
    return Gguf(())


def _read_mxfp4(config: Fields) -> Quantization:
    return Mxfp4Blocks(config.texts("modules_to_not_convert"))


_READERS = {
    "auto-round": _read_auto_round,
    "awq": _read_awq,
    _CT: _read_compressed,
    "fbgemm_fp8": _read_fp8,
    "fp8": _read_fp8,
    "gguf": _read_gguf,
    "gptq": _read_gptq,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}


def _require(method: str, key: str, given: object, served: object) -> None:
    if (given.lower() if isinstance(given, str) else given) != served:
        _unserved(method, key, given, served)


def _unserved(method: str, key: str, given: object, served: object = None) -> NoReturn:
    message = f"{method} with {key} {given} is not supported"
    raise InvalidRequest(
        message if served is None else f"{message}; supported: {served}", param="model"
    )
