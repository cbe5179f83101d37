"""Biases, penalties, forbidden tokens and masks, at the positions whose requests specify them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surestep_kernels.choose import SATURATED
from surestep_kernels.columns.gpu.dependent_launch import DependentKernel, wait_for_earlier_kernels

from .reference import Biases, Forbidden, Masks, Penalties, Positions, Shaping

_BLOCK = 1024
_SATURATED: tl.constexpr = tl.constexpr(SATURATED)


@triton.jit
def _unless_unusable(new, old):
    """Return NaN where the old logit was NaN or +inf; else the new one, finite or -inf."""
    usable = (old == old) & (old != float("inf"))
    return tl.where(usable, tl.minimum(new, _SATURATED), float("nan"))


@DependentKernel
@triton.jit
def _bias_kernel(
    z_ptr,  # f32[N, V]
    which_ptr,  # i32[P]
    window_ptr,  # i32[N]
    cu_ptr,  # i32[V+1]
    ids_ptr,  # i32[..]
    values_ptr,  # f32[..]
    only_ptr,  # i32[V]
    V,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    row = tl.load(which_ptr + tl.program_id(0)).to(tl.int64)
    window = tl.load(window_ptr + row)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    old = tl.load(z_ptr + row * V + ids, mask=ids < V, other=0.0)
    new = tl.where(tl.load(only_ptr + window) > 0, float("-inf"), old)
    for i in range(tl.load(cu_ptr + window), tl.load(cu_ptr + window + 1)):
        new = tl.where(ids == tl.load(ids_ptr + i), old + tl.load(values_ptr + i), new)
    tl.store(z_ptr + row * V + ids, _unless_unusable(new, old), mask=ids < V)


@DependentKernel
@triton.jit
def _count_kernel(
    counts_ptr,  # i32[P, V] zeros; then 1 for a token of the history, 2 more for each in the output
    which_ptr,  # i32[P]
    window_ptr,  # i32[N]
    slot_ptr,  # i32[N]
    length_ptr,  # i32[N]
    tokens_ptr,  # i32[S, W]
    prompt_len_ptr,  # i32[V]
    V,
    W,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(which_ptr + index).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (position < tl.load(length_ptr + row)) & (position < W)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    token = tl.load(tokens_ptr + slot * W + position, mask=mask, other=0)
    mask = mask & (token >= 0) & (token < V)
    prompt_len = tl.load(prompt_len_ptr + tl.load(window_ptr + row))
    at = counts_ptr + index * V + token
    tl.atomic_or(at, 1, mask=mask, sem="relaxed")
    tl.atomic_add(at, 2, mask=mask & (position >= prompt_len), sem="relaxed")


@DependentKernel
@triton.jit
def _penalise_kernel(
    z_ptr,  # f32[N, V]
    counts_ptr,  # i32[P, V]
    which_ptr,  # i32[P]
    window_ptr,  # i32[N]
    repetition_ptr,  # f32[V]
    presence_ptr,  # f32[V]
    frequency_ptr,  # f32[V]
    V,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(which_ptr + index).to(tl.int64)
    window = tl.load(window_ptr + row)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counted = tl.load(counts_ptr + index * V + ids, mask=ids < V, other=0)
    old = tl.load(z_ptr + row * V + ids, mask=ids < V, other=0.0)
    factor = tl.load(repetition_ptr + window) + tl.zeros_like(old)
    count = (counted >> 1).to(tl.float32)
    new = tl.where(old > 0, tl.div_rn(old, factor), old * factor)
    new -= tl.load(frequency_ptr + window) * count
    new -= tl.load(presence_ptr + window) * (count > 0).to(tl.float32)
    new = tl.where(counted > 0, new, old)
    tl.store(z_ptr + row * V + ids, _unless_unusable(new, old), mask=ids < V)


@DependentKernel
@triton.jit
def _forbid_kernel(
    z_ptr,  # f32[N, V]
    which_ptr,  # i32[P]
    window_ptr,  # i32[N]
    slot_ptr,  # i32[N]
    length_ptr,  # i32[N]
    tokens_ptr,  # i32[S, W]
    cu_ptr,  # see Forbidden
    cu_ids_ptr,  # see Forbidden
    ids_ptr,  # see Forbidden
    until_ptr,  # see Forbidden
    first_ptr,  # see Forbidden
    V,
    W,
):
    wait_for_earlier_kernels()
    row = tl.load(which_ptr + tl.program_id(0)).to(tl.int64)
    window, length = tl.load(window_ptr + row), tl.load(length_ptr + row)
    line = tokens_ptr + tl.load(slot_ptr + row).to(tl.int64) * W
    output_len = tl.maximum(length - tl.load(first_ptr + window), 0)
    for i in range(tl.load(cu_ptr + window), tl.load(cu_ptr + window + 1)):
        begin, end = tl.load(cu_ids_ptr + i), tl.load(cu_ids_ptr + i + 1)
        prefix_len = end - begin - 1
        applies = (length < tl.load(until_ptr + i)) & (prefix_len <= output_len)
        for j in range(prefix_len):
            place = length - prefix_len + j
            inside = (place >= 0) & (place < W)
            token = tl.load(line + place, mask=inside, other=-1)
            applies = applies & (token == tl.load(ids_ptr + begin + j))
        at = z_ptr + row * V + tl.load(ids_ptr + end - 1)
        old = tl.load(at)
        tl.store(at, _unless_unusable(float("-inf"), old), mask=applies)


@DependentKernel
@triton.jit
def _mask_kernel(
    z_ptr,  # f32[N, V]
    which_ptr,  # i32[P]
    words_ptr,  # i32[P, num_words]
    V,
    num_words,
    BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(which_ptr + index).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words_ptr + index * num_words + ids // 32, mask=ids < V, other=-1)
    barred = ((word >> (ids % 32)) & 1) == 0
    at = z_ptr + row * V + ids
    old = tl.load(at, mask=barred, other=0.0)
    tl.store(at, _unless_unusable(float("-inf"), old), mask=barred)


def shape_logits(z: Tensor, positions: Positions, shaping: Shaping) -> None:
    assert z.dtype is torch.float32
    assert z.is_contiguous()
    if shaping.biases is not None:
        _bias(z, positions, shaping.biases)
    if shaping.penalties is not None:
        _penalise(z, positions, shaping.penalties)
    if shaping.forbidden is not None:
        _forbid(z, positions, shaping.forbidden)
    if shaping.masks is not None:
        _mask(z, shaping.masks)


def _bias(z: Tensor, positions: Positions, biases: Biases) -> None:
    grid = len(biases.which), triton.cdiv(z.shape[1], _BLOCK)
    _bias_kernel[grid](
        z,
        biases.which,
        positions.window,
        biases.cu,
        biases.ids,
        biases.values,
        biases.only,
        z.shape[1],
        BLOCK=_BLOCK,
    )


def _penalise(z: Tensor, positions: Positions, penalties: Penalties) -> None:
    count, vocab = len(penalties.which), z.shape[1]
    width = positions.tokens.shape[1]
    counts = torch.zeros(count, vocab, dtype=torch.int32, device=z.device)
    _count_kernel[count, triton.cdiv(width, _BLOCK)](
        counts,
        penalties.which,
        positions.window,
        positions.slot,
        positions.length,
        positions.tokens,
        penalties.prompt_len,
        vocab,
        width,
        BLOCK=_BLOCK,
    )
    # Products and sums are rounded one by one, as on the CPU.
    _penalise_kernel[count, triton.cdiv(vocab, _BLOCK)](
        z,
        counts,
        penalties.which,
        positions.window,
        penalties.repetition,
        penalties.presence,
        penalties.frequency,
        vocab,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )


def _forbid(z: Tensor, positions: Positions, forbidden: Forbidden) -> None:
    _forbid_kernel[(len(forbidden.which),)](
        z,
        forbidden.which,
        positions.window,
        positions.slot,
        positions.length,
        positions.tokens,
        forbidden.cu,
        forbidden.cu_ids,
        forbidden.ids,
        forbidden.until,
        forbidden.first,
        z.shape[1],
        positions.tokens.shape[1],
    )


def _mask(z: Tensor, masks: Masks) -> None:
    vocab, num_words = z.shape[1], masks.words.shape[1]
    grid = len(masks.which), triton.cdiv(vocab, _BLOCK)
    _mask_kernel[grid](z, masks.which, masks.words, vocab, num_words, BLOCK=_BLOCK)
