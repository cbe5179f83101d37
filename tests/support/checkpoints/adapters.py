"""Adapters of random weights as peft writes them, and what peft answers with each alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from support.references.sampling import gumbel
from transformers import AutoModelForCausalLM

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
STRENGTH = 0.4  # of random halves: answers differ, and logits stay peaky


@contextmanager
def _older_than_transformers() -> Iterator[None]:
    """Run peft, which asks transformers for what that calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_adapter(
    model: Path,
    to: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: int = 6,
    targets: Sequence[str] = DENSE,
    **config: Any,
) -> Path:
    """Write an adapter of modules, and of parameters, whose names have dots; returns `to`."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    modules = [name for name in targets if "." not in name]
    parameters = [name for name in targets if "." in name]
    wanted = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=modules,
        target_parameters=parameters or None,
        task_type="CAUSAL_LM",
        **config,
    )
    with _older_than_transformers():
        adapted = get_peft_model(base, wanted)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.normal_(0.0, STRENGTH)
    with _older_than_transformers():
        adapted.save_pretrained(to)
    return to


def make_old_adapter(model: Path, to: Path, *, seed: int, rank: int) -> Path:
    """Write an adapter of Mixtral's experts one by one, as peft did with transformers 4."""
    torch.manual_seed(seed)
    base, targets = AutoModelForCausalLM.from_pretrained(model), ["w1", "w2", "w3"]
    width, inner = base.config.hidden_size, base.config.intermediate_size
    halves = {
        f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.lora_{half}"
        ".weight": torch.randn(size) * STRENGTH
        for layer in range(base.config.num_hidden_layers)
        for expert in range(base.config.num_local_experts)
        for name, inputs in zip(targets, (width, inner, width), strict=True)
        for half, size in (("A", (rank, inputs)), ("B", (width + inner - inputs, rank)))
    }
    config = LoraConfig(r=rank, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM")
    config.save_pretrained(to)
    save_file(halves, to / "adapter_model.safetensors")
    return to


@lru_cache(maxsize=80)
def _reference(model: Path, adapter: Path | None) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with _older_than_transformers():
        return (base if adapter is None else PeftModel.from_pretrained(base, adapter)).eval()


class Asked(NamedTuple):
    """A prompt, and how its tokens are chosen."""

    prompt: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 0

    def choose(self, logits: torch.Tensor, position: int) -> int:
        """Choose a token; the noise is that of the reference."""
        if not self.temperature:
            return int(logits.argmax())
        noise = [gumbel(self.seed, position, token) for token in range(len(logits))]
        return int((logits / self.temperature + torch.tensor(noise, dtype=logits.dtype)).argmax())


@torch.inference_mode()
def peft_answers(
    model: Path, adapter: Path | None, asked: Sequence[Asked], count: int
) -> dict[Asked, list[int]]:
    """Token by token by transformers, with peft's adapter, prompts of one length together."""
    reference, answers = _reference(model, adapter), dict[Asked, list[int]]()
    for length in {len(one.prompt) for one in asked}:
        rows = [one for one in asked if len(one.prompt) == length]
        tokens = torch.tensor([one.prompt for one in rows])
        for position in range(length, length + count):
            logits = reference(tokens).logits[:, -1].double()
            chosen = [one.choose(z, position) for one, z in zip(rows, logits, strict=True)]
            tokens = torch.cat((tokens, torch.tensor(chosen)[:, None]), dim=1)
        answers |= dict(zip(rows, tokens[:, length:].tolist(), strict=True))
    return answers
