from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from support.kernels.cases import assert_close, fill_cache, make_context, row_bounds
from surestep_common.errors import InvalidRequest
from surestep_kernels import AttentionCase, KernelSet, load_kernels
from surestep_kernels.paged_attention import AttentionRows, paged_attention_reference
from surestep_kernels.paged_attention import flash as flash
from surestep_kernels.paged_attention.backends import ATTENTION, AUTO, choose_attention
from surestep_kernels.store_kv import FP8, INT8, LayerCache, kv_cache_shape
from torch import Tensor

COMMON = {"cu_seq_q": "cu_seqlens_q", "max_q": "max_seqlen_q", "scale": "softmax_scale"}  # of torch
HOPPER = AttentionCase(device="cuda", capability=90)
LOOSE = replace(HOPPER, invariant=False)
INTERPRETED = triton.knobs.runtime.interpret


def standin(
    check: Callable[[dict[str, Any]], tuple[Tensor, Tensor]], signature: inspect.Signature
) -> Callable[..., Any]:
    """A function of that signature: asserts what all these packages want, attends by the reference.

    `check` gives the rows' lengths and block table from the arguments by name.
    """

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        q, k, v, *_ = bound.values()
        lengths, table = check(bound)
        bound = {"learnable_sink": None, "softcap": None} | {
            COMMON.get(k, k): v for k, v in bound.items()
        }
        cu, sinks = bound["cu_seqlens_q"], bound["learnable_sink"]
        assert cu.dtype is lengths.dtype is table.dtype is torch.int32
        assert k.shape[1:] == v.shape[1:] == (16, 2, 24)  # positions, then heads
        assert bound["max_seqlen_q"] >= int((cu[1:] - cu[:-1]).max())
        left, right = bound["window_size"]
        window = left + 1 if left is not None and left >= 0 else 0
        assert right == 0 or not window
        cache = LayerCache(k.transpose(1, 2), v.transpose(1, 2))
        rows = AttentionRows(table, torch.arange(len(table)), cu, lengths - (cu[1:] - cu[:-1]), 0)
        scale = bound["softmax_scale"]
        sinks = None if sinks is None else sinks.float()
        cap = bound["softcap"] or 0.0
        return paged_attention_reference(
            q, cache, rows, scale, window=window, sinks=sinks, softcap=cap
        )

    return function


def parameters(names: str) -> inspect.Signature:
    """A signature of positional parameters; the ones behind a `|` may be left out."""
    needed, optional = (part.split() for part in names.split("|"))
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter(name, kind) for name in needed]
        + [inspect.Parameter(name, kind, default=None) for name in optional]
    )


FA2 = parameters(
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k | dropout_p softmax_scale causal "
    "window_size softcap alibi_slopes deterministic return_attn_probs block_table"
)
FA3 = parameters(
    "q k_cache v_cache | k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale "
    "v_descale softmax_scale causal window_size attention_chunk softcap rotary_interleaved "
    "scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse"
)
FA4 = parameters(
    "q k v | cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k page_table "
    "softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic "
    "score_mod aux_tensors return_lse"
)


def from_fa2(bound: dict[str, Any]) -> tuple[Tensor, Tensor]:
    assert bound["causal"] is True
    cu = bound["cu_seqlens_k"]
    assert bound["max_seqlen_k"] >= int((cu[1:] - cu[:-1]).max())
    assert cu[0] == 0
    return cu[1:] - cu[:-1], bound["block_table"]


def from_fa3(bound: dict[str, Any]) -> tuple[Tensor, Tensor]:
    assert bound["causal"] is True
    return bound["cache_seqlens"], bound["page_table"]


def from_fa4(bound: dict[str, Any]) -> tuple[Tensor, Tensor]:
    assert bound["causal"] is True
    assert "cu_seqlens_k" not in bound  # not together with pages
    assert bound["learnable_sink"] is None or bound["learnable_sink"].dtype is torch.bfloat16
    return bound["seqused_k"], bound["page_table"]


