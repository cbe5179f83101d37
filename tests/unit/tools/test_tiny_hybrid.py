"""The checkpoint in tests/data/tiny-hybrid: its files, its head, and the prompts that it knows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.references.mtp import MtpReference
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, TokenizersBackend

FOLDER = Path(__file__).parents[2] / "data" / "tiny-hybrid"
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>")
_TURN_END = "<|im_end|>"


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((FOLDER / "prompts.json").read_text())
    return entries


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return load_file(FOLDER / "model.safetensors")


@pytest.fixture(scope="module")
def model() -> Qwen3_5ForCausalLM:
    loaded: Qwen3_5ForCausalLM = Qwen3_5ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    loaded.eval().requires_grad_(False)
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> TokenizersBackend:
    loaded: TokenizersBackend = TokenizersBackend.from_pretrained(FOLDER)
    return loaded


def _given(tokenizer: TokenizersBackend, entry: dict[str, Any]) -> str:
    rendered = tokenizer.apply_chat_template(
        entry["messages"],
        tools=entry["tools"] or None,
        enable_thinking=entry["enable_thinking"],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert isinstance(rendered, str)
    return rendered


def _completion(entry: dict[str, Any]) -> str:
    thought = f"{entry['reasoning']}\n</think>\n\n" if entry["enable_thinking"] else ""
    return thought + str(entry["answer"]) + _TURN_END


def test_files_are_small_and_bfloat16(weights: dict[str, Tensor]) -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 10_000_000
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_the_head_is_complete(weights: dict[str, Tensor]) -> None:
    """One tensor per name, and the layer has the tensors of the target's last layer."""
    head = {name.removeprefix("mtp.") for name in weights if name.startswith("mtp.")}
    last = "model.layers.7."
    layer = {"layers.0." + n.removeprefix(last) for n in weights if n.startswith(last)}
    norms = {f"{norm}.weight" for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert head == layer | norms | {"fc.weight"}


def test_prompts_cover_reasoning_and_calls(prompts: list[dict[str, Any]]) -> None:
    calls = [[json.loads(c) for c in _CALL.findall(entry["answer"])] for entry in prompts]
    assert len(prompts) >= 20
    assert {call["name"] for found in calls for call in found} == {"add", "get_weather"}
    assert {len(found) for found in calls} >= {0, 1}
    assert sum(entry["enable_thinking"] for entry in prompts) >= 5


def test_learnt_prompts_are_answered(
    model: Qwen3_5ForCausalLM, tokenizer: TokenizersBackend, prompts: list[dict[str, Any]]
) -> None:
    """One teacher-forced pass: every token of the answer is the greedy one."""
    for entry in prompts:
        given, tokens = _tokens(tokenizer, entry)
        chosen = model(tokens[:, :-1]).logits.argmax(dim=-1)
        assert torch.equal(chosen[:, given - 1 :], tokens[:, given:]), entry


def test_drafts_are_mostly_accepted(
    model: Qwen3_5ForCausalLM,
    tokenizer: TokenizersBackend,
    prompts: list[dict[str, Any]],
    weights: dict[str, Tensor],
) -> None:
    head = {name: weight.float() for name, weight in weights.items() if name.startswith("mtp.")}
    embedding = weights["model.embed_tokens.weight"].float()
    reference = MtpReference(model.config.to_dict(), head, embedding)
    accepted = drafted = 0
    for entry in prompts:
        given, tokens = _tokens(tokenizer, entry)
        hidden = model.model(tokens).last_hidden_state
        (output,) = reference.chains(tokens, hidden, 1)
        drafts = reference.logits(output).argmax(dim=-1)[:, given - 1 : -1]
        accepted += int((drafts == tokens[:, given + 1 :]).sum())
        drafted += drafts.numel()
    assert accepted / drafted > 0.6


def _tokens(tokenizer: TokenizersBackend, entry: dict[str, Any]) -> tuple[int, Tensor]:
    """Length of the prompt, and the ids of prompt and answer [1, length]."""
    given = tokenizer.encode(_given(tokenizer, entry), add_special_tokens=False)
    answer = tokenizer.encode(_completion(entry), add_special_tokens=False)
    return len(given), torch.tensor([[*given, *answer]])
