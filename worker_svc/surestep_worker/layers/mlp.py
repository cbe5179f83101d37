"""The gated feed-forward layers of Llama-style decoders."""

from __future__ import annotations

from torch import Tensor

from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.configs.model_config import ModelConfig

from .context import LayerContext, Product
from .linear import Sharding, take_linear


def mlp_table(
    to: str, at: str, width: int, inner: int, shard: Sharding, *, bias: bool = False
) -> dict[str, Parameter]:
    """Parameters of the layer whose tensors begin with `at`."""
    part = shard.part(inner)
    gate_up = [(f"{at}gate_proj", part), (f"{at}up_proj", part)]
    return {
        **shard.columns(f"{to}gate_up", gate_up, width, bias=bias),
        **shard.rows(f"{to}down", f"{at}down_proj", width, part, bias=bias),
    }


class _Projections:
    """Both projections of a gated layer on this rank."""

    def __init__(self, to: str, context: LayerContext[ModelConfig]) -> None:
        self._ops = context.kernels
        self.gate_up = take_linear(context.weights, f"{to}gate_up", context.kernels)
        self.down = take_linear(context.weights, f"{to}down", context.kernels)


class GatedMlp(_Projections):
    """down(silu(gate(x)) * up(x)), this rank's share of the sum."""

    def __call__(self, x: Tensor) -> Product:
        """[T, H] -> [T, H], to be summed over the ranks."""
        return Product(self._ops.linear_silu_and_mul(x, self.gate_up), self.down)


class GeluMlp(_Projections):
    """down(gelu(gate(x)) * up(x)), this rank's share of the sum; gelu is approximated by tanh."""

    def __call__(self, x: Tensor) -> Product:
        """[T, H] -> [T, H], to be summed over the ranks."""
        return Product(self._ops.linear_gelu_and_mul(x, self.gate_up), self.down)
