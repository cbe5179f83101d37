"""A model of transformers without weights, and a trace of its forward pass: who attends to what."""

from __future__ import annotations

import contextlib
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from surestep_common.errors import InvalidRequest
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import initialization
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import BACKEND, AttentionFacts, attend, recording
from .curves import Recorded, align_activations
from .experts import run_experts
from .inline import attend_through_pages
from .matrix import Matrix, Use
from .modules import is_rotary, settle_rotary

_TRACED_TOKENS = 3
_ATTENTION = {"attention", "full_attention", "sliding_attention"}
_OF_VALUES = "Boolean value of Tensor", "meta tensor", "register_meta", "nonzero"

ALL_ATTENTION_FUNCTIONS.register(BACKEND, attend)
ALL_EXPERTS_FUNCTIONS.register(BACKEND, run_experts)
assert BACKEND not in ALL_MASK_ATTENTION_FUNCTIONS  # so that no masks are made


class Owner(NamedTuple):
    """Place of a parameter."""

    module: nn.Module
    attribute: str


class Skeleton:
    """Modules of a model, whose parameters are to be put in."""

    def __init__(self, config: Any, architecture: str, dtype: torch.dtype) -> None:
        """Build the modules for computing in `dtype`.

        Raises InvalidRequest, with transformers' own words, where it cannot build them.
        """
        kind = getattr(transformers, architecture)
        if keeps_state(kind, config):
            raise InvalidRequest(f"{architecture} keeps a state: not served", param="architecture")
        self.model: Any = _built(kind, config, dtype)
        align_activations(self.model)
        attend_through_pages(self.model)
        settle_rotary(self.model)
        self.decoder_name = next(
            (it for it in (kind.base_model_prefix, "model") if hasattr(self.model, it)), ""
        )
        if not self.decoder_name:
            raise InvalidRequest(f"{architecture} has no decoder of its own", param="model")
        self.decoder: Any = getattr(self.model, self.decoder_name)
        head = self.model.get_output_embeddings()
        if head is not None and type(head).forward is not nn.Linear.forward:
            name = type(head).__name__
            raise InvalidRequest(f"{name}, an output head, is not served", param="model")
        for module in (self.model, self.decoder):  # there is no padding to warn of
            module.warn_if_padding_and_no_attention_mask = _nothing

    @property
    def tied(self) -> bool:
        """Return whether the output head is the embedding."""
        asked = self.model.config.get_text_config(decoder=True).tie_word_embeddings
        return bool(asked and getattr(self.model, "_tied_weights_keys", None))

    def owners(self) -> dict[str, Owner]:
        """Return the place of all that a checkpoint holds, by name: buffers too, if they are kept.

        Parameters that are tied are there once.
        """
        buffers = {name for name, _ in self.model.named_buffers()} & self.model.state_dict().keys()
        names = [*(name for name, _ in self.model.named_parameters()), *sorted(buffers)]
        return {name: self._owner(name) for name in names}

    def _owner(self, name: str) -> Owner:
        module, _, attribute = name.rpartition(".")
        return Owner(self.model.get_submodule(module), attribute)

    def refuse_empty(self) -> None:
        """Raise InvalidRequest for what neither a checkpoint nor its module has filled."""
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        empty = next((name for name, value in named if value.is_meta), None)
        if empty is not None:
            raise InvalidRequest(f"{empty} is computed in a way that is not served", param="model")

    def put(self, owner: Owner, value: Tensor | None) -> None:
        """Put a tensor in the place of a parameter or buffer."""
        owner.module._parameters.pop(owner.attribute, None)
        owner.module._buffers.pop(owner.attribute, None)
        setattr(owner.module, owner.attribute, value)


def keeps_state(kind: Any, config: Any) -> bool:
    """Return whether a class keeps more of a sequence than keys and values, unless its
    configuration has attention alone."""
    types = {*(getattr(config, "layer_types", None) or ())}
    return bool(kind._is_stateful) and not (types and types <= _ATTENTION)


