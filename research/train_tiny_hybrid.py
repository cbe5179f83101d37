"""Trains a tiny Qwen3.5-shaped hybrid and its MTP head on the CPU, and saves both as a checkpoint.

    PYTHONPATH=tests python research/train_tiny_hybrid.py tests/data/tiny-hybrid

First the trunk learns to predict text, then the head, with the trunk frozen, learns to predict the
trunk: every draft step is trained on the distribution that the trunk itself gives at that place,
with the head's own outputs recycled. The folder's README.md is written last, from measurements on
the saved files.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from support.references.mtp import MtpReference
from tiny_hybrid.checkpoint import new_head, new_trunk, save
from tiny_hybrid.corpus import Batches, make_tokenizer, text
from tiny_hybrid.evaluate import evaluate
from tiny_hybrid.report import write_report
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3_5ForCausalLM

MAX_LENGTH = 2048
DRAFT_STEPS = 4
_WARMUP = 20
_REPORT_EVERY = 25


def main() -> None:
    """Train, save, measure."""
    options = _options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    train, held_out = text()
    tokenizer = make_tokenizer(train, MAX_LENGTH)
    trunk = new_trunk(MAX_LENGTH)
    batches = Batches(tokenizer, train, options.rows, options.length, options.seed)
    begin = time.monotonic()
    trunk_loss = train_trunk(trunk, batches, options.trunk_steps, options.learning_rate)
    head = new_head(trunk)
    head_loss = train_head(trunk, head, batches, options.head_steps, options.learning_rate)
    seconds = time.monotonic() - begin
    save(options.folder, trunk, head, tokenizer)
    evaluation = evaluate(options.folder, held_out, DRAFT_STEPS)
    command = shlex.join(["python", "research/train_tiny_hybrid.py", *sys.argv[1:]])
    write_report(options.folder, command, seconds, (trunk_loss, head_loss), evaluation)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trunk-steps", type=int, default=450)
    parser.add_argument("--head-steps", type=int, default=220)
    parser.add_argument("--rows", type=int, default=8, help="windows per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per window")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train_trunk(trunk: Qwen3_5ForCausalLM, batches: Batches, steps: int, rate: float) -> float:
    """Next-token cross entropy; returns the last loss, in nats per token."""

    def loss() -> Tensor:
        tokens, counts = batches.next()
        logits = trunk(tokens[:, :-1]).logits
        return cross_entropy(logits[counts[:, :-1]], tokens[:, 1:][counts[:, :-1]])

    trunk.train()
    last = _minimise("trunk", loss, trunk.parameters(), steps, rate)
    trunk.eval().requires_grad_(False)
    return last


def train_head(
    trunk: Qwen3_5ForCausalLM, head: dict[str, Tensor], batches: Batches, steps: int, rate: float
) -> float:
    """Cross entropy of every draft step with the frozen trunk's own distribution; the last loss."""
    embedding = trunk.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    reference = MtpReference(trunk.config.to_dict(), head, embedding)

    def loss() -> Tensor:
        tokens, counts = batches.next()
        hidden = trunk.model(tokens).last_hidden_state
        wanted = reference.logits(hidden).softmax(dim=-1)
        losses = []
        for step, output in enumerate(reference.chains(tokens, hidden, DRAFT_STEPS), start=1):
            place = slice(step, step + output.shape[1])
            chosen = counts[:, place]
            logits = reference.logits(output)[chosen]
            losses.append(cross_entropy(logits, wanted[:, place][chosen]))
        return torch.stack(losses).mean()

    return _minimise("head", loss, head.values(), steps, rate)


def _minimise(
    what: str,
    loss: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    steps: int,
    rate: float,
) -> float:
    """AdamW with a short warm-up and a linear decay to zero."""
    every = [parameter.requires_grad_() for parameter in parameters]
    optimiser = torch.optim.AdamW(every, lr=rate, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / _WARMUP, (steps - step) / steps)
    )
    recent: list[float] = []
    begin = time.monotonic()
    for step in range(1, steps + 1):
        optimiser.zero_grad()
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(every, 1.0)
        optimiser.step()
        schedule.step()
        recent = [*recent[-_REPORT_EVERY + 1 :], value.item()]
        if step % _REPORT_EVERY == 0 or step == steps:
            mean = sum(recent) / len(recent)
            passed = time.monotonic() - begin
            print(f"{what} step {step:4d} of {steps}: loss {mean:.3f}, {passed:.0f} s", flush=True)
    return sum(recent) / max(len(recent), 1)


if __name__ == "__main__":
    main()
