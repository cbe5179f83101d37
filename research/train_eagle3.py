"""Trains an EAGLE-3 head for a dense model that we serve, on text that the model itself writes.

    python research/train_eagle3.py MODEL HEAD --work FOLDER

The model writes conversations while the hidden states that a head reads are captured; then the head
learns, in every draft step, the distribution that the model has there. It may be stopped at any
time: what is in the working folder, conversations and checkpoint, is taken up again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from eagle3.card import Facts, write_card
from eagle3.conversations import ChatFormat
from eagle3.files import Conversations, Parts, draft_vocabulary, read_head, save_head
from eagle3.head import Eagle3Head, HeadShape, initial_head
from eagle3.model import ModelParts
from eagle3.training import Plan, Trainer, Vocabularies, accepted
from eagle3.writing import Observed, Writer
from surestep_worker.config import gpu_is_here, torch_has_cuda
from transformers import AutoTokenizer

_MEASURED = 5  # drafts of a window
_GLANCED_AT = 10  # held-out conversations


def main(argv: Sequence[str] | None = None) -> None:
    """Write, train, save, measure."""
    args = _parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    parts = ModelParts.read(args.model)
    layers = args.layers or _layers(parts.config.num_layers)
    saved = Parts(args.work / "conversations", layers)
    if not args.train_only:
        _write(args, parts, saved, layers)
    if not args.write_only:
        _train(args, parts, saved.read(), layers)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of the model")
    add("head", type=Path, help="folder that is written")
    add("--work", type=Path, required=True, help="folder for conversations and checkpoint")
    add("--tokens", type=int, default=400_000, help="to be written; hidden states of each are kept")
    add("--layers", type=int, nargs="+", help="layers of the model before what is read of it")
    add("--heads", type=int, nargs=2, metavar=("Q", "KV"), help="default: as in the model")
    add("--start", type=Path, metavar="HEAD", help="a head of this tool's to go on with")
    add("--draft-vocab", type=int, default=8192, help="tokens that can be drafted")
    add("--epochs", type=float, default=3.0)
    add("--draft-steps", type=int, default=4, help="that are learnt")
    add("--batch-tokens", type=int, default=1536)
    add("--learning-rate", type=float, default=4e-3)
    add("--slots", type=int, default=64, help="conversations written at once")
    add("--answer-tokens", type=int, default=320, help="of an answer at most")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=0, help="0 = as many as there are cores")
    add("--device", default="cuda" if gpu_is_here() and torch_has_cuda() else "cpu")
    add("--write-only", action="store_true", help="end before training")
    add("--train-only", action="store_true", help="with what has been written")
    return parser.parse_args(argv)


def _layers(count: int) -> list[int]:
    """The last one knows the next token, those in the middle what comes after it."""
    return sorted({round(0.4 * count), round(0.7 * count), count})


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _write(
    args: argparse.Namespace, parts: ModelParts, saved: Parts, layers: Sequence[int]
) -> None:
    """Write what is missing."""
    before = saved.tokens()
    if before >= args.tokens:
        return
    chat = ChatFormat.of(AutoTokenizer.from_pretrained(args.model), parts.config.eos_token_ids)
    writer = Writer(args.model, layers, slots=args.slots, device=args.device)
    began, seed = time.monotonic(), args.seed + len(saved.paths())
    for observed in writer.write(chat, parts.sampling, args.answer_tokens, seed):
        if saved.add(observed):
            tokens = saved.tokens()
            speed = (tokens - before) / (time.monotonic() - began)
            _say(f"{tokens} of {args.tokens} tokens written, {speed:.0f} a second")
            if tokens >= args.tokens:
                return


def _train(
    args: argparse.Namespace,
    parts: ModelParts,
    conversations: Conversations,
    layers: Sequence[int],
) -> None:
    """Train and save; measure what was saved."""
    config, (train, held_out) = parts.config, conversations
    token_ids = draft_vocabulary(train, args.draft_vocab, config.vocab_size)
    vocabularies = Vocabularies.of(parts.embedding, parts.lm_head, token_ids, args.device)
    head = _new_head(args, parts, train, len(layers))
    plan = Plan(
        args.epochs,
        args.draft_steps,
        args.batch_tokens,
        args.learning_rate,
        args.seed,
        args.device,
    )
    trainer = Trainer(head, plan, args.work / "checkpoint.pt")
    lm_head = None if parts.tied else parts.lm_head[token_ids]

    def save() -> None:
        save_head(
            args.head, head, token_ids, layers, config.vocab_size, lm_head, config.max_position
        )
        shares = ", ".join(f"{100 * share:.1f} %" for share in measure(held_out[:_GLANCED_AT]))
        _say(f"saved after {trainer.step} steps; accepted of a few held-out answers: {shares}")

    def measure(answers: Sequence[Observed]) -> list[float]:
        return accepted(head, answers, vocabularies, _MEASURED, args.batch_tokens, args.device)

    trainer.train(train, vocabularies, _say, save)
    wanted = [
        i for each in held_out for i, is_answer in zip(*each.written, strict=True) if is_answer
    ]
    write_card(
        args.head,
        Facts(
            model=args.model.name,
            command=shlex.join(["python", "research/train_eagle3.py", *sys.argv[1:]]),
            conversations=len(train),
            tokens=sum(len(each.written.ids) for each in train),
            answer_tokens=sum(sum(each.written.answered) for each in train),
            held_out=len(held_out),
            layers=layers,
            draft_vocab=len(token_ids),
            covered=float(torch.isin(torch.tensor(wanted), token_ids).double().mean()),
            began=f"that of {args.start}" if args.start else "the model's last one",
            parameters=sum(p.numel() for p in head.parameters()),
            epochs=args.epochs,
            accepted=measure(held_out),
        ),
    )


def _new_head(
    args: argparse.Namespace, parts: ModelParts, train: Sequence[Observed], num_captured: int
) -> Eagle3Head:
    """An untrained one."""
    config = parts.config
    queries, keys = args.heads or (config.num_heads, config.num_kv_heads)
    shape = HeadShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=queries,
        num_kv_heads=keys,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=parts.rope_theta,
        num_captured=num_captured,
    )
    if args.start is not None:
        return read_head(args.start, shape)
    torch.manual_seed(args.seed)
    states = torch.stack([each.captured[-2, -shape.hidden_size :].float() for each in train])
    size = states.square().mean(1).sqrt().median().item()
    return initial_head(shape, parts.weights, config.num_layers - 1, size)


if __name__ == "__main__":
    main()
