"""Checkpoints whose linear weights compressed-tensors itself has compressed, and twins that hold
what it makes of them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import compress_module, decompress_module
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from support.checkpoints.changes import change_config
from support.checkpoints.quantize import Matrix, Twins, write_twins
from torch import Tensor, nn

FORMATS = {
    "float-quantized": ("FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
    "int-quantized": ("W8A8", "W4AFP8", "W3A8"),
    "mxfp4-pack-quantized": ("MXFP4",),
    "mxfp6-pack-quantized": ("MXFP6A16",),
    "mxfp8-quantized": ("MXFP8",),
    "nvfp4-pack-quantized": ("NVFP4", "NVFP4A16"),
    "pack-quantized": (
        *("W4A16", "W4A16_ASYM", "W8A16", "W2A16"),
        *("W3A16", "W5A16", "W6A16", "W7A16"),
    ),
}
PRESETS = {preset: form for form, presets in FORMATS.items() for preset in presets}


def scheme(preset: str, group_size: int | None = None) -> QuantizationScheme:
    """A preset, perhaps with groups of another size."""
    made = preset_name_to_scheme(preset, ["Linear"])
    assert made.weights is not None
    if group_size is not None and made.weights.strategy == QuantizationStrategy.GROUP:
        made.weights.group_size = group_size
    return made


def compress(
    weight: Tensor, made: QuantizationScheme, form: str
) -> tuple[dict[str, Tensor], Tensor]:
    """A weight [N, K] as the library stores it, by suffix, and as it reads that again."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight.data = weight.clone()
    made = made.model_copy(update={"format": form})
    initialize_module_for_quantization(layer, made)
    for name, value in _parameters(weight, made.weights).items():
        getattr(layer, name).data = value.to(getattr(layer, name).dtype)
    layer.quantization_scheme = made
    compress_module(layer)
    stored = {name: value.detach().clone() for name, value in layer.state_dict().items()}
    decompress_module(layer)
    return stored, layer.weight.detach().clone()


def _parameters(weight: Tensor, args: QuantizationArgs | None) -> dict[str, Tensor]:
    """Scales and zero points by the extremes of what shares them."""
    assert args is not None
    rows, columns = weight.shape
    match args.strategy:
        case "tensor":
            parts = weight.reshape(1, -1)
        case "channel":
            parts = weight[:, None]
        case "block":
            assert args.block_structure is not None
            height, width = args.block_structure
            padded = nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
            blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
            parts = blocks.transpose(1, 2).flatten(2)
        case _:
            assert args.group_size is not None
            parts = weight.unflatten(1, (-1, args.group_size))
    low, high = parts.amin(-1), parts.amax(-1)
    more = {}
    if args.strategy == "tensor_group":
        more["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(low, high, args, more.get("weight_global_scale"))
    return {"weight_scale": scale, **more} | ({} if args.symmetric else {"weight_zero_point": zero})


def compressed_twins(
    source: Path,
    schemes: Mapping[str, tuple[QuantizationScheme, str]],
    dtype: torch.dtype = torch.bfloat16,
) -> Twins:
    """Write two folders beside `source`; `schemes` have an end of modules' names, "" for all
    others, and the format. The library rounds what it reads again to `dtype`, that of scales."""

    def convert(module: str, weight: Tensor) -> Matrix | None:
        found = next((s for end, s in schemes.items() if module.endswith(end)), None)
        if found is None or module.endswith("gate"):
            return None
        parts, meaning = compress(weight.to(dtype), *found)
        return Matrix(
            {suffix: part.contiguous() for suffix, part in parts.items()}, meaning.float()
        )

    twins = write_twins(source, ("-packed", "-read-again"), convert)
    change_config(twins.quantized, quantization_config=_config(schemes))
    return twins


def _config(schemes: Mapping[str, tuple[QuantizationScheme, str]]) -> dict[str, Any]:
    """Return the quantization_config that the library writes."""
    groups = {
        f"group_{n}": made.model_copy(
            update={"targets": [f"re:.*{end}$"] if end else ["Linear"], "format": form}
        )
        for n, (end, (made, form)) in enumerate(schemes.items())
    }
    forms = [form for _, form in schemes.values()]
    config = QuantizationConfig(
        config_groups=groups,
        format=forms[0] if len(forms) == 1 else "mixed-precision",
        ignore=["lm_head", "re:.*gate$"],
    )
    made: dict[str, Any] = json.loads(config.model_dump_json(exclude_none=True))
    return made | {"quant_method": "compressed-tensors"}
