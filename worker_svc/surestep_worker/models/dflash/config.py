"""Configuration of DFlash drafters, as their authors and speculators publish them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surestep_common.errors import InvalidRequest

from surestep_worker.checkpoint.json_fields import Fields
from surestep_worker.checkpoint.model_folder import ConfigFiles
from surestep_worker.configs.model_config import (
    FULL_ATTENTION,
    MAX_LAYERS,
    MAX_VOCAB,
    SLIDING_ATTENTION,
    ModelConfig,
    architecture_of,
)
from surestep_worker.configs.rope import MAX_POSITION
from surestep_worker.models.eagle3.config import (
    CapturedLayers,
    checked_layers,
    refuse_other_models,
)
from surestep_worker.models.llama.config import LlamaConfig

_ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")
_LAYERS_AFTER = "aux_hidden_state_layer_ids"  # of speculators: so many layers stand before
_LAYERS = "target_layer_ids"  # whose output is read
# Of the kin: DFlash2's dynamic convolutions and selectors, DSpark's Markov heads, Domino's GRU.
_KIN = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "markov_rank",
    "gru_hidden_dim",
    "output_multiplier",
    "final_logit_softcapping",
)
# What an option says that changes nothing. Another value is not served.
_USUAL: Mapping[str, tuple[Any, ...]] = {
    "projector_type": ("dflash",),
    "attention_mode": ("gqa", "mha"),
    "draft_ffn_type": ("dense",),
    "sample_from_anchor": (False,),
    "shift_label": (False,),
    "pure_draft_prefix_len": (1,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "use_aux_hidden_state": (True,),
}
_WINDOWS = "swa_window_size", "sliding_window"  # the first that is said counts
_MOST_BLOCK = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """A drafter for one model."""

    decoder: LlamaConfig  # of its layers and its norms
    draft_vocab_size: int  # tokens that it can draft
    captured: CapturedLayers
    mask_id: int  # row of the model's embedding that stands for a token to be drafted
    block_size: int  # positions that it was trained to see together, the newest token's included
    causal: tuple[bool, ...]  # by layer: rows of a block see none behind them

    @classmethod
    def parse(
        cls, files: ConfigFiles, model: ModelConfig, layer_ids: Sequence[int] | None = None
    ) -> DFlashConfig:
        """Read a drafter's config.json; `layer_ids` count layers before what is read of the model.

        Raises InvalidRequest naming what is missing, unknown, out of bounds, not served, or of
        another model.
        """
        whole = Fields(files.config)
        about = whole.object("dflash_config").or_else(whole)
        is_speculators = "transformer_layer_config" in whole
        layer = whole.object("transformer_layer_config") if is_speculators else whole
        _refuse_unserved(files, about)
        decoder = LlamaConfig.parse(ConfigFiles(_as_decoder(files, layer, about, model), {}))
        refuse_other_models(whole, decoder, model)
        if decoder.hidden_size != model.hidden_size:
            raise _refused(f"it is {decoder.hidden_size} wide, the model {model.hidden_size}")
        return cls(
            decoder=decoder,
            draft_vocab_size=whole.size("draft_vocab_size", MAX_VOCAB, default=model.vocab_size),
            captured=_captured(whole, about, decoder.num_layers, model.num_layers, layer_ids),
            mask_id=about.size("mask_token_id", model.vocab_size - 1, least=0),
            block_size=about.size("block_size", _MOST_BLOCK, least=2),
            causal=_causal(whole, about, decoder),
        )

    def check_drafts(self, most: int) -> None:
        """Raise InvalidRequest for windows with more drafts than a block has."""
        if most >= self.block_size:
            raise _refused(
                f"num_speculative_tokens {most}: its blocks of {self.block_size} hold "
                f"{self.block_size - 1} drafts"
            )


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="speculative_config")


def _captured(
    whole: Fields,
    about: Fields,
    draft_layers: int,
    num_layers: int,
    asked: Sequence[int] | None,
) -> CapturedLayers:
    """Choose what is read of a model of so many layers; without a word, evenly spread outputs."""
    if whole.size("num_target_layers", MAX_LAYERS, default=num_layers) != num_layers:
        raise _refused(f"it is for another model than one of {num_layers} layers")
    if asked is not None:
        return CapturedLayers(checked_layers(asked, num_layers), "as asked")
    if _LAYERS_AFTER in about:
        after, said_by = about.sizes(_LAYERS_AFTER, MAX_LAYERS), "config.json"
    elif _LAYERS in about:
        after, said_by = tuple(i + 1 for i in about.sizes(_LAYERS, MAX_LAYERS)), "config.json"
    else:
        after, said_by = _spread(draft_layers, num_layers), "DFlash's default"
    if list(after) != sorted(after):
        raise _refused(f"it reads layers out of order: {list(after)}")
    return CapturedLayers(checked_layers(after, num_layers), said_by)


def _spread(count: int, num_layers: int) -> tuple[int, ...]:
    """Return behind which layers of a model a drafter with so many reads: from the second to the
    last but two."""
    if count == 1:
        return (num_layers // 2 + 1,)
    span = num_layers - 4
    return tuple(round(1 + i * span / (count - 1)) + 1 for i in range(count))


def _causal(whole: Fields, about: Fields, decoder: LlamaConfig) -> tuple[bool, ...]:
    """Read which layers see no rows behind a row's own; those with a window, unless it is said."""
    ahead = whole.flag("sliding_window_non_causal", default=False)
    slides = [kind == SLIDING_ATTENTION and not ahead for kind in decoder.layer_types]
    said = about.flag("causal", default=False) if "causal" in about else None
    if "is_causal" in whole:
        said = whole.flag("is_causal")
    return tuple(slides) if said is None else (said,) * len(slides)


