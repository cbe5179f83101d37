"""Speed of the ops of a step on the CPU: the torch references beside the C kernels.

    PYTHONPATH=common:kernels python benchmarks/step_ops.py [--threads 2] [--ops choose ngram]
        [--vocab 49152 151936] [--json results.json]

Microseconds, the best of several runs that alternate, as the machine is shared. Logits are normal
numbers times 3 ("flat") or those with 40 tokens far ahead, as of a model that knows ("peaked").
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from surestep_kernels import KernelSet
from surestep_kernels.choose import Chosen, DrawParams
from surestep_kernels.commit_step import StopIds
from surestep_kernels.cpu import load_cpu
from surestep_kernels.ngram import ngram_reference
from surestep_kernels.shape_logits import Penalties, Positions, Shaping
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from surestep_kernels.table import STEP_REFERENCE, StepOps
from surestep_kernels.write_runs import Runs
from torch import Tensor

WIDTH, BLOCK_SIZE, CONTEXT, DRAFTS, HIDDEN = 2048, 16, 1000, 4, 576
DRAWS = {  # temperature, min_p, top_k (0 = off), top_p
    "greedy": (0.0, 0.0, 0, math.inf),
    "temperature": (0.8, 0.0, 0, math.inf),
    "top_p 0.9": (0.8, 0.0, 0, 0.9),
    "top_k 50": (0.8, 0.0, 50, math.inf),
    "min_p 0.05": (0.8, 0.05, 0, math.inf),
    "all of them": (0.8, 0.05, 50, 0.9),
}


class Case(NamedTuple):
    op: str
    shape: str
    reference: Callable[[], object]
    native: Callable[[], object]


class Step(NamedTuple):
    """Windows of the newest token and some drafts, one for each slot."""

    rows: StepRows
    drafts: DraftIds
    state: SlotState


def words(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def make_step(num_rows: int) -> Step:
    width, lines = 1 + DRAFTS, num_rows + 1
    row, none = torch.arange(num_rows, dtype=torch.int32), torch.zeros(num_rows, dtype=torch.int32)
    cu, token_row = words(range(0, width * lines, width)), row.repeat_interleave(width)
    offset = words(range(width)).repeat(num_rows)
    rows = StepRows(row, cu, none, none, none, none, none, row, token_row, token_row, offset, cu)
    pages = WIDTH // BLOCK_SIZE
    state = SlotState(
        tokens=torch.randint(1000, (lines, WIDTH), dtype=torch.int32),
        block_tables=words(range(lines * pages)).view(1, lines, pages),
        committed=torch.full((lines,), CONTEXT, dtype=torch.int32),
        known=torch.full((lines,), CONTEXT + 1, dtype=torch.int32),
        folded=torch.full((lines,), CONTEXT, dtype=torch.int32),
        drafter_len=torch.zeros(lines, dtype=torch.int32),
    )
    drafts = DraftIds(
        torch.randint(1000, (num_rows, DRAFTS), dtype=torch.int32), torch.full_like(none, DRAFTS)
    )
    return Step(rows, drafts, state)


def slot_cases(native: KernelSet, num_rows: int) -> Iterator[Case]:
    step, error = make_step(num_rows), words([0])
    positions = len(step.rows.position_row)
    chosen = Chosen(torch.randint(1000, (positions,), dtype=torch.int32), torch.ones_like(error))
    chosen = Chosen(chosen.ids, words([1]).repeat(positions))
    stops = StopIds(words(range(num_rows + 1)), torch.full((num_rows,), 2, dtype=torch.int32))
    hidden = torch.randn(positions, HIDDEN).bfloat16()
    valid = torch.full((num_rows,), 1 + DRAFTS, dtype=torch.int32)
    run = torch.arange(num_rows, dtype=torch.int32)
    runs = Runs(run * 32, words(range(0, 8 * num_rows + 1, 8)), words(range(8 * num_rows)), 8)

    def gather(ops: StepOps) -> object:
        sizes = BLOCK_SIZE, step.state.block_tables.numel()
        return ops.gather_step(step.rows, step.drafts, step.state, error, *sizes)

    def commit(ops: StepOps) -> object:
        report = ops.commit_step(step.rows, step.drafts, chosen, stops, step.state)
        step.state.committed.fill_(CONTEXT)
        step.state.known.fill_(CONTEXT + 1)
        return report

    calls: dict[str, Callable[[StepOps], object]] = {
        "gather_step": gather,
        "commit_step": commit,
        "fingerprint": lambda ops: ops.fingerprint(hidden, step.rows, valid),
        "write_runs": lambda ops: ops.write_runs(step.state.tokens.view(-1), runs),
    }
    for op, call in calls.items():
        yield Case(op, f"R={num_rows}", partial(call, STEP_REFERENCE), partial(call, native.step))
    columns = step.rows.slot, torch.full_like(step.rows.slot, CONTEXT), step.drafts.counts
    reference, c = (
        partial(ngram, step.state.tokens, *columns, num_drafts=DRAFTS, max_n=4, min_n=2)
        for ngram in (ngram_reference, native.ngram)
    )
    yield Case("ngram", f"R={num_rows}", reference, c)


def make_draw(num_rows: int, vocab: int, name: str) -> DrawParams:
    temperature, min_p, top_k, top_p = DRAWS[name]
    max_gap = -math.log(min_p) if min_p else math.inf
    low, high = torch.randint(1 << 30, (2, num_rows), dtype=torch.int32)
    return DrawParams(
        torch.full((num_rows,), temperature),
        low,
        high,
        torch.full((num_rows,), max_gap),
        torch.full((num_rows,), top_k or vocab, dtype=torch.int32),
        torch.full((num_rows,), top_p),
    )


def choose_cases(native: KernelSet, vocab: int, num_rows: int) -> Iterator[Case]:
    window = torch.arange(num_rows, dtype=torch.int32)
    length = torch.randint(1 << 20, (num_rows,), dtype=torch.int32)
    for kind, ahead in (("flat", 0.0), ("peaked", 12.0)):
        z = torch.randn(num_rows, vocab) * 3
        z[:, :: -(-vocab // 40)] += ahead
        for name, (temperature, *_) in DRAWS.items():
            params, random = make_draw(num_rows, vocab, name), temperature > 0
            truncated = name not in ("greedy", "temperature")
            reference, c = (
                partial(ops.choose, z, window, length, params, random=random, truncated=truncated)
                for ops in (STEP_REFERENCE, native.step)
            )
            yield Case("choose", f"V={vocab} N={num_rows} {kind} {name}", reference, c)


def shape_cases(native: KernelSet, vocab: int, num_rows: int) -> Iterator[Case]:
    z, which = torch.randn(num_rows, vocab), torch.arange(num_rows, dtype=torch.int32)
    tokens = torch.randint(vocab, (num_rows, WIDTH), dtype=torch.int32)
    at = Positions(which, which, torch.full_like(which, CONTEXT), tokens)
    factors = (torch.full((num_rows,), value) for value in (1.1, 0.1, 0.1))
    asked = Shaping(penalties=Penalties(which, torch.full_like(which, CONTEXT // 2), *factors))
    reference, c = (
        partial(ops.shape_logits, z, at, asked) for ops in (STEP_REFERENCE, native.step)
    )
    yield Case("shape_logits", f"V={vocab} N={num_rows} penalties", reference, c)


def cases(native: KernelSet, vocabs: list[int]) -> Iterator[Case]:
    for num_rows in (1, 32, 256):
        yield from slot_cases(native, num_rows)
    for vocab in vocabs:
        for num_rows in (1, 8, 32, 64):
            yield from shape_cases(native, vocab, num_rows)
            yield from choose_cases(native, vocab, num_rows)


def best_us(runs: list[Callable[[], object]], budget: float) -> list[float]:
    """The shortest of as many rounds as fit the budget, after one that warms up."""
    best, began = [math.inf] * len(runs), time.perf_counter()
    for run in runs:
        run()
    for round_number in range(1000):
        for i, run in enumerate(runs):
            before = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - before)
        if round_number >= 2 and time.perf_counter() - began > budget:
            break
    return [seconds * 1e6 for seconds in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ops", nargs="*", help="by default all")
    parser.add_argument("--vocab", nargs="*", type=int, default=[49152, 151936])
    parser.add_argument("--seconds", type=float, default=0.3, help="for each case")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    native, lines = load_cpu(), list[dict[str, Any]]()
    native.set_num_threads(args.threads)
    for case in cases(native, args.vocab):
        if args.ops and case.op not in args.ops:
            continue
        reference, c = best_us([case.reference, case.native], args.seconds)
        print(f"{case.op:12} {case.shape:36} {reference:10.1f} {c:8.1f}", flush=True)
        figures = {"reference_us": round(reference, 1), "c_us": round(c, 1)}
        lines.append({"op": case.op, "shape": case.shape, "threads": args.threads, **figures})
    if args.json:
        args.json.write_text("\n".join(json.dumps(line) for line in lines) + "\n")


if __name__ == "__main__":
    main()
