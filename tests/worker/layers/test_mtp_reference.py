"""The reference of the MTP head against transformers' own decoder layer, run over plain sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.references.mtp import LAYER, MtpReference
from torch import Tensor
from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

_HIDDEN, _VOCAB, _LENGTH, _STEPS = 32, 48, 9, 3


class _Head:
    """A random head: the reference, and the same weights inside a one-layer model."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
        config = Qwen3_5TextConfig(
            vocab_size=_VOCAB,
            hidden_size=_HIDDEN,
            intermediate_size=48,
            num_hidden_layers=1,
            layer_types=["full_attention"],
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters=rope | {"partial_rotary_factor": 0.25},
        )
        self.layer = Qwen3_5TextModel(config).eval().requires_grad_(False)
        for parameter in self.layer.parameters():
            parameter.normal_(0.0, 0.3)
        state = self.layer.state_dict()
        self.embedding = state.pop("embed_tokens.weight")
        weights = {LAYER + name.removeprefix("layers.0."): w for name, w in state.items()}
        weights["mtp.norm.weight"] = weights.pop(LAYER + "norm.weight")
        weights["mtp.fc.weight"] = torch.randn(_HIDDEN, 2 * _HIDDEN) * 0.3
        for name in ("embedding", "hidden"):
            weights[f"mtp.pre_fc_norm_{name}.weight"] = torch.randn(_HIDDEN) * 0.3
        self.weights = weights
        self.reference = MtpReference(config.to_dict(), weights, self.embedding)
        self.tokens = torch.randint(_VOCAB, (2, _LENGTH))
        self.hidden = torch.randn(2, _LENGTH, _HIDDEN)

    def joined(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Input of the layer for rows [batch, n]."""
        normed = []
        for name, x in (("embedding", self.embedding[tokens]), ("hidden", hidden)):
            weight = 1 + self.weights[f"mtp.pre_fc_norm_{name}.weight"]
            normed.append(torch.nn.functional.rms_norm(x, (_HIDDEN,), weight, eps=1e-6))
        joined: Tensor = torch.cat(normed, dim=-1) @ self.weights["mtp.fc.weight"].T
        return joined

    def run(self, x: Tensor) -> Tensor:
        """Layer and norm over a sequence from position 0 on."""
        out = self.layer(inputs_embeds=x, use_cache=False).last_hidden_state
        assert isinstance(out, Tensor)
        return out


@pytest.fixture(scope="module")
def head() -> _Head:
    return _Head()


def test_first_step_is_one_causal_pass_over_shifted_tokens(head: _Head) -> None:
    """Row i joins the target's hidden state i with token i+1, at position i."""
    (output,) = head.reference.chains(head.tokens, head.hidden, 1)
    expected = head.run(head.joined(head.tokens[:, 1:], head.hidden[:, :-1]))
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-4)


def test_recycled_rows_follow_the_rows_of_the_target(head: _Head) -> None:
    """Chain i, written out: rows 0..i of step 1, then one row per further step."""
    outputs = head.reference.chains(head.tokens, head.hidden, _STEPS)
    for chain in range(_LENGTH - _STEPS):
        x = head.joined(head.tokens[:, 1 : chain + 2], head.hidden[:, : chain + 1])
        for step in range(1, _STEPS + 1):
            last = head.run(x)[:, -1:]
            torch.testing.assert_close(
                outputs[step - 1][:, chain : chain + 1], last, atol=1e-5, rtol=1e-4
            )
            following = head.tokens[:, chain + step + 1 : chain + step + 2]
            if step < _STEPS:
                x = torch.cat([x, head.joined(following, last)], dim=1)


def test_draft_feeds_back_its_own_tokens(head: _Head) -> None:
    tokens, hidden = head.tokens[0, :5], head.hidden[0, :4]
    x = head.joined(tokens[None, 1:], hidden[None])
    expected = []
    for _ in range(_STEPS):
        last = head.run(x)[:, -1:]
        expected.append(int((last @ head.embedding.T).argmax()))
        x = torch.cat([x, head.joined(torch.tensor([expected[-1:]]), last)], dim=1)
    assert head.reference.draft(tokens, hidden, _STEPS) == expected
    assert len(set(expected)) > 1
