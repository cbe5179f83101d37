"""Where do greedy answers part? Our engine, the same with drafts, and transformers; JSON.

    PYTHONPATH=proto:common:kernels:scheduler_svc:worker_svc:benchmarks python -m gpu.divergence \
        --model FOLDER [--prompts 16] [--max-tokens 64] [--dtype bfloat16] [--out FILE]

In float32 answers are to be equal. In bfloat16 products round differently for another number of
rows, so that two sound runs may part where the two best logits are all but equal: each first
difference comes with its position and with that gap, as transformers computes it for the tokens on
which both agree. Prompts are arbitrary tokens, repeated, so that n-gram drafts find something.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
from generation import greedy
from surestep_worker.config import WorkerSettings
from surestep_worker.startup.build import build_runner
from torch import Tensor

_PATTERN = 24  # tokens, then the same again


class Divergence(NamedTuple):
    """The first token in which two answers to a prompt differ."""

    prompt: int
    position: int  # in the answer
    tokens: tuple[int, int]
    gap: float  # between the two best logits there
    best: tuple[int, int]  # the ids of these two


def main(argv: Sequence[str] | None = None) -> None:
    """Answer three times, compare, print."""
    args = _parse(argv)
    about = machine.describe() | machine.accelerator(args.device)
    model = _transformers(args)
    prompts = make_prompts(args.prompts, args.prompt_tokens, model.config.vocab_size)
    theirs = [_answer(model, prompt, args.max_tokens) for prompt in prompts]
    figures: dict[str, Any] = {"dtype": args.dtype, "tokens": args.prompts * args.max_tokens}
    plain = _ours(args, prompts, None)
    figures["ours and transformers"] = report(model, prompts, plain, theirs)
    machine.write(args.out, about, divergence=figures)  # as far as it has come
    drafted = _ours(args, prompts, args.speculative_config)
    figures["with drafts and without"] = report(model, prompts, drafted, plain)
    print(json.dumps(about | figures, indent=1))
    machine.write(args.out, about, divergence=figures)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--speculative-config",
        type=json.loads,
        default={"method": "ngram", "num_speculative_tokens": 4},
    )
    parser.add_argument("--kv-memory", type=float, default=4.0, help="GiB")
    parser.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    return parser.parse_args(argv)


def make_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Each a pattern of its own, again and again."""
    rng = random.Random(0)
    patterns = ([rng.randrange(3, vocab_size) for _ in range(_PATTERN)] for _ in range(count))
    return [(pattern * (length // _PATTERN + 1))[:length] for pattern in patterns]


def _ours(
    args: argparse.Namespace, prompts: Sequence[Sequence[int]], speculation: dict[str, Any] | None
) -> list[list[int]]:
    settings = WorkerSettings(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        max_model_len=args.prompt_tokens + args.max_tokens,
        max_num_seqs=args.prompts,
        kv_cache_memory=args.kv_memory,
        speculative_config=speculation,
    )
    return greedy(build_runner(settings), prompts, args.max_tokens)


def _transformers(args: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, args.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    return model.to(args.device).eval()


def _answer(model: Any, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy generation by transformers, one prompt at a time, which nothing stops."""
    ids = torch.tensor([prompt], device=model.device)
    done = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = done[0, len(prompt) :].tolist()
    return answer


def report(
    model: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Report how many answers are equal, and where and how narrowly the rest part."""
    found = list[Divergence]()
    for index, (prompt, one, other) in enumerate(zip(prompts, answers, others, strict=True)):
        at = first_difference(one, other)
        if at is not None:
            gap, best = _gap(_logits(model, [*prompt, *one[:at]]))
            found.append(Divergence(index, at, (one[at], other[at]), gap, best))
    return {
        "answers": len(prompts),
        "equal": len(prompts) - len(found),
        "median_position": statistics.median(d.position for d in found) if found else None,
        "largest_gap": max((d.gap for d in found), default=None),
        "first_differences": [d._asdict() for d in found],
    }


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that is not in both; None for equal answers of equal length."""
    assert len(one) == len(other)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


@torch.inference_mode()
def _logits(model: Any, ids: Sequence[int]) -> Tensor:
    """f32[V] of what follows `ids`."""
    logits: Tensor = model(torch.tensor([ids], device=model.device)).logits[0, -1]
    return logits.float()


def _gap(logits: Tensor) -> tuple[float, tuple[int, int]]:
    values, ids = logits.topk(2)
    return float(values[0] - values[1]), (int(ids[0]), int(ids[1]))


if __name__ == "__main__":
    main()
