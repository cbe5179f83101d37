"""Quantised checkpoints: what config.json says of them."""

from __future__ import annotations

from surestep_common.errors import InvalidRequest
from surestep_kernels.linear import GROUP_MULTIPLE

from surestep_worker.checkpoint.gguf import Gguf
from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.mxfp4 import Mxfp4
from surestep_worker.checkpoint.schemes import Awq, Fp8, Gptq, Quantization

_MAX_BLOCK = 1 << 20  # rows or columns that share a scale


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
    return Awq(config.texts("modules_to_not_convert"), _read_group_size("awq", config))


def _read_gptq(config: Fields) -> Quantization:
    """Without desc_act, which reorders inputs."""
    _require("gptq", "bits", config.size("bits", _MAX_BLOCK, default=4), 4)
    _require("gptq", "desc_act", config.flag("desc_act", default=False), False)
    offsets = {"gptq": 1, "gptq_v2": 0}
    form = config.text("checkpoint_format", "gptq")
    if form not in offsets:
        _require("gptq", "checkpoint_format", form, " or ".join(offsets))
    plain = config.texts("modules_to_not_convert")
    return Gptq(plain, _read_group_size("gptq", config), offsets[form])


def _read_group_size(method: str, config: Fields) -> int:
    """Inputs; -1: all."""
    group_size = config.size("group_size", _MAX_BLOCK, least=-1, default=128)
    if group_size != -1 and (group_size <= 0 or group_size % GROUP_MULTIPLE):
        message = f"{method} with group_size {group_size} is not supported"
        raise InvalidRequest(message, param="model")
    return group_size


def _read_compressed(config: Fields) -> Quantization:
    """Read the forms that llm-compressor calls FP8_DYNAMIC and FP8_BLOCK.

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


def _read_gguf(config: Fields) -> Quantization:
    return Gguf(())


def _read_mxfp4(config: Fields) -> Quantization:
    return Mxfp4(config.texts("modules_to_not_convert"))


_READERS = {
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
    "gguf": _read_gguf,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
}


def _require(method: str, key: str, given: object, served: object) -> None:
    if (given.lower() if isinstance(given, str) else given) != served:
        message = f"{method} with {key} {given} is not supported; supported: {served}"
        raise InvalidRequest(message, param="model")
