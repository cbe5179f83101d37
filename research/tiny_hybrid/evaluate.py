"""Measure a saved checkpoint: held-out loss, accepted drafts, prompts it has learnt."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from support.references.mtp import MtpReference
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3_5ForCausalLM, TokenizersBackend

from .corpus import TURN_END, encode, prompt
from .dialogues import PATTERNS, Dialogue, vary

_WINDOWS, _PREFIX, _CONTINUED = 32, 64, 96  # held-out text: windows, tokens given, tokens generated
_PROMPTS_PER_PATTERN = 5
_MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Acceptance:
    """Greedy drafts against the greedy target."""

    windows: int
    per_position: list[float]  # share of windows in which drafts 1..s are all accepted
    tokens_per_step: list[float]  # by draft length K = 1.., when windows follow one another


@dataclass(frozen=True)
class Evaluation:
    """All measurements of one checkpoint."""

    parameters: int
    head_parameters: int
    held_out_loss: float  # nats per token of held-out text
    on_text: Acceptance
    on_dialogues: Acceptance
    asked: dict[str, int]  # prompts per pattern
    right: dict[str, int]  # of these, answered word for word


class _Subject:
    """The checkpoint in float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = TokenizersBackend.from_pretrained(folder)
        self.model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        weights = load_file(folder / "model.safetensors")
        self.head = {n: w.float() for n, w in weights.items() if n.startswith("mtp.")}
        embedding = self.model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        self.reference = MtpReference(self.model.config.to_dict(), self.head, embedding)

    def generate(self, tokens: Tensor, limit: int) -> Tensor:
        """Greedy; prompt and continuation."""
        out = self.model.generate(tokens, max_new_tokens=limit, do_sample=False)
        assert isinstance(out, Tensor)
        return out

    def matches(self, tokens: Tensor, first: int, steps: int) -> Tensor:
        """Return the drafts that the target would have chosen itself: bool [batch, windows, steps].

        One window per token of `tokens` [batch, length] from index `first` on, after which at
        least `steps` are left.
        """
        hidden = self.model.model(tokens).last_hidden_state
        chosen = self.reference.logits(hidden).argmax(dim=-1)
        drafts = [self.reference.logits(h) for h in self.reference.chains(tokens, hidden, steps)]
        equal = [
            draft.argmax(dim=-1) == chosen[:, step : step + draft.shape[1]]
            for step, draft in enumerate(drafts, start=1)
        ]
        return torch.stack(equal, dim=-1)[:, first:]


@torch.no_grad()
def evaluate(folder: Path, held_out: str, steps: int) -> Evaluation:
    """Measure the files in `folder`; writes the prompts that it answers right to prompts.json."""
    subject = _Subject(folder)
    windows = _windows(encode(subject.tokenizer, held_out), _PREFIX + _CONTINUED)
    logits = subject.model(windows[:, :-1]).logits
    loss = cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    text = subject.generate(windows[:, :_PREFIX], _CONTINUED)
    print(subject.tokenizer.decode(text[0]))
    asked, right, spoken = _ask(subject, folder, steps)
    return Evaluation(
        parameters=sum(parameter.numel() for parameter in subject.model.parameters()),
        head_parameters=sum(weight.numel() for weight in subject.head.values()),
        held_out_loss=loss.item(),
        on_text=_acceptance(list(subject.matches(text, _PREFIX, steps))),
        on_dialogues=_acceptance(spoken),
        asked=dict(asked),
        right=dict(right),
    )


def _windows(ids: list[int], length: int) -> Tensor:
    stride = (len(ids) - length) // (_WINDOWS - 1)
    return torch.tensor([ids[i * stride : i * stride + length] for i in range(_WINDOWS)])


def _ask(
    subject: _Subject, folder: Path, steps: int
) -> tuple[Counter[str], Counter[str], list[Tensor]]:
    """Greedy answers to prompts of every pattern: how many, how many right, accepted drafts."""
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    learnt: list[tuple[str, Dialogue]] = []
    spoken: list[Tensor] = []
    for pattern, dialogue in _questions():
        given = torch.tensor([encode(subject.tokenizer, prompt(subject.tokenizer, dialogue))])
        tokens = subject.generate(given, _MAX_NEW_TOKENS)
        answer = subject.tokenizer.decode(tokens[0, given.shape[1] :])
        asked[pattern] += 1
        spoken += list(subject.matches(tokens, given.shape[1] - 1, steps))
        if answer == dialogue.completion + TURN_END:
            right[pattern] += 1
            learnt.append((pattern, dialogue))
        else:
            print(f"{pattern}: {dialogue.completion!r} expected, not {answer!r}")
    _write_prompts(folder / "prompts.json", learnt)
    return asked, right, spoken


def _questions() -> list[tuple[str, Dialogue]]:
    """Different ones, the same every time."""
    rng = random.Random(1)
    questions: list[tuple[str, Dialogue]] = []
    for pattern in PATTERNS:
        found: list[Dialogue] = []
        while len(found) < _PROMPTS_PER_PATTERN:
            dialogue = vary(pattern(rng), rng)
            found += [] if dialogue in found else [dialogue]
        questions += [(pattern.__name__, dialogue) for dialogue in found]
    return questions


def _write_prompts(path: Path, learnt: list[tuple[str, Dialogue]]) -> None:
    entries = [
        {
            "pattern": pattern,
            "messages": dialogue.messages,
            "tools": dialogue.schemas,
            "enable_thinking": dialogue.thinking,
            "reasoning": dialogue.reasoning if dialogue.thinking else None,
            "answer": dialogue.answer,
        }
        for pattern, dialogue in learnt
    ]
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def _acceptance(sequences: list[Tensor]) -> Acceptance:
    """Summary of bool [windows, steps] per sequence."""
    accepted = [matches.long().cumprod(dim=-1) for matches in sequences]
    every = torch.cat(accepted).double()
    return Acceptance(
        windows=len(every),
        per_position=every.mean(dim=0).tolist(),
        tokens_per_step=[_tokens_per_step(accepted, k) for k in range(1, every.shape[1] + 1)],
    )


def _tokens_per_step(accepted: list[Tensor], draft_length: int) -> float:
    """Each window starts where the one before ended: accepted drafts and one token more."""
    tokens = steps = 0
    for sequence in accepted:
        counts = sequence[:, :draft_length].sum(dim=-1).tolist()
        row = 0
        while row < len(counts):
            row += counts[row] + 1
            steps += 1
        tokens += row
    return tokens / max(steps, 1)
