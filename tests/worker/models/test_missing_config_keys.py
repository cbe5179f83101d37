"""A key that config.json lacks counts as transformers' class has it, or the model is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints.branches import make_branch_checkpoint, make_gemma3_with_images
from support.checkpoints.deepseek import make_tiny_deepseek
from support.checkpoints.gpt_oss import make_tiny_gpt_oss
from support.checkpoints.hybrid import make_tiny_hybrid
from support.checkpoints.tiny import make_tiny_checkpoint
from support.parity.stepping import Row, in_one_group, random_prompt, step
from surestep_common.errors import InvalidRequest
from surestep_kernels import load_kernels
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache
from surestep_worker.cache.recurrent import RecurrentCache
from surestep_worker.checkpoint.weight_store import WeightStore
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.models import Model, ModelSource, load_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

KERNELS = load_kernels("cpu")
LENGTH, BLOCK_SIZE = 20, 16
WINDOWED = ("mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")  # with a default for it
BEYOND_USUAL_WINDOW = 4096 + LENGTH  # tokens; of Mistral and Qwen
_SWITCHED: dict[str, Any] = {
    "sliding_window": 6,
    "use_sliding_window": True,
    "max_window_layers": 1,
}
_GROUPS: dict[str, Any] = {
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 2.0, 3.0, 4.0],
    "long_factor": [2.0, 4.0, 6.0, 9.0],
}
# Where a key has a default of the class, the file says something else.
MAKERS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda to: make_tiny_checkpoint(to, attention_bias=True, mlp_bias=True),
    "mistral": lambda to: make_tiny_checkpoint(
        to, "mistral", heads=8, kv_heads=8, max_position=8192, sliding_window=6
    ),
    "qwen2": lambda to: make_tiny_checkpoint(to, "qwen2", max_position=8192, **_SWITCHED),
    "qwen3": lambda to: make_tiny_checkpoint(
        to, "qwen3", head_dim=128, max_position=8192, **_SWITCHED
    ),
    "qwen2_moe": lambda to: make_tiny_checkpoint(
        to,
        "qwen2_moe",
        max_position=8192,
        shared_expert_intermediate_size=16,
        **_EXPERTS,
        **_SWITCHED,
    ),
    "qwen3_moe": lambda to: make_tiny_checkpoint(
        to, "qwen3_moe", max_position=8192, attention_bias=True, **_EXPERTS, **_SWITCHED
    ),
    "mixtral": lambda to: make_tiny_checkpoint(to, "mixtral", num_local_experts=6),
    "phi3": lambda to: make_tiny_checkpoint(
        to, "phi3", sliding_window=6, original_max_position_embeddings=8, rope_parameters=_LONGROPE
    ),
    "smollm3": lambda to: make_tiny_checkpoint(
        to, "smollm3", layers=4, no_rope_layers=[1, 0, 0, 1], **_SWITCHED
    ),
    "ministral": lambda to: make_tiny_checkpoint(
        to, "ministral", sliding_window=6, layer_types=["full_attention", "sliding_attention"]
    ),
    "ministral3": lambda to: make_tiny_checkpoint(to, "ministral3", rope_parameters=_YARN),
    "qwen3_next": lambda to: make_tiny_hybrid(to, "qwen3_next", mtp=False, norm_topk_prob=False),
    "qwen3_5": lambda to: make_tiny_hybrid(to, "qwen3_5", mtp=False),
    "qwen3_5_moe": lambda to: make_tiny_hybrid(to, "qwen3_5_moe"),
    "qwen3_5 wrapped": lambda to: make_tiny_hybrid(to, "qwen3_5", wrapped=True),
    "gpt_oss": make_tiny_gpt_oss,
    **{
        name: partial(make_branch_checkpoint, name=name, tie=False)
        for name in ("gemma", "gemma2", "gemma3", "olmo2", "olmo3", "granite")
    },
    "gemma3 wrapped": partial(make_gemma3_with_images, tie=False),
    "deepseek_v3": lambda to: make_tiny_deepseek(
        to, "deepseek_v3", **_GROUPS, norm_topk_prob=False, rope_interleave=False
    ),
    "deepseek_v32": lambda to: make_tiny_deepseek(to, "deepseek_v32", **_GROUPS),
    "glm_moe_dsa": lambda to: make_tiny_deepseek(to, "glm_moe_dsa", norm_topk_prob=False),
    "glm4_moe": lambda to: make_tiny_deepseek(to, "glm4_moe", attention_bias=True),
    "glm4_moe_lite": lambda to: make_tiny_deepseek(to, "glm4_moe_lite", rope_interleave=False),
}


@pytest.mark.rotates(8)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("null", [False, True], ids=["missing", "null"])
@pytest.mark.parametrize("family", MAKERS)
def test_each_key_may_be_missing(tmp_path: Path, family: str, null: bool) -> None:
    folder = MAKERS[family](tmp_path)
    file = folder / "config.json"
    whole = json.loads(file.read_text())
    usual = _ours(folder, LENGTH)
    wrong = dict[str, str]()
    for path in _keys(whole):
        file.write_text(json.dumps(_without(whole, path, null=null)))
        windowed = family in WINDOWED and path == ("sliding_window",)
        length = BEYOND_USUAL_WINDOW if windowed else LENGTH
        try:
            ours = _ours(folder, length)
        except InvalidRequest:
            continue
        theirs = _theirs(folder, length)
        if theirs is None and _apart(ours, usual):
            wrong[".".join(path)] = "transformers refuses it, and we serve another model"
        elif theirs is not None and _apart(ours, theirs):
            wrong[".".join(path)] = f"{_apart(ours, theirs):.2g} standard deviations off"
    assert wrong == {}


def _keys(config: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of the keys that say something of the decoder."""
    for key, value in config.items():
        if key in ("vision_config", "architectures"):
            continue
        yield (*before, key)
        if isinstance(value, dict):
            yield from _keys(value, (*before, key))


