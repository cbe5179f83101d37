"""Parts of a model's folder that the training of a head needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from surestep_worker.models import ModelSource
from torch import Tensor

from .conversations import Sampling

_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


class ModelParts(NamedTuple):
    """Parts of a dense model; `config` is that of the worker."""

    config: Any
    rope_theta: float
    sampling: Sampling  # by default
    weights: Mapping[str, Tensor]  # f32, of the last layer and the last norm
    embedding: Tensor  # [V, H]
    lm_head: Tensor  # [V, H], the embedding where they are tied
    tied: bool

    @classmethod
    def read(cls, folder: Path) -> ModelParts:
        """Raises InvalidRequest for a model that is not served, ValueError for one that is not
        dense, or whose vocabulary is quantised."""
        config: Any = ModelSource(folder).config
        last = f"model.layers.{config.num_layers - 1}."
        found = dict[str, Tensor]()
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a mapping
                    if name.startswith(last) or name in (_EMBEDDING, _LM_HEAD, "model.norm.weight"):
                        found[name] = file.get_tensor(name)
        tied = bool(config.tie_word_embeddings)
        head = found.get(_EMBEDDING if tied else _LM_HEAD)
        if head is None or _EMBEDDING not in found or f"{last}mlp.gate_proj.weight" not in found:
            raise ValueError(f"{folder} holds no dense model with unquantised weights")
        return cls(
            config,
            _rope_theta(folder),
            _sampling(folder),
            {name: weight.float() for name, weight in found.items() if name.startswith("model.")},
            found[_EMBEDDING],
            head,
            tied,
        )


def _rope_theta(folder: Path) -> float:
    raw = json.loads((folder / "config.json").read_text())
    nested = raw.get("rope_parameters") or {}
    return float(nested.get("rope_theta") or raw.get("rope_theta") or 10_000.0)


def _sampling(folder: Path) -> Sampling:
    path = folder / "generation_config.json"
    raw = json.loads(path.read_text()) if path.exists() else {}
    return Sampling(float(raw.get("temperature", 1.0)), float(raw.get("top_p", 1.0)))
