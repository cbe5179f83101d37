"""What compile_launchers.py launches: the cases of the benchmarks, and what these leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from gpu.cases import MODELS, OPS, TINY, Sizes
from gpu.sizes import Work, i32, kernels
from support.kernels.compile_expert_cases import mixtures, quantised
from support.kernels.compile_launch import BF16, FP32, META, Launch
from surestep_kernels import PackedLinear
from surestep_kernels.latent_attention.triton import attend
from surestep_kernels.latent_choice.triton import choose
from surestep_kernels.linear.sequential import TILES, Tile, multiply_into
from surestep_kernels.paged_attention import AttentionRows
from surestep_kernels.paged_attention.triton import paged_attention
from surestep_kernels.project_heads import HeadProjection
from surestep_kernels.route import SigmoidChoice
from surestep_kernels.route.triton import route_sigmoid
from surestep_kernels.shape_logits import Biases, Forbidden, Positions, Shaping
from surestep_kernels.shape_logits.triton import shape_logits
from surestep_kernels.store_kv import FP8, LayerCache
from surestep_kernels.store_kv.triton import store_kv
from torch import Tensor

# Their cases look at values.
WITH_MEMORY = (
    "gated_delta",
    "linear int4",
    *("mix_experts bf16", "mix_experts_add_rms_norm bf16"),
    *("mix_experts mxfp4", "mix_experts_add_rms_norm mxfp4"),
    *("moe bf16", "moe fp8", "moe int4", "moe mxfp4", "moe w8a8"),
    "shape_logits penalties",
)
NO_TRITON = ("linear_torch",)
BLOCK_SIZE, HEADS, KV_HEADS = 16, 8, 2


def launches(*, full: bool) -> Iterator[Launch]:
    """All; or those of a hybrid and its experts, and of each kind of attention one."""
    for sizes in (*MODELS, TINY) if full else (MODELS[1], MODELS[2]):
        yield from _of_model(_fewer(sizes, full=full))
    yield from _attention(full=full)
    yield from _latents()
    yield from _products()
    yield from _fused()
    yield from _tiles()
    yield from quantised()
    yield from mixtures()
    yield from _shaping()
    yield from _pages()


def _fewer(sizes: Sizes, *, full: bool) -> Sizes:
    """Kernels are compiled for few rows and many, and for numbers that 16 divides or not."""
    experts = sizes.experts
    if experts is not None:  # of weights in memory
        experts = experts._replace(experts=min(experts.experts, 8), rows=(1, 8) if full else (1,))
    sinks, draft = sizes.sinks, sizes.draft
    if sinks is not None:
        sinks = sinks._replace(batches=sinks.batches[:1], contexts=sinks.contexts[-1:])
    if draft is not None:
        draft = draft._replace(rows=(draft.rows[0], draft.rows[-1]))
    rows, batches = ((1, 4, 64, 512), (1, 64)) if full else ((1, 512), (1,))
    return sizes._replace(
        rows=tuple(m for m in sizes.rows if m in rows) if sizes is not TINY else sizes.rows,
        lookups=sizes.lookups[:1],
        batches=tuple(b for b in sizes.batches if b in batches) or sizes.batches,
        contexts=sizes.contexts[:1],
        sampled=sizes.sampled[:1],
        experts=experts,
        sinks=sinks,
        draft=draft,
    )


def _of_model(sizes: Sizes) -> Iterator[Launch]:
    for op in (op for op in OPS if op not in NO_TRITON):
        for case in OPS[op](sizes):
            if not case.op.endswith(" torch"):
                device = "cpu" if case.op in WITH_MEMORY else META
                run = partial(_make_and_run, case.make, device)
                yield Launch(op, f"{sizes.name}: {case.op} {case.shape}", run)


def _make_and_run(make: Callable[[str], Work], device: str) -> None:
    make(device).run()


class _Rows(NamedTuple):
    """Of attention, by how the work is cut into programs."""

    name: str
    rows: int
    tokens: int  # of each row
    context: int


_DECODE = _Rows("decode", 1, 1, 1024)
_LONG = _Rows("decode with room for 131072", 256, 1, 131072)  # so do prompts
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window and sinks": {"window": 300, "sinks": True},
    "wider windows": {"window": 300, "wider": True},
    "fp8": {"fp8": True},
    "soft cap": {"softcap": 50.0},
}


def _latents() -> Iterator[Launch]:
    """As wide and as many as GLM-5's; and its router, and that of DeepSeek-V3."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    # As windows, and as prompts, whose tokens go through all splits.
    rows = AttentionRows(empty(8, 64), empty(8, dtype=torch.int64), empty(9), empty(8), 4)
    prompts = rows._replace(max_tokens=2048)
    for dtype, page_dtype in ((BF16, BF16), (BF16, FP8), (FP32, FP32)):
        pages, keys = (empty(64, BLOCK_SIZE, width, dtype=page_dtype) for width in (576, 128))
        q, index = (empty(32, *heads, dtype=dtype) for heads in ((64, 576), (32, 128)))
        for name, chosen in (("dense", None), ("sparse", empty(32, 2048))):
            for kind, of in (("windows", rows), ("prompts", prompts))[: 1 + (dtype is BF16)]:
                run = partial(attend, q, pages, of, 0.1, 512, chosen)
                case = f"latents {dtype} in {page_dtype} {name} {kind}"
                yield Launch("paged_attention", case, run)
        for blocks in (64, 4096):
            of = rows._replace(block_tables=empty(8, blocks))
            run = partial(choose, index, empty(32, 32, dtype=FP32), keys, of, 2048)
            case = f"choice {dtype} in {page_dtype} among {blocks * BLOCK_SIZE}"
            yield Launch("paged_attention", case, run)
    logits, bias = empty(32, 256, dtype=FP32), empty(256, dtype=FP32)
    for groups, kept in ((1, 1), (8, 4)):
        how = SigmoidChoice(bias, groups, kept, 8, normalize=True, scale=2.5)
        named = f"sigmoid scores in {groups} groups"
        yield Launch("paged_attention", named, partial(route_sigmoid, logits, how))