def _without(config: dict[str, Any], path: tuple[str, ...], *, null: bool) -> dict[str, Any]:
    key, *inner = path
    if inner:
        return config | {key: _without(config[key], tuple(inner), null=null)}
    if null:
        return config | {key: None}
    return {name: value for name, value in config.items() if name != key}


@torch.no_grad()
def _theirs(folder: Path, length: int) -> Tensor | None:
    """Logits f32[L, V] of transformers; None where it makes no model of the file."""
    wrapped = "text_config" in json.loads((folder / "config.json").read_text())
    kind: Any = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    try:
        model, found = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            experts_implementation="eager",
            output_loading_info=True,
        )
        if found["missing_keys"] or found["mismatched_keys"]:
            return None
        logits: Tensor = model(torch.tensor([random_prompt(length)])).logits[0]
    except Exception:  # noqa: BLE001 - whatever a broken file makes of it
        return None
    return logits


def _load(folder: Path, store: WeightStore | None = None) -> Model:
    return load_model(
        ModelSource(folder, store),
        dtype="float32",
        device="cpu",
        tp=TensorParallel(),
        kernels=KERNELS,
    )


def _ours(folder: Path, length: int, store: WeightStore | None = None) -> Tensor:
    """Logits f32[L, V]. Raises InvalidRequest for a model that is refused."""
    model, blocks = _load(folder, store), range(1, 2 + length // BLOCK_SIZE)
    kv = KVCache(in_one_group(model.kv_spec(BLOCK_SIZE)), len(blocks) + 1, KERNELS, "cpu")
    spec = model.recurrent_spec()
    recurrent = None if spec is None else RecurrentCache(spec, 3, 1, 1, "cpu")
    return step(model, Caches(kv, recurrent), [Row(random_prompt(length), 0, blocks, slot=1)])[0]


def _apart(actual: Tensor, expected: Tensor) -> float:
    """The largest difference in standard deviations; 0 for what float32 rounds."""
    if actual.shape != expected.shape:
        return torch.inf
    spread = expected.std().item()
    assert spread > 0.3, "logits too flat to tell right from wrong"
    apart = (actual - expected).abs().max().item() / spread
    return apart if not apart < 1e-3 else 0.0


@pytest.mark.parametrize("same", [False, True], ids=["another", "the embedding"])
@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.rotates(4)
def test_the_head_of_the_file_counts(tmp_path: Path, family: str, same: bool) -> None:
    """Whatever tie_word_embeddings says, and for a rank that finds the weights in memory, too."""
    folder = MAKERS[family](tmp_path)
    file, weights = folder / "config.json", folder / "model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    if same:
        tensors = load_file(weights)
        (embedding,) = (name for name in tensors if name.endswith("embed_tokens.weight"))
        (head,) = (name for name in tensors if name.endswith("lm_head.weight"))
        tensors[head] = tensors[embedding].clone()
        save_file(tensors, weights, metadata={"format": "pt"})
    theirs, store = _theirs(folder, LENGTH), WeightStore.private()
    assert theirs is not None
    for _ in ("from the file", "from memory"):
        assert _apart(_ours(folder, LENGTH, store), theirs) == 0
    assert _load(folder).vocabulary.tied == same