def from_torch(bound: dict[str, Any]) -> tuple[Tensor, Tensor]:
    assert bound["enable_gqa"] is True
    assert bound["cu_seq_k"] is None
    assert bound["window_size"][1] == 0  # causal
    return bound["seqused_k"], bound["block_table"]


def modules() -> dict[str, tuple[Callable[..., Tensor], Any]]:
    """Each adapter and what stands in for the package it calls."""
    from torch.nn.attention import varlen

    fa4 = standin(from_fa4, FA4)
    of_torch = standin(from_torch, inspect.signature(varlen.varlen_attn))
    return {
        "FA2": (flash.call_fa2, SimpleNamespace(flash_attn_varlen_func=standin(from_fa2, FA2))),
        "FA3": (flash.call_fa3, SimpleNamespace(flash_attn_with_kvcache=standin(from_fa3, FA3))),
        "FA4": (
            flash.call_fa4,
            SimpleNamespace(flash_attn_varlen_func=lambda *a, **k: (fa4(*a, **k), None)),
        ),
        "torch": (flash.call_torch, SimpleNamespace(varlen_attn=of_torch)),
    }


@pytest.mark.skipif(not INTERPRETED, reason="the stand-ins attend on the CPU")
@pytest.mark.parametrize("name", ["FA2", "FA3", "FA4", "torch"])
def test_adapters_hand_over_what_the_packages_want(reference: KernelSet, name: str) -> None:
    call, module = modules()[name]
    backend = flash.backend(name, lambda arguments: call(module, arguments))
    lengths, counts = [40, 17, 5], [1, 5, 2]
    context = make_context(lengths, 2, 24, torch.float32)
    start = torch.tensor(lengths, dtype=torch.int32) - torch.tensor(counts, dtype=torch.int32)
    slots = torch.tensor([2, 0, 1])
    tables = context.block_tables[slots.argsort()]
    rows = AttentionRows(tables, slots, row_bounds(counts), start, max(counts))
    ours = replace(reference, kv_cache_shape=backend.kv_cache_shape, store_kv=backend.store_kv)
    cache, q = fill_cache(ours, context), torch.randn(sum(counts), 4, 24)
    expected_cache = fill_cache(reference, context)
    for window, softcap in ((0, 0.0), (3, 0.0), (0, 0.7)):
        if softcap and name == "torch":
            continue  # is refused
        options: dict[str, Any] = {"window": window, "softcap": softcap}
        expected = paged_attention_reference(q, expected_cache, rows, 0.3, **options)
        assert_close(backend.paged_attention(q, cache, rows, 0.3, **options), expected)
    if name == "FA4":
        sinks = torch.tensor([1.0, 0.5, -2, 4])
        expected = paged_attention_reference(q, expected_cache, rows, 0.3, sinks=sinks)
        assert_close(backend.paged_attention(q, cache, rows, 0.3, sinks=sinks), expected)


def test_every_choice_is_registered() -> None:
    assert sorted(AUTO) == ATTENTION.names()
    with pytest.raises(InvalidRequest, match="known: flash_attn"):
        choose_attention("xformers", HOPPER)


