"""Sizes of the layers that models are made of, and configurations of models that have them."""

from __future__ import annotations

from dataclasses import dataclass

from surestep_common.errors import InvalidRequest
from surestep_kernels.linear import MXFP4_GROUP

from surestep_worker.checkpoint.formats import Mxfp4Blocks

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
    shared_expert_size: int  # 0: there is none
    normalize: bool  # the weights of the chosen experts sum to 1
    sigmoid: SigmoidRouting | None = None  # None: softmax, and the shared expert has a gate
    # Names of an expert's gate, up and down in checkpoints that keep each expert by itself.
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


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
        return MXFP4_GROUP if isinstance(self.quantization, Mxfp4Blocks) else 1

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Sizes of latent attention: MLA of DeepSeek-V2."""

    q_rank: int | None  # of queries; None: they are projected at once
    rank: int  # of the latent that stands for keys and values
    nope_dim: int  # of a head's query and key, not rotated
    rope_dim: int  # and rotated
    v_dim: int
    interleaved: bool  # pairs are rotated, not halves
    scale: float  # of scores


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Indexer that chooses the positions a token attends to: DSA of DeepSeek-V3.2."""

    heads: int
    dim: int
    top_k: int
    interleaved: bool
    full: tuple[bool, ...]  # by layer: it has an indexer; others take the choice of the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentModelConfig(SparseConfig):
    """A decoder with routed experts whose attention may be latent."""

    latent: LatentConfig | None
    indexer: IndexerConfig | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Sizes of the gated delta rule layers."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    taps: int  # of the convolution

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaModelConfig(SparseConfig):
    """A decoder with routed experts, some of whose layers follow the gated delta rule."""

    delta: DeltaConfig
    grouped_projection: bool = False  # q, k, v and z of the delta rule lie together per key head