def _attention(*, full: bool) -> Iterator[Launch]:
    every = product((64, 96, 128, 256), (BF16, FP32), (_DECODE, _LONG), _OPTIONS)
    few = [
        (64, BF16, _LONG, "window and sinks"),
        (96, BF16, _DECODE, "plain"),
        (128, BF16, _DECODE, "wider windows"),
        (128, BF16, _LONG, "plain"),
        (128, BF16, _LONG, "fp8"),
        (256, BF16, _DECODE, "fp8"),
        (128, FP32, _DECODE, "window and sinks"),
        (256, BF16, _LONG, "soft cap"),
    ]
    for head_dim, dtype, rows, options in every if full else few:
        run = partial(_attend, head_dim, dtype, rows, **_OPTIONS[options])
        yield Launch("paged_attention", f"D={head_dim} {dtype} {rows.name} {options}", run)


def _attend(
    head_dim: int,
    dtype: torch.dtype,
    rows: _Rows,
    *,
    window: int = 0,
    sinks: bool = False,
    fp8: bool = False,
    softcap: float = 0.0,
    wider: bool = False,
) -> None:
    pages = rows.context // BLOCK_SIZE
    scales = torch.empty(2, device=META) if fp8 else None
    shape = (rows.rows * pages + 1, KV_HEADS, BLOCK_SIZE, head_dim)
    keys, values = (torch.empty(shape, dtype=FP8 if fp8 else dtype, device=META) for _ in "kv")
    bounds = torch.empty(rows.rows + 1, dtype=torch.int32, device=META)
    tables = torch.empty(rows.rows, pages, dtype=torch.int32, device=META)
    slots = torch.empty(rows.rows, dtype=torch.int64, device=META)
    q = torch.empty(rows.rows * rows.tokens, HEADS, head_dim, dtype=dtype, device=META)
    paged_attention(
        q,
        LayerCache(keys, values, scales),
        AttentionRows(
            tables, slots, bounds, bounds[1:], rows.tokens, bounds[1:] if wider else None
        ),
        1.0,
        window=window,
        sinks=torch.empty(HEADS, device=META) if sinks else None,
        softcap=softcap,
    )


