"""Training of a head: every draft step learns the distribution that the model itself has there."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from .head import Eagle3Head, embed
from .writing import Observed

_STEP_WEIGHT = 0.8  # of a draft step, as a factor of the one before it
_POOL = 16  # batches whose conversations are sorted by length
_WARM_UP = 20  # steps
_CHECKPOINT_S = 300.0
_REPORT_EVERY = 10  # steps


class Vocabularies(NamedTuple):
    """Vocabularies of model and drafts, on the device."""

    embedding: Tensor  # [V, H]
    lm_head: Tensor  # f32[D, H] rows of the output head that can be drafted
    token_ids: Tensor  # i64[D] which these are
    draft_ids: Tensor  # i64[V] the other way round; -1: cannot be drafted

    @classmethod
    def of(cls, embedding: Tensor, lm_head: Tensor, token_ids: Tensor, device: str) -> Vocabularies:
        drafted = torch.full((len(embedding),), -1)
        drafted[token_ids] = torch.arange(len(token_ids))
        rows = lm_head[token_ids].float()
        return cls(*(x.to(device) for x in (embedding, rows, token_ids, drafted)))


class Batch(NamedTuple):
    """Rows of B conversations, padded at the end. Row i has state i and token i + 1."""

    captured: Tensor  # f32[B, T, n * H]
    tokens: Tensor  # i64[B, T] token i + 1
    wanted: Tensor  # i64[B, T] token i + 2, which the row is to tell
    hidden: Tensor  # [B, T, H] of the model at i + 1: what it knows of token i + 2
    counts: Tensor  # bool[B, T] token i + 2 is one of an answer

    @classmethod
    def of(cls, conversations: Sequence[Observed], device: str) -> Batch:
        def rows(pieces: list[Tensor]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True).to(device)

        ids = [torch.tensor(each.written.ids) for each in conversations]
        answered = [torch.tensor(each.written.answered[2:]) for each in conversations]
        return cls(
            rows([each.captured[:-2] for each in conversations]).float(),
            rows([each[1:-1] for each in ids]),
            rows([each[2:] for each in ids]),
            rows([each.hidden[1:-1] for each in conversations]),
            rows(answered),
        )


def batches(
    conversations: Sequence[Observed], tokens: int, rng: random.Random
) -> Iterator[list[Observed]]:
    """Yield an epoch: batches of about so many tokens, of conversations of similar length."""
    order = rng.sample(conversations, len(conversations))
    groups = list[list[Observed]]()
    for pool in _cut(order, _POOL * tokens):
        groups += _cut(sorted(pool, key=lambda each: len(each.written.ids)), tokens)
    yield from rng.sample(groups, len(groups))


def _cut(conversations: Sequence[Observed], tokens: int) -> list[list[Observed]]:
    """In order, into pieces of at least so many tokens, the last one aside."""
    pieces, size = [list[Observed]()], 0
    for each in conversations:
        if size >= tokens:
            pieces.append([])
            size = 0
        pieces[-1].append(each)
        size += len(each.written.ids)
    return pieces


def losses(head: Eagle3Head, batch: Batch, vocabularies: Vocabularies, steps: int) -> list[Tensor]:
    """Cross entropy of each draft step with the model's distribution over what can be drafted.

    Tokens that cannot be drafted are left out. Products of the head are in bfloat16 where that is
    faster; sums, norms and losses are in float32.
    """
    counts = batch.counts & (vocabularies.draft_ids[batch.wanted] >= 0)
    with torch.no_grad():
        known = (batch.hidden[counts].float() @ vocabularies.lm_head.T).softmax(-1)
    each = list[Tensor]()
    row = torch.arange(counts.shape[1], device=counts.device).expand_as(counts)[counts]
    narrow = _multiplies_bfloat16(counts.device)
    with torch.autocast(counts.device.type, torch.bfloat16, enabled=narrow):
        unrolled = head.unroll(batch.captured, embed(vocabularies.embedding, batch.tokens), steps)
        for step, out in enumerate(unrolled):
            there = row >= step  # a draft step has no row before it
            logits = out[counts][there] @ vocabularies.lm_head.T
            each.append(cross_entropy(logits.float(), known[there]))
    return each


def _multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether products of bfloat16 are faster on a device than those of float32."""
    return device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()


