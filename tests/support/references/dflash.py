"""DFlash drafters, computed by the class of transformers that has their formula.

    ctx_p = hidden_norm(fc(cat(a_j[p] for the captured layers j)))      # of all p < s
    block = embed([token s, MASK, ..]);  each layer: keys and values of ctx and of the block
    logits of s + j = lm_head(norm(row j))

Source: arXiv 2602.06036, and `transformers.models.muse_glimmer_assistant`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

KINDS = ("full_attention", "sliding_attention")


class DFlashReference:
    """One drafter. Names of parameters become those of published checkpoints."""

    def __init__(
        self,
        sizes: Mapping[str, Any],
        *,
        layer_types: Sequence[str],
        causal: Sequence[str] = (KINDS[1],),
        block_size: int = 8,
        mask_id: int,
        target_layer_ids: Sequence[int],
        window: int = 6,
        seed: int = 5,
        scale: float = 0.2,
    ) -> None:
        """Make a drafter of random weights; `causal` are kinds of layers, `sizes` fields of the
        configuration."""
        self.config: Any = MuseGlimmerAssistantConfig(
            **sizes,
            num_hidden_layers=len(layer_types),
            layer_types=list(layer_types),
            sliding_window=window,
            block_size=block_size,
            mask_token_id=mask_id,
            target_layer_ids=list(target_layer_ids),
        )
        self.config._attn_implementation = "eager"
        self.causal = tuple(causal)
        torch.manual_seed(seed)
        self.module = MuseGlimmerAssistantModel(self.config)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, scale)

    def tensors(self) -> dict[str, Tensor]:
        """By the names of published checkpoints."""
        renamed = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}
        return {
            renamed.get(name.removesuffix(".weight"), name.removesuffix(".weight")) + ".weight": x
            for name, x in self.module.state_dict().items()
        }

    @torch.no_grad()
    def draft(
        self,
        newest: int,
        captured: Sequence[Tensor],
        count: int,
        embedding: Tensor,
        output: Callable[[Tensor], Tensor],
    ) -> list[int]:
        """Greedy drafts after `newest`, given the states [s, H] of all tokens before it."""
        ids = torch.tensor([newest] + [self.config.mask_token_id] * count)
        context = torch.cat(list(captured), dim=-1)[None]
        masks = {kind: self._mask(kind, context.shape[1], count + 1) for kind in KINDS}
        made = self.module(
            noise_embeds=embedding[ids][None], context_hidden_states=context, attention_mask=masks
        )
        logits = output(made.last_hidden_state[0, 1:])
        logits[:, self.config.mask_token_id] = -torch.inf
        best: list[int] = logits.argmax(dim=-1).tolist()
        return best

    def _mask(self, kind: str, seen: int, width: int) -> Tensor:
        """Return what is added to scores [1, 1, width, seen + width]."""
        own, other = torch.arange(seen, seen + width)[:, None], torch.arange(seen + width)
        hidden = torch.zeros(width, seen + width, dtype=torch.bool)
        if kind in self.causal:
            hidden |= other > own
        if kind == KINDS[1]:
            hidden |= own - other >= self.config.sliding_window
        return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None]
