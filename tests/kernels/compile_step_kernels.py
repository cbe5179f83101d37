"""Compiles the kernels of a step for a GPU that need not be there; run as a program.

A line for each kernel names it, and the matrix instructions it compiled to.

The interpreter accepts much that the compiler does not: variables that change their type in a loop,
for one. It replaces kernels where they are defined, hence a process of its own without it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import triton
from surestep_kernels.gpu import (
    choose,
    commit_step,
    gather_step,
    gather_tokens,
    linear,
    nucleus,
    plain_linear,
    shape_logits,
    splits,
    write_runs,
)
from surestep_kernels.gpu.splits import Tiles
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

N, P, L, F, H = "i32", "*i32", "*i64", "*fp32", "*bf16"
TARGET = GPUTarget("cuda", 90, 32)

# Each kernel, the types of its arguments, and the constants behind them.
CASES: list[tuple[Any, list[str], dict[str, Any]]] = [
    (write_runs._write_runs_kernel, [P, P, P, P, N], {"BLOCK": 1024}),
    (
        gather_step._rows_kernel,
        [*[P] * 15, L, P, P, N, N, N, N],
        {"BLOCK_K": 4, "BLOCK_B": 256},
    ),
    *(
        (
            gather_tokens._tokens_kernel,
            [P, P, L, *[P] * 5, L, L, L, *[N] * 5],
            {"SHIFT": shift, "BLOCK": 256},
        )
        for shift in (0, 1)
    ),
    (gather_step._lengths_kernel, [P, P, L, P, P, N], {"BLOCK": 256}),
    (commit_step._commit_kernel, [*[P] * 18, N, N, N], {"BLOCK": 4}),
    (choose._peak_kernel, [F, F, P, N, N, N], {"BLOCK": 1024}),
    (choose._collect_kernel, [F, P, F, P, N], {"BLOCK": 64}),
    *(
        (kernel, types, {name: on, "BLOCK": 64})
        for on in (False, True)
        for kernel, types, name in (
            (choose._draw_kernel, [F, F, P, P, F, P, P, P, F, P, N, N, N], "CUTS"),
            (choose._finish_kernel, [F, P, F, P, P, F, P, P, N], "DRAWS"),
        )
    ),
    (nucleus._limit_kernel, [F, F, P, F, F, P, F, P, N], {"BLOCK": 2048}),
    (shape_logits._bias_kernel, [F, P, P, P, P, F, P, N], {"BLOCK": 1024}),
    (shape_logits._count_kernel, [*[P] * 7, N, N], {"BLOCK": 1024}),
    (shape_logits._penalise_kernel, [F, P, P, P, F, F, F, N], {"BLOCK": 1024}),
    (shape_logits._forbid_kernel, [F, *[P] * 10, N, N], {}),
    *(
        (splits._sum_splits_kernel, [out, F, H, N, N, N], {"BLOCK": 512, "HAS_BIAS": True})
        for out in (F, H)
    ),
]
TILES = [  # out, x and weight, tiles
    *((out, H, plain_linear._FEW._replace(apart=False)) for out in (F, H)),
    (H, H, plain_linear._MANY),
    (F, H, plain_linear._FEW),
    (F, F, plain_linear._FP32),
]


def compile_plain_linear(out: str, x: str, tiles: Tiles) -> CompiledKernel:
    """See compile_kernel."""
    constants = {"bias_ptr": None, "HAS_BIAS": False, "APART": tiles.apart}
    sizes = {"BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns, "BLOCK_K": plain_linear._BLOCK_K}
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    types = [out, x, x, *[N] * 5]
    aligned = ("out_ptr", "x_ptr", "w_ptr", "N", "K")
    kernel = plain_linear._plain_linear_kernel
    return compile_kernel(kernel, types, constants | sizes, options, aligned)


def compile_quantized_linear(tiles: Tiles, *, int4: bool) -> CompiledKernel:
    """See compile_kernel."""
    group = 128
    constants: dict[str, Any] = {
        "bias_ptr": None, "HAS_BIAS": False, "APART": tiles.apart, "SPLITS": 3, "GROUP": group,
        "BLOCK_M": tiles.rows, "BLOCK_N": tiles.columns, "BLOCK_K": group, "INT4": int4,
        "NATIVE": True,
    }  # fmt: skip
    types = [H, H, "*u8", F]
    if int4:
        types.append("*u8")
    else:
        constants["zeros_ptr"] = None
    aligned = ("out_ptr", "x_ptr", "codes_ptr", "scales_ptr", "N", "K")
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    types += [N] * 5
    return compile_kernel(linear._linear_kernel, types, constants, options, aligned)


def compile_kernel(
    kernel: Any,
    types: list[str],
    constants: dict[str, Any],
    options: dict[str, int] | None = None,
    aligned: Sequence[str] = (),
) -> CompiledKernel:
    """Raises CompilationError. What is aligned is a multiple of 16."""
    names = kernel.arg_names
    rest = iter(types)
    signature = {name: "constexpr" if name in constants else next(rest) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=places, attrs=attrs)
    return triton.compile(source, target=TARGET, options=options)


def tell(kernel: CompiledKernel) -> None:
    """Write the line of a kernel."""
    instructions = set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\S*", kernel.asm["ptx"]))
    sys.stdout.write(" ".join((kernel.name, *sorted(instructions))) + "\n")


if __name__ == "__main__":
    for case in CASES:
        tell(compile_kernel(*case))
    for product in TILES:
        tell(compile_plain_linear(*product))
    for tiles in (linear._FEW, linear._MANY):
        for int4 in (False, True):
            tell(compile_quantized_linear(tiles, int4=int4))
