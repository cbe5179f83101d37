"""Parameters of a model that transformers computes, and the tensors that fill them."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from typing import Any

import torch
from surestep_common.errors import InvalidRequest

from surestep_worker.checkpoint.parameters import Parameter, Table, TensorSource
from surestep_worker.layers.embedding import embedding_of, head_of
from surestep_worker.layers.linear import Sharding, are_alike
from surestep_worker.layers.moe import local_experts

from .config import TransformersConfig
from .cuts import Cut, cut_bias, cut_weight
from .experts import expert_modules, projections_of
from .matrix import Use
from .mtp import head_table
from .names import OTHER_PARTS, CheckpointNames, Stored
from .plan import cuts_of, siblings_of
from .skeleton import Skeleton

EMBEDDING, HEAD = "embedding", "lm_head"  # as all models call them


def skeleton_of(config: TransformersConfig, dtype: torch.dtype) -> Skeleton:
    """Return the modules of a model, without weights."""
    return Skeleton(config.library, config.causal, dtype)


def own_names(skeleton: Skeleton) -> dict[str, str]:
    """Return by name of a parameter of the modules the one in the table.

    Parameters of experts are not among them.
    """
    experts = {f"{name}." for name in expert_modules(skeleton.model)}
    names = {n: n for n in skeleton.owners() if not n.startswith(tuple(experts))}
    model = skeleton.model
    embedding = _name_in(skeleton, model.get_input_embeddings())
    if embedding not in names:
        raise InvalidRequest("a model without an embedding of tokens is not served", param="model")
    names[embedding] = EMBEDDING
    head = model.get_output_embeddings()
    if head is None:
        raise InvalidRequest("a model without an output head is not served", param="model")
    if (name := _name_in(skeleton, head)) in names:
        names[name] = HEAD
    if skeleton.tied:
        names.pop(name, None)
    return names


def _name_in(skeleton: Skeleton, module: Any) -> str:
    return next(f"{n}.weight" for n, it in skeleton.model.named_modules() if it is module)


def parameter_table(
    config: TransformersConfig, shard: Sharding, names: Set[str], *, draft_head: bool
) -> Table:
    """Return which checkpoint tensors, of these names, fill which parameter of this rank."""
    skeleton, cuts = skeleton_of(config, torch.float32), cuts_of(config, shard.tp.size)
    stored = CheckpointNames(skeleton.model, names, of_text=config.of_text)
    table, owners = dict[str, Parameter](), skeleton.owners()
    for name, own in own_names(skeleton).items():
        shape, at = tuple(getattr(*owners[name]).shape), stored.of(name)
        kept, cut = _parameter(name, at, shape), cuts.get(name, Cut.WHOLE)
        weight = _weight_of(name, config)
        if own == EMBEDDING:
            kept = embedding_of(shard.vocabulary(at.names[0], *shape))
        elif own == HEAD:
            kept = head_of(shard.vocabulary(at.names[0], *shape))
        elif name in config.matrices:
            kept = _matrix(kept, config.matrices[name], cut, shard)
        elif weight in cuts:
            kept = cut_bias(kept, cuts[weight], shard)
        else:
            kept = cut_weight(kept, cut, shard)
        table[own] = kept
    for name, module in expert_modules(skeleton.model).items():
        table |= _experts(name, module, stored, shard)
    for group in siblings_of(config, cuts):
        if are_alike((stored.of(name).names[0].removesuffix(".weight") for name in group), names):
            _merge(table, [name.removesuffix(".weight") for name in group])
    return table | head_table(config, shard) if draft_head else table


def _weight_of(name: str, config: TransformersConfig) -> str:
    """Return the matrix whose products a bias is part of; empty: it is added by the module."""
    weight = name.removesuffix("bias") + "weight"
    use = config.matrices.get(weight)
    return weight if use is not None and not use.input_major else ""


def _merge(table: dict[str, Parameter], modules: Sequence[str]) -> None:
    """Put the weights of linear layers one below the other, under the name of the first."""
    for part in ("weight", "bias"):
        if f"{modules[0]}.{part}" not in table:
            continue
        each = [table.pop(f"{module}.{part}") for module in modules]
        rows = sum(parameter.shape[0] for parameter in each)
        sources = tuple(source for parameter in each for source in parameter.sources)
        whole = each[0]._replace(shape=(rows, *each[0].shape[1:]), sources=sources)
        table[f"{modules[0]}.{part}"] = whole


def _experts(
    name: str, module: Any, stored: CheckpointNames, shard: Sharding
) -> dict[str, Parameter]:
    table = {}
    for it in projections_of(module, shard):
        whole = f"{name}.{it.attribute}"
        for expert in local_experts(it.experts, shard):
            own = f"{name}.{expert}.{it.attribute}"
            table[f"{own}.weight"] = it.parameter(name, stored, expert)
            if it.bias:
                table[f"{own}.bias"] = it.bias_of(stored.of(f"{whole}_bias"), expert)
    return table


def _parameter(name: str, stored: Stored, shape: tuple[int, ...]) -> Parameter:
    if len(stored.names) != 1:
        raise InvalidRequest(f"{name} is stored in a form that is not served", param="model")
    keep = slice(0, shape[0] if shape else 1)
    return Parameter(shape, (TensorSource(stored.names[0], shape, keep),))


def _matrix(kept: Parameter, use: Use, cut: Cut, shard: Sharding) -> Parameter:
    """Return the parameter of a rank's part of a weight that is multiplied."""
    kept = kept._replace(linear=not use.wide)
    if use.input_major:
        source = kept.sources[0]
        keep = slice(0, source.shape[1])
        source = source._replace(keep=keep, dim=1, input_major=True)
        kept = kept._replace(sources=(source,))
    return cut_weight(kept, cut, shard, input_major=use.input_major)


def ignored(config: TransformersConfig, shard: Sharding, *, draft_head: bool) -> tuple[str, ...]:
    """Return regular expressions of checkpoint tensors that hold nothing of their own."""
    model = skeleton_of(config, torch.float32).model
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    tied = (getattr(model, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else ()
    kept = model.state_dict().keys()
    buffers = (name for name, _ in model.named_buffers() if name not in kept)
    elsewhere = {
        str(expert)
        for count, _ in config.expert_sizes
        for expert in {*range(count)} - {*local_experts(count, shard)}
    }
    others = (OTHER_PARTS,) if config.of_text else ()
    named = map(re.escape, (*tied, *buffers))
    experts = (rf".*\.experts\.(?:{'|'.join(elsewhere)})\..*",) if elsewhere else ()
    return (*others, *(f".*(?:{pattern}).*" for pattern in patterns), *named, *experts)
