"""Configuration of EAGLE-3 draft heads, in the forms that SafeAILab, SpecForge, ModelOpt and
speculators publish them in.

They differ in where the layer that drafts is described, and in what they mean by the number of a
layer of the model: `captured_layers` counts those that stand before the stream that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from surestep_common.errors import InvalidRequest

from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.model_config import (
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    SLIDING_ATTENTION,
    ModelConfig,
    architecture_of,
)
from surestep_worker.models.llama.config import LlamaConfig

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_TRT_LAYER_IDS = "eagle3_layers_to_capture"  # of TensorRT-LLM
_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "LlamaForCausalLM",
    "Eagle3LlamaForCausalLM": "LlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM": "Qwen3ForCausalLM",
    "Qwen3ForCausalLMEagle3": "Qwen3ForCausalLM",
    "PEagleDraftModel": "LlamaForCausalLM",
    "PeagleLlamaForCausalLM": "LlamaForCausalLM",
    "PeagleQwen3ForCausalLM": "Qwen3ForCausalLM",
}
_MASK_IDS = ("mask_token_id", "pard_token", "ptd_token_id")  # names of it
_LAYER_KINDS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # of speculators
_MAX_SCALE = 1e6


class CapturedLayers(NamedTuple):
    """After how many of the model's layers its residual stream is read, ascending."""

    chosen: tuple[int, ...]
    said_by: str  # where the choice comes from
    other: tuple[int, ...] | None = None  # by the other reading of the same numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """A head for one model."""

    decoder: LlamaConfig  # of its layers, its norms and its own embedding
    draft_vocab_size: int  # tokens that it can draft
    captured: CapturedLayers
    norm_before_fc: bool  # one norm over all captured states together
    fc_norm: bool  # or one for each of them
    norm_before_residual: bool  # the first layer adds to what `hidden_norm` puts out
    norm_output: bool  # further drafts are made of the normed output
    logit_scale: float
    mask_id: int | None  # token in the place of unknown ones, of a head that drafts all at once

    @classmethod
    def parse(
        cls, files: ConfigFiles, model: ModelConfig, layer_ids: Sequence[int] | None = None
    ) -> Eagle3Config:
        """Read a head's config.json; `layer_ids` count layers before what is read of the model.

        Raises InvalidRequest naming what is missing, unknown, out of bounds, not served, or of
        another model.
        """
        whole = Fields(files.config)
        nested = whole.object("eagle_config")
        is_speculators = "transformer_layer_config" in whole
        layer = whole.object("transformer_layer_config") if is_speculators else whole
        decoder = LlamaConfig.parse(ConfigFiles(_as_decoder(files, layer, model), {}))
        refuse_other_models(whole, decoder, model)
        _refuse_unserved(whole, nested)

        def flag(key: str, *, default: bool = False) -> bool:
            return whole.flag(key, default=nested.flag(key, default=default))

        return cls(
            decoder=decoder,
            draft_vocab_size=whole.size(
                "draft_vocab_size", MAX_VOCAB, default=layer.size("vocab_size", MAX_VOCAB)
            ),
            captured=read_captured(whole, nested, model.num_layers, layer_ids),
            norm_before_fc=flag("norm_before_fc"),
            fc_norm=flag("fc_norm"),
            norm_before_residual=flag("norm_before_residual", default=is_speculators),
            norm_output=flag("norm_output"),
            logit_scale=whole.number("logit_scale", _MAX_SCALE, default=1.0),
            mask_id=_mask_id(whole, nested, model.vocab_size),
        )

    @property
    def hidden_size(self) -> int:
        """Width of the head."""
        return self.decoder.hidden_size

    def check_drafts(self, most: int) -> None:
        """Pass: the head is used again for any number of drafts of a window."""


