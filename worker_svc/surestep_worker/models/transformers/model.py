"""A model whose forward pass is transformers' own code, as the runner sees it."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet, PackedLinear
from torch import Tensor, nn
from torch.nn import functional

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVSpec
from surestep_worker.checkpoint.kv_scales import take_kv_scales
from surestep_worker.checkpoint.parameters import CheckpointWeights
from surestep_worker.layers.context import LayerContext, StepBatch, output_bound
from surestep_worker.layers.draft_head import PREFIX, DraftHead
from surestep_worker.layers.embedding import Embedding, Vocabulary
from surestep_worker.layers.family import Family
from surestep_worker.layers.linear import take_linear

from .attention import BACKEND, PAGED, AttentionFacts, PagedLayer, Pass
from .config import CAUSAL, TransformersConfig
from .curves import VECTOR, WholeVectors
from .cuts import Cut, Heads, Joint, seen_shape
from .experts import EXPERTS, Experts, expert_modules
from .matrix import Matrix, Rows, Siblings, Use
from .modules import replace_counted_positions, replace_modules, replace_rotations
from .mtp import ARCHITECTURE, BEGINS, make_head
from .plan import Cuts, cuts_of, siblings_of
from .rehearsal import rehearse
from .skeleton import Skeleton
from .table import EMBEDDING, HEAD, ignored, own_names, parameter_table, skeleton_of

_LARGE = 1e6  # more than an element of a hidden state comes to that no norm bounds


class DecoderOutput:
    """Hidden states [1, N, H] and nothing else, as what a decoder returns."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class Decoded(nn.Module):
    """A decoder that has run: it returns hidden states [N, H] that are given to it."""

    @property
    def decoder(self) -> Decoded:
        """The decoder inside it, which some models call."""
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> DecoderOutput:
        """Return them."""
        return DecoderOutput(inputs_embeds)


class TransformersModel:
    """Model on a rank, see `models.loader.Model`. Call under torch.inference_mode."""

    has_head, capturable = True, False

    def __init__(self, context: LayerContext[TransformersConfig]) -> None:
        """Put every parameter of the model's table into its module."""
        self.config, self._kernels, self._now = context.config, context.kernels, Pass()
        self._num_kv_heads = context.shard.part(context.config.num_kv_heads).size
        self._max_len = len(context.rotary)
        on_cpu = context.kernels.step.synchronous and context.config.curves
        self._curves = WholeVectors if on_cpu else contextlib.nullcontext
        self.draft_head: DraftHead | None = None
        self.vocabulary = Vocabulary(context)
        table = self.vocabulary.embed.table
        skeleton = skeleton_of(context.config, table.dtype)
        _fill(skeleton, context, self.vocabulary.embed)
        bias = getattr(skeleton.model.get_output_embeddings(), "bias", None)
        skeleton.model.set_output_embeddings(_Head(self.vocabulary, bias))
        skeleton.refuse_empty()
        model = skeleton.model.to(table.device)
        replace_modules(model, len(context.rotary), context.kernels, table[0, :1])
        replace_rotations(model, context.kernels, table[0, :1])
        _attach(model, context, self._now)
        self._decoder, self._whole = skeleton.decoder, model
        replace_counted_positions(self._decoder, self._now)
        setattr(model, skeleton.decoder_name, Decoded())
        self._blocks, self._captured = _blocks(skeleton.decoder, context.config), list[Tensor]()
        self.hidden_bound = _bound(skeleton.decoder, context.config)
        if f"{PREFIX}norm_hidden" in context.weights:
            self.draft_head = make_head(context, self.vocabulary, skeleton.decoder.norm.factors)
        numbers = list(map(_number_of, self.config.keeping))
        self._kv_scales = take_kv_scales(context.weights, numbers, self.config.num_layers)
        self.weight_bytes = context.weights.nbytes
        self._tp = context.shard.tp

    def rehearse(self) -> None:
        """Raise InvalidRequest if a row's result depends on its company."""
        rehearse(self, self._decoder, self._kernels, self.config.vocab_size, self._max_len)

    def as_theirs(self, token_ids: Tensor) -> Tensor:
        """Logits f32[T, V] of a sequence i64[T], with the attention of transformers."""
        library = self._whole.config
        library._attn_implementation = "eager"
        try:
            with torch.inference_mode():
                positions = torch.arange(len(token_ids))[None]
                self._now.positions = positions[0]
                made = self._decoder(
                    input_ids=token_ids[None], position_ids=positions, use_cache=False
                )
                return self.shared_logits(made[0][0])
        finally:
            library._attn_implementation = BACKEND

    def kv_spec(self, block_size: int) -> KVSpec:
        """Return what this rank's KV cache must hold, in blocks of `block_size` tokens."""
        config, head = self.config, self.draft_head
        return KVSpec(
            windows=tuple(call.window for call in config.keeping),
            num_kv_heads=self._num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=self.vocabulary.dtype,
            kept_hidden=head.width if head is not None and head.reads_hidden else 0,
            draft_layers=head.kv_layers if head is not None else (),
            scales=self._kv_scales,
        )

    def recurrent_spec(self) -> None:
        """Return nothing: there are no recurrent layers."""

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Consume T tokens, advancing the caches; return the normed hidden states [T, H].

        What the draft head is going to read of them is kept beside their keys and values.
        """
        self._now.begin(batch, caches)
        self._captured = []
        head = self.draft_head
        wanted = head.captured_layers if head is not None else ()
        hooks = [self._capture(depth) for depth in wanted]
        try:
            with self._curves():
                made = self._decoder(
                    input_ids=batch.token_ids[None],
                    position_ids=batch.positions[None],
                    use_cache=False,
                )
        finally:
            for hook in hooks:
                hook.remove()
        x: Tensor = made[0][0]
        if head is not None:
            caches.kv.hidden[batch.groups[0].kv_slots] = head.keep(x, self._captured)
        return x

    def _capture(self, depth: int) -> Any:
        """Keep the residual stream after so many layers of the next pass."""
        if depth == 0:
            return self._blocks[0].register_forward_pre_hook(
                lambda block, args: self._captured.append(args[0][0].clone())
            )

        def keep(block: nn.Module, args: Any, made: Any) -> None:
            stream = made if isinstance(made, Tensor) else made[0]
            self._captured.append(stream[0].clone())

        return self._blocks[depth - 1].register_forward_hook(keep)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits f32[N, V] of [N, H] on rank 0, as the model scales and caps them."""
        with self._curves():
            made: Tensor = self._whole(inputs_embeds=hidden[None]).logits[0]
        return made[:, : self.config.vocab_size].float().contiguous()

    def shared_logits(self, hidden: Tensor) -> Tensor:
        """Return the same on every rank, where `logits` are rank 0's."""
        return self._tp.broadcast(self.logits(hidden))


