"""Write tests/data/quantised: a linear layer in every form that libraries write without a GPU, each
with what the library itself makes of it.

    PYTHONPATH=research python research/write_quantised.py LIBRARY FOLDER

LIBRARY is auto_round, gptqmodel or modelopt, which has to be installed; the README of the folder
has the versions. A case NAME has tensors NAME.PART, of which NAME.meaning is the
dequantised weight; the metadata have its quantization_config.
"""

# mypy: ignore-errors

from __future__ import annotations

import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

INPUTS, OUTPUTS = 96, 64
MODULE = "model.layers.0.mlp.up_proj"
Case = tuple[str, dict[str, Any], dict[str, Tensor]]


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=INPUTS,
        intermediate_size=OUTPUTS,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=3,
        vocab_size=64,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def exported(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the quantization_config of a checkpoint, and the tensors of the layer."""
    (config,) = folder.rglob("config.json")
    tensors = {
        name.removeprefix(f"{MODULE}."): tensor
        for path in folder.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
        if name.startswith(f"{MODULE}.")
    }
    return json.loads(config.read_text())["quantization_config"], tensors


def decompressed(form: str, tensors: dict[str, Tensor]) -> Tensor:
    """Return what compressed-tensors makes of a layer in one of its forms."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme

    presets = {"mxfp4-pack-quantized": "MXFP4", "mxfp8-quantized": "MXFP8", "int-quantized": "W8A8"}
    scheme = preset_name_to_scheme(presets.get(form, "FP8"), ["Linear"])
    return BaseCompressor.get_value_from_registry(form).decompress(dict(tensors), scheme)["weight"]


def of_auto_round() -> Iterator[Case]:
    from auto_round import AutoRound

    integers = [
        *(({"bits": bits, "sym": sym}, "auto_round") for bits in (2, 3, 4) for sym in (1, 0)),
        *(({"bits": bits, "sym": False}, "auto_round") for bits in (5, 6, 7)),
        ({"bits": 8, "sym": True}, "auto_round"),
        *(({"bits": 4, "group_size": size}, "auto_round") for size in (-1, 48, 128)),
        *(({"bits": bits, "sym": sym}, "auto_gptq") for bits in (3, 4) for sym in (1, 0)),
        *(({"bits": 4, "sym": sym}, "auto_awq") for sym in (1, 0)),
    ]
    floats = [
        *(({"scheme": scheme}, "auto_round") for scheme in ("MXFP4", "MXFP8", "FPW8A16")),
        *(({"scheme": s}, "llm_compressor") for s in ("MXFP4", "MXFP8", "FPW8A16", "INT8_W8A8")),
    ]
    for options, form in integers + floats:
        options = options if "scheme" in options else {"group_size": 32, **options}
        options |= {"sym": bool(options["sym"])} if "sym" in options else {}
        with tempfile.TemporaryDirectory() as folder:
            made = AutoRound(
                tiny_model(), _no_tokenizer(), iters=0, disable_opt_rtn=True, **options
            )
            made.quantize_and_save(folder, format=form)
            config, tensors = exported(Path(folder))
        name = "-".join([form, *(f"{key}{value}" for key, value in options.items())])
        yield name, config, {**tensors, "meaning": _rounded(config, tensors)}


def _no_tokenizer() -> Any:
    class NoTokenizer:
        def save_pretrained(self, *args: Any, **more: Any) -> None:
            pass

    return NoTokenizer()


def _rounded(config: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """Return what AutoRound's own layers, or compressed-tensors, make of a layer."""
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch.qlinear_torch import QuantLinear
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear as LessOne

    if "qweight" not in tensors:
        kind = config.get("data_type"), config.get("bits")
        known = {("mx_fp", 4): "mxfp4-pack-quantized", ("mx_fp", 8): "mxfp8-quantized"}
        return decompressed(config.get("format") or known.get(kind, "float-quantized"), tensors)
    size = INPUTS if config["group_size"] == -1 else config["group_size"]
    if len(tensors["qweight"]) == INPUTS:
        parts = (tensors[name] for name in ("qweight", "qzeros", "scales"))
        return dequantize_gemm(*parts, config["bits"], size).T
    packing = config.get("packing_format", config["quant_method"])
    layer = LessOne if "gptq" in packing else QuantLinear
    made = layer(config["bits"], min(size, INPUTS), INPUTS, OUTPUTS, bias=False)
    for name in ("qweight", "qzeros", "scales"):
        setattr(made, name, tensors[name])
    return made(torch.eye(INPUTS)).T.half()


def of_gptqmodel() -> Iterator[Case]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import FORMAT, QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    forms = [
        *((bits, FORMAT.GPTQ, sym) for bits in (2, 3, 4, 8) for sym in (True, False)),
        *((bits, FORMAT.GPTQ_V2, False) for bits in (3, 4)),
        *((bits, FORMAT.GPTQ_P, False) for bits in (3, 4, 5, 6, 7, 8)),
    ]
    for bits, form, sym in forms:
        for in_order in (True, False):
            config = QuantizeConfig(
                bits=bits, group_size=32, sym=sym, desc_act=not in_order, format=form
            )
            made = TorchLinear(
                bits=bits,
                group_size=32,
                sym=sym,
                desc_act=not in_order,
                in_features=INPUTS,
                out_features=OUTPUTS,
                bias=False,
                format=form,
            )
            made.pack(*_gptq(bits, sym, in_order))
            made.post_init()
            meaning = made.dequantize_weight().T.contiguous()
            if form == FORMAT.GPTQ:
                convert_gptq_v2_to_v1_format_module(made, config)
            tensors = {
                name: getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")
            }
            name = f"{form.value}-bits{bits}-sym{sym}{'' if in_order else '-desc_act'}"
            yield name, config.to_dict(), {**tensors, "meaning": meaning}


def _gptq(bits: int, sym: bool, in_order: bool) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """Return a layer, and scales, zero points and groups of its inputs."""
    torch.manual_seed(bits)
    layer, most = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float16), (1 << bits) - 1
    order = torch.arange(INPUTS) if in_order else torch.randperm(INPUTS)
    groups = layer.weight.detach().float()[:, order].unflatten(1, (-1, 32))
    low, high = groups.amin(-1), groups.amax(-1)
    if sym:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / most).half().float()
    zeros = (
        torch.full_like(scales, (most + 1) // 2) if sym else (-low / scales).round().clamp(1, most)
    )
    owners = torch.empty(INPUTS, dtype=torch.int32)
    owners[order] = torch.arange(INPUTS, dtype=torch.int32) // 32
    return layer, scales, zeros.int(), owners


def of_modelopt() -> Iterator[Case]:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    names = (
        *("FP8_DEFAULT_CFG", "FP8_PER_CHANNEL_PER_TOKEN_CFG", "NVFP4_DEFAULT_CFG"),
        *("W4A16_NVFP4_CFG", "NVFP4_MLP_WEIGHT_ONLY_CFG", "W4A8_NVFP4_FP8_CFG"),
        *("MXFP4_DEFAULT_CFG", "W4A8_MXFP4_FP8_CFG", "MXFP8_DEFAULT_CFG"),
        *("INT8_DEFAULT_CFG", "INT8_WEIGHT_ONLY_CFG", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
        *("INT4_AWQ_CFG", "W4A8_AWQ_BETA_CFG"),
    )
    for name in names:
        config = _in_groups(copy.deepcopy(getattr(mtq, name)), 32)
        model = mtq.quantize(tiny_model(), config, forward_loop=_run)
        with tempfile.TemporaryDirectory() as folder:
            export_hf_checkpoint(model, export_dir=folder)
            config, tensors = exported(Path(folder))
        yield name.removesuffix("_CFG"), config, {**tensors, "meaning": _of_qtensor(tensors)}


def _in_groups(config: Any, size: int) -> Any:
    """Change groups of 128 inputs, which the layer does not fill, to smaller ones."""
    inner = config.values() if isinstance(config, dict) else config
    for each in inner if isinstance(config, (dict, list)) else ():
        _in_groups(each, size)
    if isinstance(config, dict) and config.get(-1) == 128 and -2 not in config:
        config[-1] = size
    return config


def _run(model: nn.Module) -> None:
    model(torch.arange(64)[None])


def _of_qtensor(tensors: dict[str, Tensor]) -> Tensor:
    """Return what ModelOpt's own tensors make of a layer, in float32."""
    from modelopt.torch.quantization import qtensor

    weight, scale = tensors["weight"], tensors["weight_scale"]
    if weight.dtype is torch.uint8 and len(scale) == 2 * len(weight):
        return _of_awq(weight, scale, tensors.get("pre_quant_scale", torch.ones(INPUTS)))
    kinds = {
        (torch.float8_e4m3fn, torch.float32): qtensor.FP8QTensor,
        (torch.float8_e4m3fn, torch.uint8): qtensor.MXFP8QTensor,
        (torch.int8, torch.float32): qtensor.INT8QTensor,
        (torch.uint8, torch.uint8): qtensor.MXFP4QTensor,
        (torch.uint8, torch.float8_e4m3fn): qtensor.NVFP4QTensor,
    }
    made = kinds[weight.dtype, scale.dtype](torch.Size((OUTPUTS, INPUTS)), torch.float32, weight)
    if scale.dtype is torch.float32:
        return made.dequantize(scale=scale[:, None] if scale.dim() == 1 else scale.flatten())
    return made.dequantize(
        scale=scale,
        double_scale=tensors.get("weight_scale_2"),
        block_sizes={-1: INPUTS // scale.shape[1]},
    )


def _of_awq(weight: Tensor, scale: Tensor, factors: Tensor) -> Tensor:
    """Return what ModelOpt packs to the same bytes; it does not unpack them itself. A scale of all
    is for products in FP8 alone.
    """
    from modelopt.torch.export.quant_utils import pack_int4_in_uint8

    signed = torch.stack((weight << 4, weight & 0xF0), dim=1).flatten(0, 1).view(torch.int8) >> 4
    size = INPUTS // scale.shape[1]
    meaning = signed * scale.float().repeat_interleave(size, dim=1)
    assert torch.equal(pack_int4_in_uint8(meaning, scale.float(), size), weight)
    return meaning * factors.float()


LIBRARIES = {"auto_round": of_auto_round, "gptqmodel": of_gptqmodel, "modelopt": of_modelopt}


def main(library: str, folder: str) -> None:
    """Write the cases of a library to FOLDER/LIBRARY.safetensors."""
    tensors, configs = dict[str, Tensor](), dict[str, str]()
    for name, config, parts in LIBRARIES[library]():
        configs[name] = json.dumps(
            {key: value for key, value in config.items() if value is not None}
        )
        tensors |= {f"{name}.{part}": each.detach().contiguous() for part, each in parts.items()}
    save_file(tensors, Path(folder) / f"{library}.safetensors", configs)
    shutil.rmtree("tmp_autoround", ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