def _built(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """Return a model of a class of transformers, which attends by ours."""
    config._experts_implementation = BACKEND
    for name in (BACKEND, "eager"):  # classes that attend themselves know no other
        config._attn_implementation = name
        try:
            with _weightless(dtype):
                model = kind(config).eval()
        except Exception as error:
            if error.args != (BACKEND,):  # of a table of classes
                raise InvalidRequest(
                    f"transformers cannot build {kind.__name__}: {error}", param="model"
                ) from error
        else:
            break
    config._attn_implementation = BACKEND
    return model


def _nothing(*args: Any) -> None:
    """Do nothing."""


class Trace(NamedTuple):
    """Facts that a forward pass has shown."""

    attention: tuple[AttentionFacts, ...]  # in the order of calls
    uses: Mapping[str, Use]  # of weights by name
    curves: bool  # it computes some itself, see `curves`
    siblings: tuple[tuple[str, ...], ...]  # names of weights that one tensor is multiplied by


def trace(skeleton: Skeleton) -> Trace:
    """Run a pass on the meta device, where nothing is computed.

    Raises InvalidRequest, naming the reason, for a model whose pass needs what is not served.
    """
    uses, owners = {}, skeleton.owners()
    for name, owner in owners.items():
        parameter = getattr(owner.module, owner.attribute)
        kept = isinstance(owner.module, nn.Embedding) or not isinstance(parameter, nn.Parameter)
        if parameter.dim() == 2 and not kept:
            matrix = Matrix.traced(parameter)
            skeleton.put(owner, matrix)
            uses[name] = matrix.use
    ids = torch.zeros((1, _TRACED_TOKENS), dtype=torch.long, device="meta")
    positions = torch.arange(_TRACED_TOKENS, device="meta")[None]
    skeleton.model.to("meta")
    rotary = (it for it in skeleton.model.modules() if is_rotary(it))  # which ours replace
    with recording(skeleton.model) as calls, torch.no_grad(), Recorded(rotary) as curves:
        try:
            skeleton.model(input_ids=ids, position_ids=positions, use_cache=False)
        except InvalidRequest:
            raise
        except Exception as error:
            raise InvalidRequest(_told(error, skeleton.model), param="model") from error
    return Trace(tuple(calls), uses, curves.any, _siblings(owners, uses))


def _told(error: Exception, model: nn.Module) -> str:
    """Return the cause of an error in a pass over tensors without elements, and its module."""
    seen = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [it["self"] for it in seen if isinstance(it.get("self"), nn.Module)]
    name, text = type([model, *modules][-1]).__name__, " ".join(str(error).split())
    if "NoneType" in text and seen[-1].get("attention_mask", ...) is None:
        return f"{name} reads the mask of attention itself: not served"
    if any(word in text for word in _OF_VALUES):
        return f"{name} makes tensors whose shapes depend on values: not served"
    return f'{name} computes in a way that is not served, in the words of Python: "{text}"'


def _siblings(owners: Mapping[str, Owner], uses: Mapping[str, Use]) -> tuple[tuple[str, ...], ...]:
    """Return the linear layers of a module that all have the same input, and forget the inputs."""
    groups: dict[tuple[str, int, bool], list[str]] = defaultdict(list)
    for name, owner in owners.items():
        use = uses.get(name)
        if use is None or type(owner.module) is not nn.Linear:
            continue
        once = len(use.inputs) == 1 and not (use.otherwise or use.wide)
        if once:
            parent = name.rsplit(".", 2)[0]
            key = parent, id(use.inputs[0]), owner.module.bias is not None
            groups[key].append(name)
    for use in uses.values():
        use.inputs.clear()
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


@contextlib.contextmanager
def _weightless(dtype: torch.dtype) -> Iterator[None]:
    """Give parameters that are made here no memory; buffers, which a module computes, have it."""
    name = "register_parameter"
    register, usual = getattr(nn.Module, name), torch.get_default_dtype()

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(module, name, param)

    setattr(nn.Module, name, on_meta)
    torch.set_default_dtype(dtype)
    try:
        with initialization.no_init_weights(), _EmptyOnMeta():
            yield
    finally:
        torch.set_default_dtype(usual)
        setattr(nn.Module, name, register)


class _EmptyOnMeta(TorchFunctionMode):
    """Weights are made by torch.empty, and buffers, which are computed, are not."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