def _attach(model: Any, context: LayerContext[TransformersConfig], now: Pass) -> None:
    """Give each module that attends a layer of the cache for each of its calls."""
    config, layers = context.config, defaultdict[str, list[PagedLayer]](list)
    shard, in_cache = context.shard, context.shard.part(config.num_kv_heads)
    places = {call.reads: place for place, call in enumerate(config.keeping)}
    for number, call in enumerate(config.attention):
        layers[call.module].append(
            PagedLayer(
                context.kernels,
                now,
                places[call.reads],
                call.reads == number,
                Heads(shard.tp, shard.part(call.num_heads), in_cache),
                config.head_dim,
                call.window,
                call.softcap,
            )
        )
    for name, calls in layers.items():
        setattr(model.get_submodule(name), PAGED, tuple(calls))


class _Head(nn.Module):
    """The output head. Its logits are filled up to whole vectors, see `curves`."""

    def __init__(self, vocabulary: Vocabulary, bias: Tensor | None) -> None:
        super().__init__()
        self._vocabulary, self._bias = vocabulary, bias
        self.weight = vocabulary.embed.table  # for its type and device

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits f32[1, N, V'] of [1, N, H]."""
        logits = self._vocabulary.logits(hidden[0].contiguous())
        if self._bias is not None:
            logits += self._bias
        missing = -logits.shape[1] % VECTOR
        return (functional.pad(logits, (0, missing)) if missing else logits)[None]


def _fill(
    skeleton: Skeleton, context: LayerContext[TransformersConfig], embedding: Embedding
) -> None:
    """Take all weights but those of the vocabulary, which has them already."""
    owners, matrices = skeleton.owners(), context.config.matrices
    names, cuts = own_names(skeleton), cuts_of(context.config, context.shard.tp.size)
    packed = {
        name.removesuffix("weight") + "bias"
        for name, use in matrices.items()
        if name.endswith(".weight") and names.get(name) == name and not use.input_major
    }
    dtype = embedding.table.dtype
    together = dict(_together(skeleton, context, cuts, dtype))
    for name, own in names.items():
        value, stored = None, getattr(*owners[name])
        if own == EMBEDDING:
            value = Rows.of(embedding, stored.shape)
        elif name in together:
            value = together[name]
        elif name in matrices and own != HEAD:
            value = _matrix(context, name, stored.shape, cuts.get(name, Cut.WHOLE), dtype)
        elif name not in packed and own != HEAD:
            value = context.weights.take(
                own, stored.dtype if stored.dtype is torch.float32 else None
            )
        skeleton.put(owners[name], value)
    for name, module in expert_modules(skeleton.model).items():
        experts = Experts(name, module, context)
        for part in module.modules():
            part._parameters.clear()
        setattr(module, EXPERTS, experts)


def _together(
    skeleton: Skeleton, context: LayerContext[TransformersConfig], cuts: Cuts, dtype: torch.dtype
) -> Iterator[tuple[str, Matrix]]:
    """Yield the weights that the table has in one with others."""
    owners, tp = skeleton.owners(), context.shard.tp
    for group in siblings_of(context.config, cuts):
        first, second = (name.removesuffix(".weight") for name in group[:2])
        if second in context.weights:
            continue
        packed = take_linear(context.weights, first, context.kernels)
        joint = Joint(cuts.get(group[0], Cut.WHOLE), tp)
        shapes = [tuple(getattr(*owners[name]).shape) for name in group]
        parts = 1 if joint.cut is Cut.WHOLE else tp.size
        sizes = [shape[0] // parts for shape in shapes]
        siblings = Siblings(packed, context.kernels, sizes, joint)
        for number, (name, shape) in enumerate(zip(group, shapes, strict=True)):
            seen = seen_shape(shape, joint.cut, tp.size)
            yield name, Matrix.among(siblings, number, seen, dtype)


def _matrix(
    context: LayerContext[TransformersConfig],
    name: str,
    shape: Sequence[int],
    cut: Cut,
    dtype: torch.dtype,
) -> Matrix:
    weights, kernels, use = context.weights, context.kernels, context.config.matrices[name]
    module, tp = name.removesuffix(".weight"), context.shard.tp
    if not (use.wide or use.input_major):
        packed = take_linear(weights, module, kernels)
    else:
        packed = weights.take_packed(name, lambda checkpoint: _pack(checkpoint, name, use, kernels))
    seen = seen_shape(shape, cut, tp.size, input_major=use.input_major)
    dtype = torch.float32 if use.wide else dtype
    return Matrix.of(packed, kernels, seen, dtype, use, Joint(cut, tp))


def _pack(checkpoint: CheckpointWeights, name: str, use: Use, kernels: KernelSet) -> PackedLinear:
    """Read a weight [K, N], or one that is multiplied in float32."""
    dtype = torch.float32 if use.wide else checkpoint.dtype
    at = name.removesuffix("weight") + "bias"
    bias = checkpoint.take(at, dtype) if use.wide and at in checkpoint else None
    weight = checkpoint.take(name, dtype) if use.wide else checkpoint.take_linear(name)
    if not isinstance(weight, Tensor):
        return kernels.pack_quantized(weight, bias)
    return kernels.pack_linear(weight.T if use.input_major else weight, bias)


def _number_of(call: AttentionFacts) -> int:
    """Return the layer that attends, by the number in its name; -1: there is none."""
    number = re.search(r"(?<=\.)\d+(?=\.)", call.module)
    return -1 if number is None else int(number[0])


def _blocks(decoder: nn.Module, config: TransformersConfig) -> Sequence[nn.Module]:
    """Return the layers of a decoder. Raises InvalidRequest where they are in no list."""
    lists = (it for it in decoder.modules() if isinstance(it, nn.ModuleList))
    found = next(([*it] for it in lists if len(it) == config.num_layers), None)
    if found is None:
        raise InvalidRequest(f"{config.architecture} has no list of its layers", param="model")
    return found


def _bound(decoder: nn.Module, config: TransformersConfig) -> float:
    """Return what no element of the last norm's output exceeds in magnitude."""
    vectors = [
        parameter
        for module in decoder.children()
        for parameter in (getattr(module, "factors", None), getattr(module, "weight", None))
        if isinstance(parameter, Tensor) and parameter.shape == (config.hidden_size,)
    ]
    return max((output_bound(vector) for vector in vectors), default=_LARGE)


TRANSFORMERS = Family(  # of all decoders that transformers has and none of ours serves
    architectures=tuple(CAUSAL),
    parse=TransformersConfig.parse,
    parameter_table=parameter_table,
    ignored=ignored,
    decoder=TransformersModel,
)
WITH_HEADS = replace(TRANSFORMERS, architectures=(ARCHITECTURE,), draft_head=BEGINS)
