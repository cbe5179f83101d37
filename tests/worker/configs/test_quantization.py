"""Parts of stored weights are read exactly, wherever they are cut; unserved schemes are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.checkpoints.quantize import METHODS, Matrix, awq, fp8, gptq, scheme
from surestep_common.errors import InvalidRequest
from surestep_kernels.linear import dequantize
from surestep_worker.checkpoint.formats import Awq, Format, Fp8, Gptq, Mxfp4Blocks, Share
from surestep_worker.checkpoint.formats.format import EVERYTHING
from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.configs.quantization import read_quantization
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROWS, COLUMNS = 304, 384


def schemes(group_size: int) -> dict[str, tuple[Format, Matrix]]:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    inputs = COLUMNS if group_size == -1 else group_size
    return {
        "fp8": (Fp8((), (128, 128)), fp8(weight)),
        "awq": (Awq((), group_size), awq(weight, inputs)),
    }


def read(quantization: Format, matrix: Matrix, rows: range, columns: range) -> Tensor:
    def part(name: str, rows: slice, columns: slice) -> Tensor:
        stored = matrix.stored[name.removeprefix("m.")]
        return (stored if stored.dim() > 1 else stored[:, None])[rows, columns]

    weight = quantization.read(Share("m", rows, columns, COLUMNS), part)
    return weight if isinstance(weight, Tensor) else weight.dequantize()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group_size", [32, 128, 192, -1])
@pytest.mark.parametrize("rows", [range(ROWS), range(128, 256), range(7, 135), range(160, 161)])
@pytest.mark.parametrize("columns", [range(COLUMNS), range(128, 384), range(24, 200), range(48)])
def test_a_share_is_that_part_of_the_weight(
    method: str, group_size: int, rows: range, columns: range
) -> None:
    quantization, matrix = schemes(group_size)[method]
    expected = matrix.meaning[rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(read(quantization, matrix, rows, columns), expected)


@pytest.mark.parametrize("method", METHODS)
def test_a_cut_inside_of_what_shares_a_lane_is_refused(method: str) -> None:
    quantization, matrix = schemes(128)[method]
    message = r"m: inputs 4 to 200 of 384 cut groups of 128 .* multiples of 8"
    with pytest.raises(InvalidRequest, match=message):
        read(quantization, matrix, range(8), range(4, 200))


def test_an_fp8_nan_is_refused() -> None:
    quantization, matrix = schemes(128)["fp8"]
    matrix.stored["weight"].view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(InvalidRequest, match=r"m\.weight holds NaN"):
        read(quantization, matrix, range(8), range(8))


def test_awq_cannot_store_every_size() -> None:
    with pytest.raises(InvalidRequest, match=r"m: AWQ cannot store 12 outputs and 64 inputs"):
        Awq((), 32).stored("m", 12, 64)


def test_names_are_listed_by_whole_parts() -> None:
    quantization = Fp8(("mlp.gate", "mtp", "model.layers.1.linear_attn"), (128, 128))
    for module, plain in {
        "model.layers.0.mlp.gate": True,
        "model.layers.0.mlp.gate_proj": False,
        "mtp.layers.0.self_attn.q_proj": True,
        "mtp_other.fc": False,
        "model.layers.1.linear_attn.in_proj_a": True,
        "model.layers.10.linear_attn.in_proj_a": False,
    }.items():
        assert quantization.lists_as_plain(module) is plain, module


def test_a_plain_checkpoint_has_no_scheme() -> None:
    assert read_quantization(Fields({})) is None


@pytest.mark.parametrize("names", [None, [], ["lm_head"]])
def test_served_schemes(names: list[str] | None) -> None:
    plain = tuple(names or ())
    raw: dict[str, Any] = {"modules_to_not_convert": names}
    fp8_config, awq_config = scheme("fp8") | raw, scheme("awq", 128) | raw
    assert read_quantization(Fields({"quantization_config": fp8_config})) == Fp8(plain, (128, 128))
    assert read_quantization(Fields({"quantization_config": awq_config})) == Awq(plain, 128)
    awq_config["version"] = "GEMM"
    assert read_quantization(Fields({"quantization_config": awq_config})) == Awq(plain, 128)


@pytest.mark.parametrize(("form", "offset"), [("gptq", 1), ("gptq_v2", 0)])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("rows", [range(ROWS), range(7, 135)])
@pytest.mark.parametrize("columns", [range(COLUMNS), range(128, 384), range(24, 200)])
def test_a_share_of_gptq_is_that_part_of_the_weight(
    form: str, offset: int, group: int, rows: range, columns: range
) -> None:
    config = scheme("gptq", group) | {"checkpoint_format": form}
    found = read_quantization(Fields({"quantization_config": config}))
    assert found == Gptq((), group, offset)
    matrix = gptq(torch.randn(ROWS, COLUMNS), COLUMNS if group == -1 else group)
    if form == "gptq_v2":
        matrix.stored["qzeros"] += 0x11111111
    expected = matrix.meaning[rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(read(found, matrix, rows, columns), expected)
    stored = found.stored("m", ROWS, COLUMNS)
    assert {name: of.shape for name, of in stored.items()} == {
        f"m.{name}": tensor.shape for name, tensor in matrix.stored.items()
    }


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("method", "in_order"), [("gptq", True), ("gptq", False), ("auto-round", True)]
)
@pytest.mark.parametrize("columns", [range(COLUMNS), range(128, 384), range(40, 200)])
def test_gptq_of_other_bits_and_orders(
    method: str, bits: int, in_order: bool, columns: range
) -> None:
    """AutoRound stores the same, without what tells the order."""
    config: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": 32}
    found = read_quantization(Fields({"quantization_config": config}))
    matrix = gptq(torch.randn(ROWS, COLUMNS), 32, bits, in_order=in_order)
    assert isinstance(found, Gptq)
    names = [f"m.{name}" for name in matrix.stored if name != "g_idx" or method == "gptq"]
    assert list(found.stored("m", ROWS, COLUMNS)) == names
    made = read(found, matrix, range(7, 135), columns)
    expected = matrix.meaning[7:135, columns.start : columns.stop]
    if bits == 8 and in_order:  # a zero point times its scale is rounded
        assert torch.allclose(made, expected, rtol=0, atol=1e-6)
    else:
        assert torch.equal(made, expected)


def test_an_input_of_a_group_that_does_not_exist_is_refused() -> None:
    matrix = gptq(torch.randn(ROWS, COLUMNS), 32, in_order=False)
    matrix.stored["g_idx"][5] = COLUMNS // 32
    with pytest.raises(InvalidRequest, match=r"m\.g_idx names groups that do not exist"):
        read(Gptq((), 32, 1), matrix, range(ROWS), range(COLUMNS))


def test_modules_have_bits_of_their_own() -> None:
    """As GPTQModel and AutoRound name them."""
    gptq_config = {
        "quant_method": "gptq",
        "bits": 4,
        "dynamic": {"+:.*down_proj": {"bits": 8, "group_size": 64}, "-:.*gate": {}},
    }
    rounded_config = {
        "quant_method": "auto-round",
        "bits": 4,
        "extra_config": {"a.down_proj": {"bits": 8, "group_size": 64}, "lm_head": {"bits": 16}},
    }
    tensors = {"a.down_proj.qweight": "I32", "a.up_proj.qweight": "I32"}
    for config in (gptq_config, rounded_config):
        found = read_quantization(Fields({"quantization_config": config}))
        assert found is not None
        formats = [
            found.format_of(module, Named(tensors)) for module in ("a.down_proj", "a.up_proj")
        ]
        sizes = [(each.bits, each.group_size) for each in formats if isinstance(each, Gptq)]
        assert sizes == [(8, 64), (4, 128)]
        assert found.format_of("a.gate", Named(tensors)) is None


class Named(dict[str, str]):
    """Tensors whose types are known."""

    def dtype(self, name: str) -> str:
        return self[name]

    def shape(self, name: str) -> tuple[int, ...]:
        raise AssertionError(name)


def test_gptq_zeros_of_five_bits_and_odd_sizes_are_refused() -> None:
    matrix = gptq(torch.randn(ROWS, COLUMNS), 32)
    matrix.stored["qzeros"][:] = -1
    with pytest.raises(InvalidRequest, match=r"m\.qzeros holds more than 4 bits"):
        read(Gptq((), 32, 1), matrix, range(ROWS), range(COLUMNS))
    for bits, rows, columns in ((4, 12, 64), (4, 16, 68), (3, 16, 64)):
        with pytest.raises(InvalidRequest, match=f"m: GPTQ in {bits} bits cannot store {rows}"):
            Gptq((), 32, 1, bits).stored("m", rows, columns)


CHANNELS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head", "re:.*gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def compressed(**weights: Any) -> dict[str, Any]:
    """CHANNELS with other weights."""
    group = CHANNELS["config_groups"]["group_0"]
    changed = group | {"weights": group["weights"] | weights}
    return CHANNELS | {"config_groups": {"group_0": changed}}


def test_compressed_tensors_in_fp8() -> None:
    """What llm-compressor calls FP8_DYNAMIC and FP8_BLOCK."""
    found = read_quantization(Fields({"quantization_config": CHANNELS}))
    assert found == Fp8(("lm_head",), None, "weight_scale")
    blocks = compressed(strategy="block", block_structure=[128, 64])
    assert read_quantization(Fields({"quantization_config": blocks})) == Fp8(
        ("lm_head",), (128, 64), "weight_scale"
    )


@pytest.mark.parametrize("groups", [{}, {"group_0": {"targets": ["LlamaAttention"]}}])
def test_keys_and_values_alone_have_scales(groups: dict[str, Any]) -> None:
    config = CHANNELS | {"config_groups": groups, "kv_cache_scheme": {"num_bits": 8}}
    assert read_quantization(Fields({"quantization_config": config | {"format": "dense"}})) is None


@pytest.mark.parametrize("columns", [range(COLUMNS), range(128, 384), range(24, 200)])
def test_a_share_of_channels_is_that_part_of_the_weight(columns: range) -> None:
    found = read_quantization(Fields({"quantization_config": CHANNELS}))
    weight = torch.randn(ROWS, COLUMNS)
    scales = weight.abs().amax(dim=1, keepdim=True).bfloat16() / 448
    codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    meaning = codes.float() * scales.float()
    matrix = Matrix({"weight": codes, "weight_scale": scales}, meaning)
    assert found == Fp8(("lm_head",), None, "weight_scale")
    actual = read(replace(found, block=(1, EVERYTHING)), matrix, range(7, 135), columns)
    assert torch.equal(actual, meaning[7:135, columns.start : columns.stop])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (CHANNELS | {"format": "marlin-24"}, "with format marlin-24"),
        (CHANNELS | {"format": "pack-quantized"}, "compressed-tensors with weights of type float"),
        (CHANNELS | {"config_groups": {}}, "compressed-tensors with config_groups {}"),
        (CHANNELS | {"sparsity_config": {"format": "2:4"}}, "with sparsity_config of format 2:4"),
        (compressed(type="int"), "compressed-tensors with weights of type int"),
        (compressed(num_bits=4), "compressed-tensors with num_bits 4"),
        (compressed(strategy="token"), "compressed-tensors with strategy token"),
        (compressed(strategy="block"), r"compressed-tensors with block_structure \[\]"),
    ],
)
def test_refusals_of_compressed_tensors(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_quantization(Fields({"quantization_config": changed}))


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            "fp8",
            {"quant_method": "bitsandbytes"},
            r"\(bitsandbytes\) are not supported; supported: auto-round, awq, compressed-tensors, ",
        ),
        ("awq", {"quant_method": "gptq", "bits": 9}, "gptq with bits 9"),
        (
            "awq",
            {"quant_method": "gptq", "bits": 5},
            "gptq with 5 bits and checkpoint_format gptq is not supported; supported: gptq_p",
        ),
        ("awq", {"quant_method": "auto-round", "bits": 1}, "auto-round with bits 1"),
        (
            "awq",
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            "auto-round with packing_format auto_round:llm_compressor",
        ),
        ("awq", {"quant_method": "auto-round", "data_type": "fp8"}, "with data_type fp8"),
        ("awq", {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo NVFP4_AWQ"),
        (
            "awq",
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "has_zero_point": True},
            "modelopt with has_zero_point true",
        ),
        (
            "awq",
            {"quant_method": "gptq", "dynamic": {"+:[": {"bits": 8}}},
            r"config\.json names modules by 're:\[', which is no pattern",
        ),
        ("awq", {"quant_method": "gptq", "group_size": 20}, "gptq with group_size 20"),
        (
            "awq",
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            "gptq with checkpoint_format marlin is not supported; supported: gptq or gptq_v2 or gptq_p",
        ),
        ("fp8", {"fmt": "e5m2"}, "fp8 with fmt e5m2"),
        ("fp8", {"weight_block_size": [128]}, r"fp8 with weight_block_size \[128\]"),
        ("awq", {"bits": 8}, "awq with bits 8"),
        ("awq", {"version": "marlin"}, "awq with version marlin"),
        ("awq", {"group_size": 20}, "awq with group_size 20"),
    ],
)
def test_refusals(method: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_quantization(Fields({"quantization_config": scheme(method) | changes}))


def stored_mxfp4() -> dict[str, Tensor]:
    blocks = torch.randint(256, (ROWS, COLUMNS // 32, 16), dtype=torch.uint8)
    scales = torch.randint(255, (ROWS, COLUMNS // 32), dtype=torch.uint8)
    return {"blocks": blocks, "scales": scales}


@pytest.mark.parametrize("rows", [range(ROWS), range(7, 135)])
@pytest.mark.parametrize("columns", [range(COLUMNS), range(32, 192), range(352, 384)])
def test_a_share_of_mxfp4_is_that_part_of_the_weight(rows: range, columns: range) -> None:
    stored, quantization = stored_mxfp4(), Mxfp4Blocks(())
    parts = Matrix({f"_{name}": part for name, part in stored.items()}, torch.empty(0))

    def part(name: str, rows: slice, columns: slice) -> Tensor:
        return parts.stored[name.removeprefix("m")][rows, columns]

    weight = quantization.read(Share("m", rows, columns, COLUMNS), part)
    made = dequantize(weight.codes, weight.scales, None, weight.group_size)
    meant = convert_moe_packed_tensors(*(of[None] for of in stored.values()), dtype=torch.float32)
    expected = meant[0].T[rows.start : rows.stop, columns.start : columns.stop]
    assert torch.equal(made, expected)
    assert {name: of.shape for name, of in quantization.stored("m", ROWS, COLUMNS).items()} == {
        f"m_{name}": tensor.shape for name, tensor in stored.items()
    }


def test_what_mxfp4_cannot_store_or_cut_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="m: MXFP4 cannot store 8 outputs and 48 inputs"):
        Mxfp4Blocks(()).stored("m", 8, 48)
    share = Share("m", range(8), range(16, 64), COLUMNS)
    with pytest.raises(InvalidRequest, match=r"m: inputs 16 to 64 of 384 cut blocks of 32"):
        Mxfp4Blocks(()).read(share, lambda *_: torch.empty(0))


def test_patterns_of_gpt_oss_name_what_is_plain() -> None:
    """As its config.json has them."""
    plain = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    found = read_quantization(Fields({"quantization_config": config}))
    assert found == Mxfp4Blocks(tuple(plain))
    for module, is_plain in {
        "model.layers.11.self_attn.q_proj": True,
        "model.layers.0.mlp.router": True,
        "model.layers.0.mlp.experts.gate_up_proj": False,
        "model.layers.self_attn": False,
        "lm_head": True,
        "model.layers.0.extra.self_attn": False,
    }.items():
        assert found.lists_as_plain(module) is is_plain, module
