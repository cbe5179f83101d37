"""Tokens per second of decoding on a device, beside what its memory allows; JSON lines.

    PYTHONPATH=proto:common:kernels:worker_svc:benchmarks python -m gpu.decode --model FOLDER \
        [--batch 1 8 64 256] [--context 1024] [--window 4] [--depth 1] [--top-p 0.9] \
        [--prompts 512 2048] [--max-model-len N] [--programmatic-dependent-launch] \
        [--transformers] [--out FILE]

One runner in this process, no scheduler: rows with a context of arbitrary tokens decode a number of
steps, at each --depth: 1 = one step under way while the next is launched, 0 = none. The roofline is
the time that reading the weights and the keys and values of all contexts takes at the copy
bandwidth, which is measured in the same run. --window also times steps that verify so many rows of
each request, at the first depth. --top-p also times steps that draw within it. --prompts also
times prompts of these lengths, one alone, in steps of as many tokens as serving has.
--max-model-len is what a request has room for, if that is more than it needs here. --transformers
decodes the same batches with transformers' own generation. seconds_to_ready counts from the start
of this process to a rank that can step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import machine
import numpy as np
import torch
from surestep_proto import sampling_pb2
from surestep_proto import worker_pb2 as pb
from surestep_worker.config import WorkerSettings
from surestep_worker.startup.build import build_runner
from surestep_worker.step.buckets import add_admission, add_row
from surestep_worker.step.result import Pending

_STEPS, WARM_STEPS, _PROMPTS = 48, 8, 3
_GIB = 1 << 30


class Step(NamedTuple):
    """Finished step."""

    launch_s: float  # in which the host was launching
    ended: float  # by perf_counter
    digest: int  # of its tokens and of the bits of its hidden states


def main(argv: Sequence[str] | None = None) -> None:
    """Build once, then time every batch."""
    args = _parse(argv)
    bench = Bench(args, args.prompts)
    facts = bench.built.facts
    ready = machine.seconds_since_start()
    about: dict[str, Any] = (
        machine.describe()
        | machine.accelerator(args.device)
        | {
            "device": facts.device,
            "architecture": facts.architecture,
            "weight_gib": round(facts.weight_bytes / _GIB, 2),
            "copy_gb_s": round(copy_bandwidth(args.device) / 1e9, 1),
            "seconds_to_ready": round(ready, 1),
        }
    )
    _print(about)
    lines = list[dict[str, Any]]()
    for line in _lines(bench, args, about["copy_gb_s"]):
        _print(line)
        lines.append(line)
        machine.write(args.out, about, decode=lines)  # as far as it has come


def _lines(bench: Bench, args: argparse.Namespace, copy_gb_s: float) -> Iterator[dict[str, Any]]:
    for batch in args.batch:
        for depth in args.depth:
            yield bench.figures(batch, 1, depth, copy_gb_s)
        if args.window:
            yield bench.figures(batch, args.window, args.depth[0], copy_gb_s)
        if args.top_p < 1:
            yield bench.figures(batch, 1, args.depth[0], copy_gb_s, top_p=args.top_p)
    for length in args.prompts:
        yield bench.prompt_figures(length)
    if args.transformers:
        for batch in args.batch:
            yield {"transformers": True, "batch": batch} | transformers_figures(args, batch)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of_bench(__doc__, batch=[1, 8, 64, 256], window=4)
    parser.add_argument(
        "--depth", type=int, nargs="+", default=[1], help="steps under way beside the newest"
    )
    parser.add_argument("--top-p", type=float, default=1.0, help="1 = greedy alone")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--prompts", type=int, nargs="+", default=[], help="their lengths")
    return parser.parse_args(argv)


def parser_of_bench(doc: str | None, *, batch: list[int], window: int) -> argparse.ArgumentParser:
    """Return the parser of a Bench's arguments, with these defaults."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0] if doc else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=batch)
    parser.add_argument("--context", type=int, default=1024, help="tokens in front of each row")
    parser.add_argument(
        "--window", type=int, default=window, help="rows of a verify window; 0 = none"
    )
    parser.add_argument("--max-model-len", type=int, default=0, help="0 = what is needed here")
    parser.add_argument("--kv-memory", type=float, default=16.0, help="GiB")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--programmatic-dependent-launch", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    return parser


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of copying a large tensor."""
    size = _GIB if device == "cuda" else _GIB >> 4
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def once() -> float:
        began = time.perf_counter()
        target.copy_(source)
        _synchronise(device)
        return time.perf_counter() - began

    return 2 * size / min(once() for _ in range(8))


class Bench:
    """A runner whose slots 0, 1, .. decode."""

    def __init__(self, args: argparse.Namespace, prompts: Sequence[int] = ()) -> None:
        self._args = args
        drafts = max(args.window - 1, 0)
        speculation = {"method": "ngram", "num_speculative_tokens": drafts} if drafts else None
        length = args.context + (_STEPS + WARM_STEPS) * (drafts + 1) + 2 * drafts + 2
        settings = WorkerSettings(
            model=args.model,
            device=args.device,
            dtype=args.dtype,
            max_model_len=max(length, args.max_model_len, *(drafts + 2 + n for n in prompts)),
            max_num_seqs=max(args.batch),
            kv_cache_memory=args.kv_memory,
            speculative_config=speculation,
            enforce_eager=args.enforce_eager,
            programmatic_dependent_launch=args.programmatic_dependent_launch,
        )
        self.built = build_runner(settings)
        self._blocks = -(-length // settings.block_size)
        self._length = length
        self._epoch = 1000  # behind those of the rehearsal

    def figures(
        self, batch: int, width: int, depth: int, copy_gb_s: float, top_p: float = 1.0
    ) -> dict[str, Any]:
        """Return figures of decoding `batch` requests, `width` rows of each at a time."""
        facts = self.built.facts
        if 1 + batch * self._blocks > facts.num_blocks:
            return {"batch": batch, "skipped": f"{facts.num_blocks} KV blocks are too few"}
        steps = list(self.steps(batch, width, depth, top_p))[WARM_STEPS : _STEPS + 1 - depth]
        gaps = [after.ended - before.ended for before, after in itertools.pairwise(steps)]
        step_ms = 1e3 * statistics.median(gaps)
        kv = batch * self._args.context * facts.kv_cache_bytes / facts.num_blocks / facts.block_size
        roofline_ms = (facts.weight_bytes + kv) / copy_gb_s / 1e6
        return {
            "batch": batch,
            "window": width,
            "depth": depth,
            "top_p": top_p,
            "max_model_len": facts.max_model_len,
            "step_ms": round(step_ms, 3),
            "host_ms": round(1e3 * statistics.median(step.launch_s for step in steps), 3),
            "steps_per_s": round(1e3 / step_ms, 1),
            "tokens_per_s": round(1e3 * batch / step_ms, 1),
            "roofline_ms": round(roofline_ms, 3),
            "roofline_percent": round(100 * roofline_ms / step_ms, 1),
            "late_compilations": self.built.runner.num_late_compilations,  # so far; 0 is right
        }

    def prompt_figures(self, length: int) -> dict[str, Any]:
        """Return figures of the first token behind a prompt: the best, after one to warm up."""
        seconds = [self._prompt(length) for _ in range(1 + _PROMPTS)][1:]
        return {
            "prompt": length,
            "first_token_ms": round(1e3 * min(seconds), 3),
            "tokens_per_s": round(length / min(seconds), 1),
            "late_compilations": self.built.runner.num_late_compilations,
        }

    def _prompt(self, length: int) -> float:
        """Seconds, with one step under way while the next is launched."""
        self._epoch += 1
        runner, context = self.built.runner, self.built.runner.context
        runner.open(self._epoch)
        groups, most = len(context.slots.block_tables), context.max_step_tokens
        blocks = -(-(length + 1) // context.slots.block_size)
        tables = [range(1 + group * blocks, 1 + (group + 1) * blocks) for group in range(groups)]
        ids = [(7 * i + 1) % min(1000, self.built.facts.vocab_size) for i in range(length)]
        under_way, began = deque[Pending](), time.perf_counter()
        for step, start in enumerate(range(0, length, most), start=1):
            plan, count = pb.StepPlan(epoch=self._epoch, step=step), min(most, length - start)
            mode = pb.PREFILL_LAST if start + count == length else pb.PREFILL
            add_row(plan, 0, mode, start, num_tokens=count, last_step=step - 1)
            if step == 1:
                add_admission(plan, 0, ids, tables, context.slots.tokens.shape[1])
            else:
                plan.len_lo[0] = int(context.slots.committed[0])  # one step is under way
            under_way.append(runner.launch(plan))
            if step > 1:
                _finish(under_way.popleft(), 0.0)
        _finish(under_way.popleft(), 0.0)
        return time.perf_counter() - began

    def steps(self, batch: int, width: int, depth: int, top_p: float = 1.0) -> Iterator[Step]:
        """Steps as they finish, `depth` behind those launched: plans know bounds of lengths alone.

        The first is the end of the prompt, and waited for.
        """
        self._epoch += 1
        runner = self.built.runner
        runner.open(self._epoch)
        recurrent = runner.context.caches.recurrent
        if recurrent is not None:  # any state will do
            recurrent.mark_taken(np.array([1]), np.array([self._args.context]))
        under_way: deque[tuple[Pending, float]] = deque()
        for plan in self._plans(batch, width, top_p):
            began = time.perf_counter()
            pending = runner.launch(plan)
            under_way.append((pending, time.perf_counter() - began))
            runner.capture_missed()  # the first step of a shape is launched singly
            while len(under_way) > (depth if plan.step > 1 else 0):
                yield _finish(*under_way.popleft())
        while under_way:
            yield _finish(*under_way.popleft())

    def _plans(self, batch: int, width: int, top_p: float) -> Iterator[pb.StepPlan]:
        """The end of a prompt, then steps; lengths are planned as if every draft were accepted."""
        slots, context = self.built.runner.context.slots, self._args.context
        snapshot_id = int(self.built.facts.recurrent)
        plan = pb.StepPlan(epoch=self._epoch, step=1)
        drawn = float(top_p < 1)
        sampling = sampling_pb2.SamplingParams(temperature=drawn, top_p=top_p, repetition_penalty=1)
        for slot in range(batch):
            plan.admissions.add(
                slot=slot,
                slot_epoch=1,
                token_ids=[(7 * slot + 1) % 1000] * (context + 1),
                prompt_len=context + 1,
                num_cached=context,
                max_len=self._length,
                sampling=sampling,
                snapshot_id=snapshot_id,
            )
            plan.extend_slots.append(slot)
            plan.extend_counts.append(self._blocks)
            plan.block_ids.extend(range(1 + slot * self._blocks, 1 + (slot + 1) * self._blocks))
            _add_row(plan, slot, pb.PREFILL_LAST, context, context, width=1)
        yield plan
        for step in range(2, 2 + _STEPS):
            plan = pb.StepPlan(epoch=self._epoch, step=step)
            for slot in range(batch):
                low = int(slots.committed[slot])
                high = context + 1 + (step - 2) * width
                mode = pb.VERIFY if width > 1 else pb.DECODE
                _add_row(plan, slot, mode, low, high, width)
            yield plan


def _finish(pending: Pending, launch_s: float) -> Step:
    pending.wait()
    result = pending.finish()
    return Step(launch_s, time.perf_counter(), result.digest)


def _add_row(
    plan: pb.StepPlan, slot: int, mode: pb.DecodeMode, low: int, high: int, width: int
) -> None:
    plan.slot.append(slot)
    plan.slot_epoch.append(1)
    plan.mode.append(mode)
    plan.num_tokens.append(int(mode == pb.PREFILL_LAST))
    plan.len_lo.append(low)
    plan.len_hi.append(high)
    plan.max_drafts.append(width - 1)
    plan.accepted_step.append(0)
    plan.accepted.append(0)
    plan.depends_on_step.append(plan.step - 1)
    plan.catch_up.append(0)
    plan.max_proposed.append(width - 1)
    plan.max_looked_up.append(0)


def transformers_figures(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Greedy generation by transformers on the same device."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model.to(args.device)
    ids = torch.ones(batch, args.context, dtype=torch.int64, device=args.device)

    def seconds(new: int) -> float:
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        _synchronise(args.device)
        return time.perf_counter() - began

    seconds(2)
    step_s = (seconds(_STEPS) - seconds(2)) / (_STEPS - 2)
    return {"step_ms": round(1e3 * step_s, 3), "tokens_per_s": round(batch / step_s, 1)}


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
