"""The MTP head of Ernie 4.5, a dense layer that our own code computes.

It reads what the model's last norm reads, and its output goes through that norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from surestep_worker.adapters.kernels import plain_kernels
from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.checkpoint.parameters import Parameter
from surestep_worker.configs.model_config import MtpTraits, refuse_deep_heads
from surestep_worker.layers.attention import Attention
from surestep_worker.layers.context import LayerContext
from surestep_worker.layers.decoder_layer import DecoderLayer
from surestep_worker.layers.draft_head import PREFIX, MtpHead, draft_cache
from surestep_worker.layers.embedding import Vocabulary
from surestep_worker.layers.linear import Sharding, ShardSlice
from surestep_worker.layers.mlp import GatedMlp
from surestep_worker.layers.rotary import rotary_table
from surestep_worker.models.llama.config import LlamaConfig
from surestep_worker.models.llama.table import layer_table

from .config import TransformersConfig

BEGINS = "model.mtp_"  # begins the names of its tensors
ARCHITECTURE = "Ernie4_5_MoeForCausalLM"
_LAYER = f"{BEGINS}block.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(LlamaConfig):
    """Architecture of the head's layer, and the sizes of the model around it."""

    @property
    def mtp(self) -> MtpTraits:
        """Traits of an MTP head."""
        return MtpTraits(before_norm=True)


def _config(config: TransformersConfig) -> LlamaConfig:
    """Return the head as a model of such layers. Raises InvalidRequest for one of several."""
    library = config.library
    fields = {**library.to_dict(), "architectures": ["LlamaForCausalLM"]}
    fields |= {"attention_bias": library.use_bias, "mlp_bias": library.use_bias}
    refuse_deep_heads(Fields(fields), "num_nextn_predict_layers")
    parsed = HeadConfig.parse(ConfigFiles(fields, {}))
    return replace(parsed, quantization=config.quantization)


def head_table(config: TransformersConfig, shard: Sharding) -> dict[str, Parameter]:
    """Return which checkpoint tensors fill which parameter of the head on this rank."""
    own, width = _config(config), config.hidden_size
    dim, whole = own.head_dim, ShardSlice(width, slice(0, width))
    heads, kv = shard.part(own.num_heads, dim), shard.part(own.num_kv_heads, dim)
    projections = [
        *_halves(f"{_LAYER}self_attn.q_proj", heads, dim),
        *_halves(f"{_LAYER}self_attn.k_proj", kv, dim),
        (f"{_LAYER}self_attn.v_proj", kv),
    ]
    return {
        **layer_table(PREFIX, _LAYER, own, shard),
        **shard.columns(f"{PREFIX}mixer.qkv", projections, width, bias=own.qkv_bias),
        **shard.columns(
            f"{PREFIX}fc", [(f"{BEGINS}linear_proj.0", whole)], 2 * width, bias=own.o_bias
        ),
        f"{PREFIX}norm_embedding": shard.whole(f"{BEGINS}emb_norm.0.weight", width),
        f"{PREFIX}norm_hidden": shard.whole(f"{BEGINS}hidden_norm.0.weight", width),
    }


def _halves(name: str, part: ShardSlice, dim: int) -> Iterator[tuple[str, ShardSlice]]:
    """Yield the rows of heads: pairs that are rotated become elements of two halves."""
    for first in range(part.keep.start, part.keep.stop, dim):
        for row in (*range(first, first + dim, 2), *range(first + 1, first + dim, 2)):
            yield name, ShardSlice(part.total, slice(row, row + 1))


def make_head(
    context: LayerContext[TransformersConfig], vocabulary: Vocabulary, norm: Tensor
) -> MtpHead:
    """Take the head's parameters from the weights; `norm` f32[H] is that of the model."""
    config, first = _config(context.config), len(context.config.keeping)
    length, device = len(context.rotary), str(context.rotary.device)
    rotary = rotary_table(config.rope, config.rotary_dim, length, device)
    kernels = plain_kernels(context.kernels)
    own = LayerContext(config, context.weights, context.shard, kernels, rotary)
    mixer = Attention(f"{PREFIX}mixer.", own, first)
    layer = DecoderLayer(PREFIX, own, mixer, GatedMlp(f"{PREFIX}mlp.", own))
    head = MtpHead(own, layer, vocabulary, norm)
    head.kv_layers = draft_cache(own)[:1]
    return head
