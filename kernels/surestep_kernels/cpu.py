"""The ops of a CPU: those in C, and references where C would not pay off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from surestep_common.errors import InvalidRequest
from torch import Tensor

from .add_adapters import AddAdapters
from .clamped_swiglu import ClampedSwiglu
from .columns.cpu.binding import Library
from .columns.cpu.build import build_library, file_of
from .columns.cpu.compiling import BuildError
from .dense_layer import DenseLayer, RunDenseLayers
from .dense_layer.cpu import PARTS
from .dense_layer.cpu import load as load_layers
from .linear import Linear
from .moe import Moe, moe_reference
from .table import REFERENCE, KernelSet, LatentOps, StepOps, column

logger = logging.getLogger(__name__)
MakeLayers = Callable[[Sequence[DenseLayer], Sequence[Tensor]], RunDenseLayers]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels(KernelSet):
    """The C kernels; dense layers of unmixed ops are one call."""

    one_call: MakeLayers
    own: Mapping[str, Any]  # the ops that the call is made of

    def dense_layers(
        self, layers: Sequence[DenseLayer], next_norms: Sequence[Tensor]
    ) -> RunDenseLayers:
        """Return one call, unless an op has been exchanged for another one."""
        if any(getattr(self, name) is not self.own[name] for name in PARTS):
            return KernelSet.dense_layers(self, layers, next_norms)
        return self.one_call(layers, next_norms)


def load_cpu(code: bytes = b"", *, allow_slow: bool = False) -> KernelSet:
    """Return the C kernels, from their `code`, prebuilt or compiled.

    Without any, return the references with `allow_slow`, or else raise InvalidRequest.
    """
    try:
        code = code or build_library()
        library = Library(file_of(code))
    except (BuildError, OSError) as error:
        if not allow_slow:
            raise InvalidRequest(
                f"no C kernels: {error}; --allow-slow serves without them, about 50 times slower",
                param="allow_slow",
            ) from error
        logger.warning("no C kernels, using the much slower torch references: %s", error)
        return REFERENCE
    library.set_num_threads(1)

    def load(module: ModuleType) -> Mapping[str, Any]:
        ops: Mapping[str, Any] = module.load(library)
        return ops

    ops = column(KernelSet, "cpu", load)
    return CpuKernels(
        **ops,
        name="C",
        one_call=load_layers(library),
        own=ops,
        set_num_threads=library.set_num_threads,
        moe=moe_of(ops["linear"], ops["silu_and_mul"], ops["clamped_swiglu"], ops["add_adapters"]),
        latent=LatentOps(**column(LatentOps, "cpu", load)),
        step=StepOps(**column(StepOps, "cpu", load), synchronous=True),
        code=code,
    )


def moe_of(
    linear: Linear,
    silu_and_mul: Callable[[Tensor], Tensor],
    clamped_swiglu: ClampedSwiglu,
    add_adapters: AddAdapters,
) -> Moe:
    """Return the reference, made of these ops."""
    return partial(
        moe_reference,
        linear=linear,
        silu_and_mul=silu_and_mul,
        clamped_swiglu=clamped_swiglu,
        add_adapters=add_adapters,
    )
