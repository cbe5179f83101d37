"""Adapters of random weights as peft writes them, and what peft answers with each alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.references.sampling import gumbel
from transformers import AutoModelForCausalLM

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
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
    targets: Sequence[str] | str = DENSE,
    **config: Any,
) -> Path:
    """Write an adapter for the checkpoint; returns `to`."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    wanted = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", **config
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


@lru_cache(maxsize=80)
def _reference(model: Path, adapter: Path | None) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with _older_than_transformers():
        return (base if adapter is None else PeftModel.from_pretrained(base, adapter)).eval()


@torch.inference_mode()
def peft_answer(
    model: Path,
    adapter: Path | None,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
) -> list[int]:
    """Token by token by transformers, with peft's adapter; the noise is that of the reference."""
    reference, tokens = _reference(model, adapter), list(prompt)
    while len(tokens) < len(prompt) + count:
        logits = reference(torch.tensor([tokens])).logits[0, -1].double()
        if temperature:
            noise = [gumbel(seed, len(tokens), token) for token in range(len(logits))]
            logits = logits / temperature + torch.tensor(noise, dtype=torch.float64)
        tokens.append(int(logits.argmax()))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]
