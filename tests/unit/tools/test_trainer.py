"""The trainer in miniature: what counts as an answer, who learns when, and what is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_hybrid.checkpoint import new_head, new_trunk, save
from tiny_hybrid.corpus import END_OF_TEXT, TURN_END, Batches, make_tokenizer, text
from torch import Tensor
from train_tiny_hybrid import train_head, train_trunk
from transformers import TokenizersBackend

_ROWS, _LENGTH = 8, 192
_WRITTEN = 3  # rows of a batch that are plain text


@pytest.fixture(scope="module")
def tokenizer() -> TokenizersBackend:
    return make_tokenizer(text()[0], 2048)


@pytest.fixture
def batches(tokenizer: TokenizersBackend) -> Batches:
    return Batches(tokenizer, text()[0], _ROWS, _LENGTH, seed=0)


def test_only_answers_count(tokenizer: TokenizersBackend, batches: Batches) -> None:
    """Text counts throughout; of a dialogue, the answer after the prompt and up to its end."""
    tokens, counts = batches.next()
    assert counts[:_WRITTEN].all()
    for row, counted in zip(tokens[_WRITTEN:], counts[_WRITTEN:], strict=True):
        learnt = str(tokenizer.decode(row[1:][counted[:-1]]))
        first = str(tokenizer.decode(row)).split(END_OF_TEXT)[0]
        answer = first.rsplit("<|im_start|>assistant\n<think>\n", 1)[1].removesuffix("\n")
        assert learnt.startswith(answer.removeprefix("\n</think>\n\n"))
        assert "<|im_start|>" not in learnt
        assert answer.endswith(TURN_END)


def test_both_parts_learn_and_are_saved(
    tokenizer: TokenizersBackend, batches: Batches, tmp_path: Path
) -> None:
    """Each in its turn: the head leaves the trunk as it is."""
    torch.manual_seed(0)
    trunk = new_trunk(2048)
    untrained = _copy(trunk.state_dict())
    train_trunk(trunk, batches, steps=2, rate=1e-3)
    frozen = _copy(trunk.state_dict())
    assert not any(torch.equal(frozen[name], weight) for name, weight in untrained.items())
    head = new_head(trunk)
    start = _copy(head)
    train_head(trunk, head, batches, steps=2, rate=1e-3)
    assert all(torch.equal(trunk.state_dict()[name], weight) for name, weight in frozen.items())
    assert not any(torch.equal(head[name], weight) for name, weight in start.items())
    save(tmp_path, trunk, head, tokenizer)
    saved = load_file(tmp_path / "model.safetensors")
    frozen.pop("lm_head.weight")  # tied to the embedding
    assert saved.keys() == frozen.keys() | head.keys()
    assert all(torch.equal(saved[name], head[name].bfloat16()) for name in head)


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}