@torch.no_grad()
def accepted(
    head: Eagle3Head,
    conversations: Sequence[Observed],
    vocabularies: Vocabularies,
    steps: int,
    tokens: int,
    device: str,
) -> list[float]:
    """Share of windows, one from each token of an answer on, whose first 1, 2, .. drafts are
    right: the likeliest tokens are drafted, and right where the conversation has them.
    """
    windows, right = 0, torch.zeros(steps)
    for chosen in _cut(sorted(conversations, key=lambda each: len(each.written.ids)), tokens):
        batch = Batch.of(chosen, device)
        unrolled = head.unroll(batch.captured, embed(vocabularies.embedding, batch.tokens), steps)
        whole = batch.counts
        matches = torch.ones_like(whole)
        for step, out in enumerate(unrolled):
            drafted = (out[whole] @ vocabularies.lm_head.T).argmax(-1)
            equal = whole.clone()
            equal[whole] = vocabularies.token_ids[drafted] == batch.wanted[whole]
            # Row i + step belongs to the window that begins at row i.
            matches[:, : matches.shape[1] - step] &= equal[:, step:]
            if step:
                matches[:, -step:] = False
            right[step] += (matches & whole).sum().cpu()
        windows += int(whole.sum())
    return (right / max(1, windows)).tolist()


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal (Jordan et al., 2024, "Muon").

    Updates have the size of Adam's (Liu et al., 2025, arXiv 2502.16982), so that both have one
    learning rate.
    """

    def __init__(self, parameters: Sequence[Tensor], lr: float, decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 0.05)
                update = orthogonal(weight.grad.lerp(momentum, 0.95))
                size = 0.2 * math.sqrt(max(weight.shape))
                weight.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=size * group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with equal singular values, about, by Newton-Schulz iterations."""
    x: Tensor = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / float(x.norm() + 1e-7)
    x = x.bfloat16() if _multiplies_bfloat16(x.device) else x
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).float()


class Plan(NamedTuple):
    """Length and steps of a training."""

    epochs: float
    draft_steps: int
    batch_tokens: int
    learning_rate: float
    seed: int
    device: str


class Trainer:
    """A head and its optimisers. What is in `checkpoint` is taken up again."""

    def __init__(self, head: Eagle3Head, plan: Plan, checkpoint: Path) -> None:
        self.head, self._plan, self._checkpoint = head.to(plan.device), plan, checkpoint
        matrices = [p for p in head.parameters() if p.ndim == 2]
        vectors = [p for p in head.parameters() if p.ndim != 2]
        self._optimisers: list[torch.optim.Optimizer] = [
            Muon(matrices, plan.learning_rate, decay=0.05),
            torch.optim.AdamW(vectors, plan.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.step = 0
        if checkpoint.exists():
            saved = torch.load(checkpoint, map_location=plan.device)
            self.step = saved["step"]
            head.load_state_dict(saved["head"])
            for optimiser, state in zip(self._optimisers, saved["optimisers"], strict=True):
                optimiser.load_state_dict(state)

    def train(
        self,
        conversations: Sequence[Observed],
        vocabularies: Vocabularies,
        say: Callable[[str], None],
        pause: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """Go on to the end; return the last losses of the draft steps. `pause` follows a save."""
        plan = self._plan
        per_epoch = sum(1 for _ in batches(conversations, plan.batch_tokens, random.Random(0)))
        total = max(1, round(plan.epochs * per_epoch))
        began, first, saved = time.monotonic(), self.step, time.monotonic()
        recent = list[list[float]]()
        for batch in self._rest(conversations, total):
            each = self._learn(Batch.of(batch, plan.device), vocabularies, total)
            recent = [*recent[1 - _REPORT_EVERY :], each]
            if self.step % _REPORT_EVERY == 0 or self.step == total:
                mean = " ".join(f"{loss:.3f}" for loss in _means(recent))
                left = (time.monotonic() - began) / (self.step - first) * (total - self.step)
                say(f"step {self.step} of {total}: losses {mean}, {left / 60:.0f} min left")
            if time.monotonic() - saved > _CHECKPOINT_S or self.step == total:
                self._save()
                pause()
                saved = time.monotonic()
        return _means(recent)

    def _rest(self, conversations: Sequence[Observed], total: int) -> Iterator[list[Observed]]:
        """The batches that are left; each epoch has an order of its own."""
        step, epoch = 0, 0
        while step < total:
            rng = random.Random(f"{self._plan.seed}:{epoch}")
            for batch in batches(conversations, self._plan.batch_tokens, rng):
                if self.step <= step < total:
                    yield batch
                step += 1
            epoch += 1

    def _learn(self, batch: Batch, vocabularies: Vocabularies, total: int) -> list[float]:
        rate = self._plan.learning_rate * min((self.step + 1) / _WARM_UP, 1 - self.step / total)
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
            optimiser.zero_grad()
        each = losses(self.head, batch, vocabularies, self._plan.draft_steps)
        loss = torch.stack([x * _STEP_WEIGHT**step for step, x in enumerate(each)]).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimiser in self._optimisers:
            optimiser.step()
        self.step += 1
        return [x.item() for x in each]

    def _save(self) -> None:
        fresh = self._checkpoint.with_suffix(".unfinished")
        states = [optimiser.state_dict() for optimiser in self._optimisers]
        torch.save({"step": self.step, "head": self.head.state_dict(), "optimisers": states}, fresh)
        os.replace(fresh, self._checkpoint)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of each column."""
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