def test_auto_keeps_bits_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_attention("auto", HOPPER).name == "triton"
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("attention: triton; no flash_attn: a token's bits would depend")
    assert "no torch_varlen: a token's bits" in message


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("flash_attn", AttentionCase.on("cpu"), "it needs a CUDA device"),
        ("flash_attn", replace(HOPPER, dtype=torch.float32), "16 bits"),
        ("flash_attn", replace(HOPPER, cache_dtype=FP8), "16 bits"),
        ("flash_attn", replace(HOPPER, head_dim=264), "head_dim 264"),
        ("torch_varlen", replace(HOPPER, sinks=True), "no sinks"),
        ("torch_varlen", replace(HOPPER, softcap=True), "no soft cap"),
        ("flash_attn", replace(HOPPER, cache_dtype=INT8), "16 bits"),
        ("triton", replace(HOPPER, block_size=20), "block size 20"),
        ("triton", replace(HOPPER, capability=80, cache_dtype=FP8), "sm_89"),
    ],
)
def test_a_named_backend_that_cannot_serve_says_why(
    name: str, case: AttentionCase, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as raised:
        choose_attention(name, case)
    assert raised.value.param == "attention_backend"


def test_an_int8_cache_is_for_cpus() -> None:
    for backend in ("auto", "torch", "triton"):
        with pytest.raises(InvalidRequest, match="int8 is for CPUs alone") as raised:
            load_kernels("cuda", attention_backend=backend, case=replace(HOPPER, cache_dtype=INT8))
        assert raised.value.param == "kv_cache_dtype"
    case = replace(AttentionCase.on("cpu"), cache_dtype=INT8)
    with pytest.raises(InvalidRequest, match="no triton"):
        choose_attention("triton", case)
    assert (
        load_kernels("cpu", attention_backend="torch", case=case).kv_cache_shape is kv_cache_shape
    )


def fake_package(
    monkeypatch: pytest.MonkeyPatch, module: str = "surestep_kernels.paged_attention.backends"
) -> list[flash.Package]:
    """FA3 and FA2 as if they were installed."""
    installed = [flash.FA3._replace(module=module), flash.FA2._replace(module=module)]
    monkeypatch.setattr(flash, "FA3", installed[0])
    monkeypatch.setattr(flash, "FA2", installed[1])
    return installed


def test_the_newest_generation_that_serves_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(monkeypatch)
    assert choose_attention("flash_attn", HOPPER).name == "flash_attn (FA3)"
    ampere = replace(HOPPER, capability=80, block_size=256)
    assert choose_attention("flash_attn", ampere).name == "flash_attn (FA2)"
    with pytest.raises(InvalidRequest) as raised:
        choose_attention("flash_attn", replace(ampere, block_size=16))
    assert raised.value.message == (
        "no flash_attn: FA4 is not installed, FA3 does not attend to pages on sm_80, "
        "FA2 needs a block size that is a multiple of 256"
    )
    with pytest.raises(InvalidRequest, match="FA3 knows no sinks"):
        choose_attention("flash_attn", replace(HOPPER, sinks=True))


def test_auto_takes_the_fastest_where_bits_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(monkeypatch)
    assert choose_attention("auto", LOOSE).name == "flash_attn (FA3)"
    assert choose_attention("auto", replace(LOOSE, sinks=True)).name == "triton"


def test_kernel_sets_take_the_three_ops_of_the_backend() -> None:
    kernels = load_kernels("cpu", "reference", "torch")
    assert kernels.paged_attention is paged_attention_reference
    assert kernels.kv_cache_shape is kv_cache_shape
    cuda = load_kernels("cuda")
    assert cuda.paged_attention is not kernels.paged_attention
    assert cuda.store_kv is not kernels.store_kv
    mixed = load_kernels("cpu", attention_backend="torch")
    assert mixed.paged_attention is paged_attention_reference
    assert mixed.name == load_kernels("cpu").name


def test_triton_on_the_cpu_is_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels("cpu", attention_backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InvalidRequest, match="interpreter only"):
        load_kernels("cpu", attention_backend="triton")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block_size": 4}, "block_size 4 on a cpu needs attention_backend torch"),
        ({"head_dim": 12}, "1 heads of 12 elements to a key on a cpu needs"),
        ({"head_dim": 520}, "1 heads of 520 elements"),
        ({"group": 64}, "64 heads of 128 elements"),
    ],
)
def test_sizes_that_the_c_kernels_have_no_room_for_are_refused(
    sizes: dict[str, Any], message: str
) -> None:
    case = replace(AttentionCase.on("cpu"), **sizes)
    with pytest.raises(InvalidRequest, match=message):
        load_kernels("cpu", case=case)
    assert load_kernels("cpu", attention_backend="torch", case=case)