def _as_decoder(
    files: ConfigFiles, layer: Fields, about: Fields, model: ModelConfig
) -> dict[str, Any]:
    """The description of the drafter's layers, as a decoder's config.json."""
    raw = files.config
    if "transformer_layer_config" in raw:
        quantization = raw.get("quantization_config")
        raw = {**raw["transformer_layer_config"], "quantization_config": quantization}
    count = layer.size("num_hidden_layers", MAX_LAYERS)
    kinds = list(layer.texts("layer_types")[:count]) or [FULL_ATTENTION] * count
    if about.flag("use_swa", default=False) and SLIDING_ATTENTION not in kinds:
        kinds = [SLIDING_ATTENTION] * count
    changed: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "layer_types": kinds,
        "use_sliding_window": SLIDING_ATTENTION in kinds,
        "is_causal": True,
    }
    said = next((key for key in _WINDOWS if key in about), None)
    if said is not None and SLIDING_ATTENTION in kinds:
        changed["sliding_window"] = about.size(said, MAX_POSITION)
    usual = {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": model.rms_norm_eps,
    }
    return {**usual, **{key: value for key, value in raw.items() if value is not None}, **changed}


def _refuse_unserved(files: ConfigFiles, about: Fields) -> None:
    """Raise InvalidRequest for kin of these drafters and for variants, by name."""
    whole = Fields(files.config)
    if "architectures" in whole or "speculators_model_type" not in whole:
        architecture = architecture_of(files.config)
        if architecture not in _ARCHITECTURES:
            raise _refused(f"{architecture} is not served as a DFlash drafter")
    kind = whole.text("speculators_model_type", "dflash")
    if kind != "dflash":
        raise _refused(f"speculators_model_type {kind} is not served as a DFlash drafter")
    layer = whole.object("transformer_layer_config").or_else(whole)
    if (inner := layer.text("model_type", "qwen3")) != "qwen3":
        raise _refused(f"layers of {inner} are not served in a DFlash drafter")
    for key in _KIN:
        if key in about:
            raise _refused(f"{key} is not served in a DFlash drafter")
    for key, usual in _USUAL.items():
        if key in about and (value := about.value(key)) not in usual:
            raise _refused(f"{key} {json.dumps(value)[:60]} is not served in a DFlash drafter")
