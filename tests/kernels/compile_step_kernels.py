"""Compiles the kernels of a step for a GPU that need not be there; run as a program.

The interpreter accepts much that the compiler does not: variables that change their type in a loop,
for one. It replaces kernels where they are defined, hence a process of its own without it.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from surestep_kernels.gpu import (
    choose,
    commit_step,
    gather_step,
    gather_tokens,
    nucleus,
    shape_logits,
    write_runs,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

N, P, L, F = "i32", "*i32", "*i64", "*fp32"
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
]


def compile_kernel(kernel: Any, types: list[str], constants: dict[str, Any]) -> None:
    """Raises CompilationError."""
    names = kernel.arg_names
    rest = iter(types)
    signature = {name: "constexpr" if name in constants else next(rest) for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    triton.compile(ASTSource(kernel, signature=signature, constexprs=places), target=TARGET)


if __name__ == "__main__":
    for case in CASES:
        compile_kernel(*case)
        sys.stdout.write(f"{case[0].__name__}\n")
