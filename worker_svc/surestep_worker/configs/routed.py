"""Configuration of models whose feed-forward layers are experts with biases, as in gpt-oss."""

from __future__ import annotations

from dataclasses import dataclass

from surestep_common.errors import InvalidRequest
from surestep_kernels.linear import MXFP4_GROUP

from surestep_worker.checkpoint.mxfp4 import Mxfp4

from .model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedConfig(ModelConfig):
    """A decoder whose feed-forward layers are routed experts with biases, none of them shared.

    `intermediate_size` is that of an expert.
    """

    num_local_experts: int
    num_experts_per_tok: int
    swiglu_limit: float  # of clamped_swiglu

    @property
    def column_block(self) -> int:
        """Columns of an expert that stay on one rank, because they share a scale."""
        return MXFP4_GROUP if isinstance(self.quantization, Mxfp4) else 1

    def check_ranks(self, size: int, *, expert_parallel: bool = False) -> None:
        """Raise InvalidRequest when the model cannot be shared out among `size` ranks.

        Heads and experts are shared out evenly, the columns of an expert in blocks as evenly as
        they go.
        """
        sizes = {"heads": self.num_heads}
        if size % self.num_kv_heads:  # else ranks share a head
            sizes["KV heads"] = self.num_kv_heads
        if expert_parallel:
            sizes["experts"] = self.num_local_experts
        uneven = [f"{count} {name}" for name, count in sizes.items() if count % size]
        blocks = self.intermediate_size // self.column_block
        if not expert_parallel and blocks < size:
            uneven.append(f"an expert of {blocks} blocks of columns")
        if uneven:
            raise InvalidRequest(
                f"tensor_parallel_size {size} does not divide {', '.join(uneven)}",
                param="tensor_parallel_size",
            )
