"""The one decoder: what differs between models is in their configurations and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from surestep_worker.adapters.kernels import plain_kernels
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVSpec
from surestep_worker.cache.recurrent import RecurrentSpec
from surestep_worker.checkpoint.kv_scales import take_kv_scales
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    LATENT_ATTENTION,
    LINEAR_ATTENTION,
    PAGED,
    SLIDING_ATTENTION,
    ModelConfig,
)

from .attention import Attention, sliding_attention
from .context import LayerContext, Residual, StepBatch, output_bound, take_norm
from .decoder_layer import BranchLayer, DecoderLayer, LayerStack, Mixer
from .draft_head import PREFIX, DraftHead, MtpHead
from .embedding import Vocabulary
from .family import MakeFeedForward
from .gated_delta_net import GatedDeltaNet
from .latent_attention import LatentAttention
from .rotary import unrotated

# By type of layer; each takes the beginning of its parameters' names and its layer of the cache.
MIXERS: Mapping[str, Callable[[str, LayerContext[Any], int], Mixer]] = {
    FULL_ATTENTION: Attention,
    SLIDING_ATTENTION: sliding_attention,
    LINEAR_ATTENTION: GatedDeltaNet,
    LATENT_ATTENTION: LatentAttention,
}


class Decoder:
    """The part of a decoder that one rank holds. Call under torch.inference_mode."""

    capturable = True

    def __init__(self, context: LayerContext[Any], feed_forward: MakeFeedForward[Any]) -> None:
        """Take every parameter of the model's table from the context's weights."""
        config: ModelConfig = context.config
        self.config = config
        self._tp, self._kernels = context.shard.tp, context.kernels
        self.vocabulary = Vocabulary(context)
        around = context, context._replace(rotary=unrotated(context.rotary))
        which = [around[i in config.unrotated_layers] for i in range(config.num_layers)]
        layers = [
            _layer(f"{i}.", which[i], kind, feed_forward, cache_layer=_cache_layer(config, i))
            for i, kind in enumerate(config.layer_types)
        ]
        norm = take_norm(context, "norm")
        self._layers = LayerStack(context, layers, norm)
        self.hidden_bound = output_bound(norm)
        self.has_head = self.vocabulary.has_head
        paged = [i for i, kind in enumerate(config.layer_types) if kind in PAGED]
        self._windows = [config.window_of(config.layer_types[i]) for i in paged]
        self._kv_scales = take_kv_scales(context.weights, paged, config.num_layers)
        self.draft_head: DraftHead | None = None
        self._inner_draft_layers = 0
        if PREFIX + "norm" in context.weights:
            at, kind = len(self._windows), config.draft_layer_type
            context = context._replace(kernels=plain_kernels(context.kernels))
            layer = _layer(PREFIX, context, kind, feed_forward, cache_layer=at)
            self.draft_head = MtpHead(context, layer, self.vocabulary)
            self._windows.append(config.window_of(kind))
            self._inner_draft_layers = 1
        self.weight_bytes = context.weights.nbytes

    def rehearse(self) -> None:
        """Do nothing: every op is tested to give a row the same in any company."""

    def kv_spec(self, block_size: int) -> KVSpec:
        """Return what this rank's KV cache must hold, in blocks of `block_size` tokens."""
        config, head = self.config, self.draft_head
        return KVSpec(
            windows=tuple(self._windows),
            num_kv_heads=max(1, config.num_kv_heads // self._tp.size),
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=self.vocabulary.dtype,
            kept_hidden=head.width if head is not None and head.reads_hidden else 0,
            draft_layers=head.kv_layers if head is not None else (),
            latents=config.latent_widths(len(self._windows)),
            inner_draft_layers=self._inner_draft_layers,
            scales=self._kv_scales,
        )

    def recurrent_spec(self) -> RecurrentSpec | None:
        """Return what this rank's recurrent cache must hold; None without recurrent layers."""
        return self.config.recurrent_spec(self.vocabulary.dtype, self._tp.size)

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Consume T tokens, advancing the caches; return the normed hidden states [T, H].

        What the draft head is going to read of them is kept beside their keys and values.
        """
        head, captured = self.draft_head, list[Tensor]()
        wanted = head.captured_layers if head is not None else ()
        hidden = self.vocabulary.embed(batch.token_ids)
        residual = Residual(hidden, self._kernels, self._tp, self.config.rms_norm_eps)
        x, done = residual.normed(self._layers.input_norm), 0
        for depth in wanted:
            x = self._layers(x, residual, batch, caches, range(done, depth))
            captured.append(residual.hidden.clone())
            done = depth
        x = self._layers(x, residual, batch, caches, range(done, len(self._layers)))
        if head is not None:
            caches.kv.hidden[batch.groups[0].kv_slots] = head.keep(x, captured)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H], over the whole vocabulary on every rank."""
        return self.vocabulary.logits(hidden)


def _cache_layer(config: ModelConfig, layer: int) -> int:
    """Layers before this one whose memory is in the same cache."""
    paged = config.layer_types[layer] in PAGED
    return sum((kind in PAGED) == paged for kind in config.layer_types[:layer])


def _layer(
    to: str,
    context: LayerContext[Any],
    kind: str,
    feed_forward: MakeFeedForward[Any],
    *,
    cache_layer: int,
) -> DecoderLayer:
    config: ModelConfig = context.config
    changed = config.branch_norms or config.branch_scale != 1.0
    make = BranchLayer if changed else DecoderLayer
    mixer = MIXERS[kind](f"{to}mixer.", context, cache_layer)
    return make(to, context, mixer, feed_forward(f"{to}mlp.", context))
