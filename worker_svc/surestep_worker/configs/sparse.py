"""Configuration of models with routed experts of three products each, shared ones beside them."""

from __future__ import annotations

from dataclasses import dataclass

from surestep_common.errors import InvalidRequest

from .model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRouting:
    """Routing to experts by sigmoid scores: see SigmoidChoice."""

    groups: int
    kept_groups: int
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Sizes of routed feed-forward layers."""

    num_experts: int
    top_k: int
    expert_size: int
    shared_expert_size: int
    normalize: bool  # the weights of the chosen experts sum to 1
    sigmoid: SigmoidRouting | None = None  # None: softmax, and the shared expert has a gate


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig(ModelConfig):
    """A decoder whose feed-forward layers are routed experts, or dense ones, or some of each."""

    moe: MoeConfig | None
    dense_layers: frozenset[int]  # layers of a model with experts that have none

    def sizes_to_share(self) -> dict[str, int]:
        """Return sizes that all ranks must share equally, by name."""
        return {"heads": self.num_heads}

    def check_ranks(self, size: int, *, expert_parallel: bool = False) -> None:
        """Raise InvalidRequest when the model does not divide among `size` ranks."""
        sizes, moe = self.sizes_to_share(), self.moe
        if moe is None or self.dense_layers:
            sizes["MLP columns"] = self.intermediate_size
        if moe is not None:
            sizes["columns of a shared expert"] = moe.shared_expert_size
        if moe is not None and expert_parallel:
            sizes["experts"] = moe.num_experts
        elif moe is not None:
            sizes["columns of an expert"] = moe.expert_size
        if size % self.num_kv_heads:  # else ranks share a head
            sizes["KV heads"] = self.num_kv_heads
        uneven = [f"{count} {name}" for name, count in sizes.items() if count % size]
        if uneven:
            raise InvalidRequest(
                f"tensor_parallel_size {size} does not divide {', '.join(uneven)}",
                param="tensor_parallel_size",
            )
