"""The table finds the columns of every op, and all of them are called alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from surestep_kernels import KernelSet
from surestep_kernels.table import REFERENCE, LatentOps, StepOps, column

Ops = Mapping[str, Callable[..., Any]]
NOT_IN_C = {"pack_experts"}
# Those that compute one element at a time, and what is of use on CPUs alone.
NOT_IN_TRITON = {"pack_linear", "kv_cache_shape", "soft_cap", "digest_pages"}


def ops_of(kernels: KernelSet) -> Ops:
    found = {
        f"{type(table).__name__}.{field.name}": getattr(table, field.name)
        for table in (kernels, kernels.step, kernels.latent)
        for field in fields(table)
        if field.name not in ("set_num_threads", "one_call")
    }
    return {name: op for name, op in found.items() if callable(op)}


def in_triton() -> Ops:
    return {
        f"{table.__name__}.{name}": op
        for table in (KernelSet, StepOps, LatentOps)
        for name, op in column(table, "triton").items()
    }


def in_c(compiled: KernelSet) -> Ops:
    named = {name.replace("CpuKernels", "KernelSet"): op for name, op in ops_of(compiled).items()}
    references = ops_of(REFERENCE)
    return {name: op for name, op in named.items() if op is not references[name]}


def test_every_op_has_the_columns_that_it_should(compiled: KernelSet) -> None:
    ops = ops_of(REFERENCE)
    assert len(ops) > 25
    assert ops.keys() - in_c(compiled).keys() == {f"KernelSet.{name}" for name in NOT_IN_C}
    assert ops.keys() - in_triton().keys() == {f"KernelSet.{name}" for name in NOT_IN_TRITON}


def test_columns_are_called_as_the_reference_is(compiled: KernelSet) -> None:
    """With parameters of the same names, kinds and defaults, but for those it is made of."""
    references = ops_of(REFERENCE)
    for name, op in [*in_c(compiled).items(), *in_triton().items()]:
        own, taken = parameters(op), parameters(references[name])
        assert [key for key in own if own[key][1] is inspect.Parameter.empty] == [
            key for key in taken if taken[key][1] is inspect.Parameter.empty
        ], name
        shared = own.keys() & taken.keys()
        assert {key: own[key] for key in shared} == {key: taken[key] for key in shared}, name


def parameters(op: Callable[..., Any]) -> dict[str, tuple[object, object]]:
    found = inspect.signature(op).parameters.values()
    return {
        p.name: (p.kind, p.default)
        for p in found
        if not callable(p.default) or p.default is p.empty
    }