def _products() -> Iterator[Launch]:
    """Of float32, and with a bias."""

    def run(rows: int, dtype: torch.dtype, *, bias: bool) -> None:
        weight = torch.empty(512, 2048, dtype=dtype, device=META)
        packed = kernels().pack_linear(weight, weight[:, 0].contiguous() if bias else None)
        kernels().linear(torch.empty(rows, 2048, dtype=dtype, device=META), packed)

    for rows, dtype, bias in ((1, FP32, False), (512, FP32, True), (1, BF16, True)):
        name = f"product M={rows} {dtype} bias={bias}"
        yield Launch("linear", name, partial(run, rows, dtype, bias=bias))


def _fused() -> Iterator[Launch]:
    """What the benchmarks leave out of what follows a product: biases, and FP8 pages with scales."""
    ops, heads = replace(kernels(), store_kv=store_kv), 12 * 128

    def packed(columns: int) -> PackedLinear:
        weight = torch.empty(columns, 2048, dtype=BF16, device=META)
        return ops.pack_linear(weight, weight[:, 0].contiguous())

    def run(rows: int) -> None:
        x = torch.empty(rows, 2048, dtype=BF16, device=META)
        ops.linear_silu_and_mul(x, packed(2 * 512))
        residual, weight = torch.empty(rows, 2048, dtype=BF16, device=META), _floats(2048)
        ops.linear_add_rms_norm(x, packed(2048), residual, weight, 1e-5)
        norms = _floats(128), _floats(128)
        projection = HeadProjection(packed(heads), 128, 8, 0, 2, _floats(64, 128), *norms, 1e-6)
        where = torch.empty(rows, dtype=torch.int64, device=META)
        ops.project_heads(x, projection, where, _scaled_pages(), where)

    for rows in (1, 512):
        yield Launch("project_heads", f"biases and fp8 pages M={rows}", partial(run, rows))


def _floats(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device=META)


def _scaled_pages() -> LayerCache:
    shape = (9, KV_HEADS, BLOCK_SIZE, 128)
    keys, values = (torch.empty(shape, dtype=FP8, device=META) for _ in "kv")
    return LayerCache(keys, values, _floats(2))


def _tiles() -> Iterator[Launch]:
    """All of the family that adds along K."""

    def run(tile: Tile, depth: int) -> None:
        weight = torch.empty(2048, depth, dtype=BF16, device=META)
        x = torch.empty(tile.rows, depth, dtype=BF16, device=META)
        multiply_into(x.new_empty(len(x), 2048), x, kernels().pack_linear(weight), tile)

    for tile in TILES:
        shape = "x".join(map(str, tile[:3])) + (" weight first" if tile.weight_first else "")
        yield Launch("linear_sequential", f"tile {shape}", partial(run, tile, 2048))
    yield Launch("linear_sequential", "tiny: tile, K=136", partial(run, TILES[0], 136))


def _shaping() -> Iterator[Launch]:
    """What the benchmarks do not ask of logits: biases, and forbidden sequences."""

    def run() -> None:
        ids, values = i32(META, 0, 1), torch.empty(2, device=META)
        biases = Biases(ids, ids, ids, values, ids)
        forbidden = Forbidden(ids, ids, ids, ids, ids, ids)
        positions = Positions(ids, ids, ids, ids.view(1, 2))
        z = torch.empty(2, 128256, device=META)
        shape_logits(z, positions, Shaping(biases=biases, forbidden=forbidden))

    yield Launch("shape_logits", "biases and forbidden sequences", run)


def _pages() -> Iterator[Launch]:
    """FP8 pages with scales."""

    def run(dtype: torch.dtype) -> None:
        k, v = (torch.empty(4, KV_HEADS, 128, dtype=dtype, device=META) for _ in "kv")
        store_kv(k, v, _scaled_pages(), torch.empty(4, dtype=torch.int64, device=META))

    for dtype in (BF16, FP32):
        yield Launch("store_kv", f"fp8 with scales from {dtype}", partial(run, dtype))
