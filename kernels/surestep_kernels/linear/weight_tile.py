"""Quantised weights in the order in which the registers of a matrix instruction hold them.

wgmma takes its first operand from registers or shared memory, its second from shared memory only.
So y is computed as W x^T: codes go from memory to the threads that widen and multiply them, and the
widened values are never stored. For that each thread has to find its own codes side by side.

The first operand is 16 rows to a warp and 16 inputs to a step. Thread 4r + q of a warp holds rows r
+ 8i and inputs 2q + 8j + e of a step, with i, j and e of 0 or 1 (PTX ISA, register fragments of
wgmma). Codes are stored as words of 32 bits, in the order

    block of 16 rows | group of inputs | chunk | r | q | words of a thread

    FP8   two steps to a chunk; words are (step, i), bytes (e, j) with j the faster
    INT4  four steps to a chunk or all of a group; a word is a step, nibbles (1 - e, j, i)
    NVFP4 as INT4
    MXFP4 as INT4, two groups of 32 inputs together: MXFP4_STEP

so that a thread mostly loads 16 bytes, and those of a warp are contiguous. The bytes of an FP8 word
are also what the FP8 instruction takes of a row, whose inputs the other operand must then have in
the same order: FP8_ORDER. Groups are padded with zeros to a power of two, and rows to whole tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from .reference import WeightFormat

ROW_BLOCK = 16  # rows of a warp
TILE_ROWS = 64  # of one instruction, the smallest tile
_MOST_ROWS = 128  # of a tile
MIN_GROUP = 32  # inputs of one FP8 instruction
MXFP4_STEP = 64  # inputs of two groups
FP8, INT4, MXFP4, NVFP4 = (
    tl.constexpr(int(WeightFormat[name])) for name in ("FP8", "INT4", "MXFP4", "NVFP4")
)
FP8_ORDER = tuple(2 * q + 8 * j + e for q in range(4) for e in range(2) for j in range(2))


def padded_group(group_size: int) -> int:
    """Return the inputs of a group as it is stored."""
    return max(MIN_GROUP, 1 << (group_size - 1).bit_length())


def pack_codes(codes: Tensor, group_size: int, *, int4: bool) -> Tensor:
    """Reorder codes u8[N, K] (INT4: 0 to 15) as described above: i32, flat."""
    rows, columns = codes.shape
    groups, padded = triton.cdiv(columns, group_size), padded_group(group_size)
    codes = functional.pad(codes, (0, groups * group_size - columns, 0, -rows % _MOST_ROWS))
    codes = functional.pad(codes.view(-1, groups, group_size), (0, padded - group_size))
    steps = min(4, padded // 16) if int4 else 2
    parts = codes.view(-1, 2, 8, groups, padded // 16 // steps, steps, 2, 4, 2)
    block, i, r, group, chunk, step, j, q, e = range(9)
    if not int4:
        words = parts.permute(block, group, chunk, r, q, step, i, e, j)
        return words.contiguous().flatten().view(torch.int32)
    nibbles = parts.permute(block, group, chunk, r, q, step, e, j, i).flip(6)
    low, high = nibbles.unbind(8)
    return (low | high << 4).contiguous().flatten().view(torch.int32)


@triton.jit
def places(ROWS: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr):
    """Return the row block of each word of a tile, and its place in its block and group."""
    WORDS: tl.constexpr = ROWS * BLOCK_K // (4 if FORMAT == FP8 else 8)
    WARP: tl.constexpr = 32 * (4 if FORMAT == FP8 or BLOCK_K > 32 else 2)
    word = tl.arange(0, WORDS)
    chunk = word // (WARP * (ROWS // 16))
    return word // WARP % (ROWS // 16), chunk * WARP + word % WARP


@triton.jit
def _half(pair, SHIFT: tl.constexpr):
    """Return the bfloat16 in 16 bits of a word, as fp32."""
    return (pair >> SHIFT).to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)


@triton.jit
def _byte(word, SHIFT: tl.constexpr):
    return (word >> SHIFT).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _fp8_pair(codes):
    """Return the values of two codes in the upper bytes of a word's halves, times 2^-120, in
    bfloat16."""
    pair = ((codes >> 4) & 0x07F007F0) | (codes & -2147450880)  # 0x80008000
    return tl.join(_half(pair, 0), _half(pair, 16))


@triton.jit
def _int4_pair(word, SHIFT: tl.constexpr):
    """Return nibbles SHIFT / 4 and SHIFT / 4 + 4, plus 128; the latter first."""
    pair = ((word >> SHIFT) & 0x000F000F) | 0x43004300
    return tl.join(_half(pair, 16), _half(pair, 0))


@triton.jit
def _e2m1_pair(word, SHIFT: tl.constexpr):
    """Return the numbers of nibbles SHIFT / 4 and four further times 2^-126; the latter first."""
    sizes = word << (6 - SHIFT) if SHIFT < 6 else word >> (SHIFT - 6)
    pair = (sizes & 0x01C001C0) | ((word << (12 - SHIFT)) & -2147450880)  # 0x80008000
    return tl.join(_half(pair, 16), _half(pair, 0))


@triton.jit
def _power(exponent):
    """Return 2^(exponent - 127) as fp32; it fits bfloat16, where 0 makes a subnormal number."""
    return _half(tl.maximum(exponent << 7, 1 << 6), 0)


@triton.jit
def fp8_tile(words, dtype: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Widen the codes [ROWS, BLOCK_K] of a group: exact in bfloat16.

    fp32 in between is for the interpreter, which has no bfloat16 arithmetic; the compiler sees that
    it changes nothing, and multiplies pairs.
    """
    lower, upper = (words << 8) & -16711936, words & -16711936  # 0xff00ff00
    pairs = tl.join(_fp8_pair(lower), _fp8_pair(upper))
    tile = pairs.reshape(BLOCK_K // 32, ROWS // 16, 8, 4, 2, 2, 2, 2)  # chunk w r q step i e j
    tile = tile.permute(1, 5, 2, 0, 4, 7, 3, 6).reshape(ROWS, BLOCK_K)
    return (tile * 1.329227995784916e36).to(dtype)  # 2^120


@triton.jit
def int4_tile(words, zeros, dtype: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Widen the codes [ROWS, BLOCK_K] of a group less the zeros i32[ROWS], exact in bfloat16."""
    STEPS: tl.constexpr = 2 if BLOCK_K == 32 else 4
    j0 = tl.join(_int4_pair(words, 0), _int4_pair(words, 4))
    j1 = tl.join(_int4_pair(words, 8), _int4_pair(words, 12))
    pairs = tl.join(j0, j1)
    tile = pairs.reshape(BLOCK_K // 16 // STEPS, ROWS // 16, 8, 4, STEPS, 2, 2, 2)  # .. step e i j
    tile = tile.permute(1, 6, 2, 0, 4, 7, 3, 5).reshape(ROWS, BLOCK_K)
    return (tile - (zeros | 128).to(tl.float32)[:, None]).to(dtype)


@triton.jit
def e2m1_tile(words, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the numbers [ROWS, BLOCK_K] that codes in E2M1 stand for, in bfloat16."""
    STEPS: tl.constexpr = 2 if BLOCK_K == 32 else 4
    j0 = tl.join(_e2m1_pair(words, 0), _e2m1_pair(words, 4))
    j1 = tl.join(_e2m1_pair(words, 8), _e2m1_pair(words, 12))
    pairs = tl.join(j0, j1)
    tile = pairs.reshape(BLOCK_K // 16 // STEPS, ROWS // 16, 8, 4, STEPS, 2, 2, 2)  # .. step e i j
    tile = tile.permute(1, 6, 2, 0, 4, 7, 3, 5).reshape(ROWS, BLOCK_K)
    return (tile * 8.507059173023462e37).to(tl.bfloat16)  # 2^126


@triton.jit
def mxfp4_tile(words, exponents, dtype: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Decode the numbers [ROWS, BLOCK_K] of two groups: exact in bfloat16, infinite beyond it.

    `exponents` i32[ROWS] hold that of the first group in their lowest byte, then the other's. Both
    products are rounded to bfloat16, which changes nothing and lets the compiler multiply pairs.
    """
    tile = e2m1_tile(words, ROWS, BLOCK_K)
    powers = tl.join(_power(exponents & 0xFF), _power((exponents >> 8) & 0xFF))
    scaled = tile.reshape(ROWS, 2, BLOCK_K // 2).to(tl.float32) * powers[:, :, None]
    return scaled.to(dtype).reshape(ROWS, BLOCK_K)


@triton.jit
def fp8_codes(words, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the codes [ROWS, BLOCK_K] of a group unchanged, each 16 inputs in FP8_ORDER."""
    lower = tl.join(_byte(words, 0), _byte(words, 16))
    upper = tl.join(_byte(words, 8), _byte(words, 24))
    tile = tl.join(lower, upper).reshape(BLOCK_K // 32, ROWS // 16, 8, 4, 2, 2, 4)
    return tile.permute(1, 5, 2, 0, 4, 3, 6).reshape(ROWS, BLOCK_K)
