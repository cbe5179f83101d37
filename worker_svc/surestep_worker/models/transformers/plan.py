"""Plan of the cuts among ranks: transformers' own for a model, where its pass goes through.

A pass on the meta device tells whether shapes go together; that no module mixes the outputs which
a plan leaves apart is transformers' word.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from surestep_common.errors import InvalidRequest
from torch import nn

from .attention import AttentionFacts
from .config import TransformersConfig
from .cuts import Cut, divides, seen_shape
from .skeleton import Skeleton, trace

logger = logging.getLogger(__name__)

Cuts = Mapping[str, Cut]  # by name of a parameter; all others are whole

_STYLES = {
    "colwise": Cut.APART,
    "colwise_gather_output": Cut.GATHERED,
    "colwise_rep": Cut.GATHERED,
    "rowwise": Cut.SUMMED,
    "rowwise_split_input": Cut.SPLIT,
    "rowwise_rep": Cut.SPLIT,
}
_WITH_ALL_HEADS = {Cut.APART: Cut.GATHERED, Cut.SUMMED: Cut.SPLIT}
_NARROW = 8  # times as wide is the model: outputs that cost less to compute than to gather
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer


def cuts_of(config: TransformersConfig, size: int) -> Cuts:
    """Return the cuts among `size` ranks.

    A pass that does not go through with transformers' plan gets the outputs of all ranks, for
    attention or everywhere, and cannot tell how many ranks there are.
    """
    if size == 1:
        return {}
    skeleton = Skeleton(config.library, config.causal, torch.float32)
    head = skeleton.model.get_output_embeddings()  # whose rows are shared out as the vocabulary
    shapes = {
        name: tuple(getattr(*owner).shape)
        for name, owner in skeleton.owners().items()
        if owner.module is not head
    }
    gathered = {
        name: Cut.GATHERED for name, shape in shapes.items() if _is_tall(config, name, shape, size)
    }
    whole_heads = [it.module for it in config.attention if it.num_kv_heads % size]
    for modules in (whole_heads, [it.module for it in config.attention]):
        planned = _planned(config, skeleton.model.tp_plan, shapes, modules)
        if Cut.APART in planned.values() and _goes_through(config, gathered | planned, size):
            return gathered | planned
    logger.info("%s: the ranks gather the outputs of every matrix", config.architecture)
    return gathered


def siblings_of(config: TransformersConfig, cuts: Cuts) -> Iterator[list[str]]:
    """Yield names of weights that are multiplied together and cut in one way."""
    for group in config.siblings:
        for cut in dict.fromkeys(cuts.get(name, Cut.WHOLE) for name in group):
            alike = [name for name in group if cuts.get(name, Cut.WHOLE) is cut]
            if len(alike) > 1 and not cut.of_inputs:
                yield alike


def _is_tall(config: TransformersConfig, name: str, shape: tuple[int, ...], size: int) -> bool:
    """Return whether it pays to share out a matrix though its outputs are gathered."""
    use = config.matrices.get(name)
    if use is None:
        return False
    outputs = shape[int(use.input_major)]
    return outputs % size == 0 and outputs * _NARROW >= config.hidden_size


def _planned(
    config: TransformersConfig,
    plan: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    whole_heads: Sequence[str],
) -> dict[str, Cut]:
    """Return the cuts of a plan, with all heads in some modules."""
    cuts = dict[str, Cut]()
    for name, shape in shapes.items():
        pattern, use = _NUMBER.sub("*", name), config.matrices.get(name)
        style = plan.get(pattern) or plan.get(pattern.removesuffix(".weight"))
        if style not in _STYLES:
            continue
        cut = _STYLES[style]
        if name.startswith(tuple(f"{module}." for module in whole_heads)):
            cut = _WITH_ALL_HEADS.get(cut, cut)
        as_matrix = use is not None and not use.input_major
        if as_matrix or (len(shape) == 1 and cut is Cut.APART):
            cuts[name] = cut
    return cuts


def _goes_through(config: TransformersConfig, cuts: Cuts, size: int) -> bool:
    """Return whether a pass with the shapes of a rank gives what it does without ranks."""
    skeleton = Skeleton(config.library, config.causal, torch.float32)
    for name, owner in skeleton.owners().items():
        cut, use = cuts.get(name, Cut.WHOLE), config.matrices.get(name)
        shape, major = getattr(*owner).shape, use is not None and use.input_major
        if not divides(shape, cut, size, input_major=major):
            return False
        if cut is not Cut.WHOLE:
            empty = torch.empty(seen_shape(shape, cut, size, input_major=major), device="meta")
            skeleton.put(owner, nn.Parameter(empty, requires_grad=False))
    try:
        seen = trace(skeleton).attention
    except InvalidRequest as error:
        logger.debug("cut among %d ranks: %s", size, error.message)
        return False
    return len(seen) == len(config.attention) and all(
        _is_part(part, whole, size) for part, whole in zip(seen, config.attention, strict=True)
    )


def _is_part(part: AttentionFacts, whole: AttentionFacts, size: int) -> bool:
    """Return whether a module attends with all heads, or with those of a rank."""
    own = whole._replace(num_heads=whole.num_heads // size, num_kv_heads=whole.num_kv_heads // size)
    return part in (whole, own)