def read_captured(
    whole: Fields, nested: Fields, num_layers: int, asked: Sequence[int] | None
) -> CapturedLayers:
    """Choose what is read of a model of so many layers.

    Top-level numbers, as those of speculators, count layers before what is read; nested ones and
    TensorRT-LLM's name the layer whose output is read, unless that one does not exist. Raises
    InvalidRequest for numbers that mean no layer under either reading.
    """
    if asked is not None:
        return CapturedLayers(checked_layers(asked, num_layers), "as asked")
    if _LAYER_IDS in whole:
        given, after = whole.sizes(_LAYER_IDS, MAX_LAYERS), 0
    elif _LAYER_IDS in nested:
        given, after = nested.sizes(_LAYER_IDS, MAX_LAYERS), 1
    elif _TRT_LAYER_IDS in whole:
        given, after = whole.sizes(_TRT_LAYER_IDS, MAX_LAYERS), 1
    else:
        default = 2, num_layers // 2, num_layers - 3
        return CapturedLayers(checked_layers(default, num_layers), "EAGLE-3's default")
    as_they_are, next_ones = tuple(given), tuple(i + 1 for i in given)
    if num_layers in given:
        return CapturedLayers(checked_layers(as_they_are, num_layers), "config.json")
    first, other = (next_ones, as_they_are) if after else (as_they_are, next_ones)
    return CapturedLayers(
        checked_layers(first, num_layers), "config.json", checked_layers(other, num_layers)
    )


def checked_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """In ascending order."""
    ordered = tuple(sorted(set(layers)))
    if (
        not ordered
        or len(ordered) != len(layers)
        or not 0 <= ordered[0] <= ordered[-1] <= num_layers
    ):
        raise InvalidRequest(
            f"it cannot read a model of {num_layers} layers after layers {list(layers)}, which "
            "its config.json or the command line names",
            param="speculative_config",
        )
    return ordered


def _mask_id(whole: Fields, nested: Fields, vocab_size: int) -> int | None:
    """Read the mask token of P-EAGLE; None for a head that drafts one token after the other."""
    named = whole.text("speculators_model_type", ""), *whole.texts("architectures")
    says_so = any(name.lower().startswith("peagle") for name in named)
    says_so = nested.flag("parallel_drafting", default=says_so)
    if not whole.flag("parallel_drafting", default=says_so):
        return None
    key = next((key for key in _MASK_IDS if key in whole), _MASK_IDS[0])
    return whole.size(key, vocab_size - 1, least=0)


def _as_decoder(files: ConfigFiles, layer: Fields, model: ModelConfig) -> dict[str, object]:
    """The description of the head's layers, as a decoder's config.json."""
    raw = dict(files.config)
    if "transformer_layer_config" in Fields(raw):
        raw = {"quantization_config": raw.get("quantization_config")}
        raw |= files.config["transformer_layer_config"]
        kind = layer.text("model_type", "llama")
        named = _LAYER_KINDS.get(kind, kind)
    else:
        architecture = architecture_of(files.config)
        named = _ARCHITECTURES.get(architecture, architecture)
    layers = layer.size("num_hidden_layers", MAX_LAYERS, default=1)
    kinds = layer.texts("layer_types")[:layers]
    return {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": model.rms_norm_eps,
        **{key: value for key, value in raw.items() if value is not None},
        "architectures": [named],
        "num_hidden_layers": layers,
        # As `layer_types` say, whatever the switch of the model's own family says; where they are
        # those of the model, the first ones count.
        "layer_types": list(kinds),
        "use_sliding_window": SLIDING_ATTENTION in kinds,
    }


def refuse_other_models(whole: Fields, decoder: LlamaConfig, model: ModelConfig) -> None:
    """Raise InvalidRequest for a head that was made for a model of another shape."""
    width = whole.size("target_hidden_size", MAX_WIDTH, default=decoder.hidden_size)
    if width != model.hidden_size:
        raise InvalidRequest(
            f"it reads hidden states of {width} elements, those of the model have "
            f"{model.hidden_size}",
            param="speculative_config",
        )
    if decoder.vocab_size != model.vocab_size:
        raise InvalidRequest(
            f"it is for a vocabulary of {decoder.vocab_size} tokens, that of the model has "
            f"{model.vocab_size}",
            param="speculative_config",
        )


def _refuse_unserved(whole: Fields, nested: Fields) -> None:
    """Raise InvalidRequest for variants that are not served, by name."""
    if not nested.flag("use_aux_hidden_state", default=True):
        raise InvalidRequest(
            "use_aux_hidden_state false, a head that reads the last hidden state alone, is not "
            "served",
            param="speculative_config",
        )
    for fields in (whole, nested):
        if fields.size("parallel_draft_step", MAX_LAYERS, default=1) > 1:
            message = "parallel_draft_step, a head for each draft, is not served"
            raise InvalidRequest(message, param="speculative_config")
