"""Tokens per second of decoding on a device, beside what its memory allows; JSON lines.

    PYTHONPATH=proto:common:kernels:worker_svc python benchmarks/gpu_decode.py --model FOLDER \
        [--batch 1 8 64 256] [--context 1024] [--window 4] [--device cuda] [--transformers]

One runner in this process, no scheduler: rows with a context of arbitrary tokens decode a number of
steps, one in flight while the next is planned (--depth 1), or none (--depth 0). The roofline is the
time that reading the weights and the keys and values of all contexts takes at the copy bandwidth,
which is measured in the same run. --window also times steps that verify so many rows of each
request. --transformers decodes the same batches with transformers' own generation.
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
import torch
from surestep_proto import engine_pb2 as pb
from surestep_worker.build import build_runner
from surestep_worker.config import WorkerSettings
from surestep_worker.pending import Pending

_STEPS, _WARM_STEPS = 48, 8
_GIB = 1 << 30


class Figures(NamedTuple):
    """Of steps of one kind."""

    step_ms: float  # median over the steps, launches and results included
    host_ms: float  # of which the host was launching


def main(argv: Sequence[str] | None = None) -> None:
    """Build once, then time every batch."""
    args = _parse(argv)
    began = time.monotonic()
    bench = Bench(args)
    facts = bench.built.facts
    about: dict[str, Any] = machine.describe() | {
        "device": facts.device,
        "card": torch.cuda.get_device_name() if args.device == "cuda" else "",
        "torch": torch.__version__,
        "architecture": facts.architecture,
        "weight_gib": round(facts.weight_bytes / _GIB, 2),
        "copy_gb_s": round(copy_bandwidth(args.device) / 1e9, 1),
        "seconds_to_ready": round(time.monotonic() - began, 1),
    }
    _print(about)
    for batch in args.batch:
        for width in (1, args.window) if args.window else (1,):
            _print(bench.figures(batch, width, about["copy_gb_s"]))
    if args.transformers:
        for batch in args.batch:
            _print({"transformers": True, "batch": batch} | transformers_figures(args, batch))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=1024, help="tokens in front of each row")
    parser.add_argument("--window", type=int, default=4, help="rows of a verify window; 0 = none")
    parser.add_argument("--depth", type=int, default=1, help="steps under way beside the newest")
    parser.add_argument("--kv-memory", type=float, default=16.0, help="GiB")
    parser.add_argument("--transformers", action="store_true")
    return parser.parse_args(argv)


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

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        drafts = max(args.window - 1, 0)
        speculation = {"method": "ngram", "num_speculative_tokens": drafts} if drafts else None
        length = args.context + (_STEPS + _WARM_STEPS) * (drafts + 1) + 2 * drafts + 2
        settings = WorkerSettings(
            model=args.model,
            device=args.device,
            dtype=args.dtype,
            max_model_len=length,
            max_num_seqs=max(args.batch),
            kv_cache_memory=args.kv_memory,
            speculative_config=speculation,
        )
        self.built = build_runner(settings)
        self._blocks = -(-length // settings.block_size)
        self._length = length
        self._epoch = 1000  # behind those of the rehearsal

    def figures(self, batch: int, width: int, copy_gb_s: float) -> dict[str, Any]:
        """Of decoding `batch` requests, `width` rows of each at a time."""
        facts = self.built.facts
        if 1 + batch * self._blocks > facts.num_blocks:
            return {"batch": batch, "skipped": f"{facts.num_blocks} KV blocks are too few"}
        figures = self._time(batch, width)
        kv = batch * self._args.context * facts.kv_cache_bytes / facts.num_blocks / facts.block_size
        roofline_ms = (facts.weight_bytes + kv) / copy_gb_s / 1e6
        return {
            "batch": batch,
            "window": width,
            "step_ms": round(figures.step_ms, 3),
            "host_ms": round(figures.host_ms, 3),
            "steps_per_s": round(1e3 / figures.step_ms, 1),
            "tokens_per_s": round(1e3 * batch / figures.step_ms, 1),
            "roofline_ms": round(roofline_ms, 3),
            "roofline_percent": round(100 * roofline_ms / figures.step_ms, 1),
        }

    def _time(self, batch: int, width: int) -> Figures:
        """Steps at the pipelining depth asked for: plans know bounds of lengths alone."""
        self._epoch += 1
        runner = self.built.runner
        runner.open(self._epoch)
        under_way: deque[Pending] = deque()
        ended, launching = list[float](), list[float]()
        for plan in self._plans(batch, width):
            began = time.perf_counter()
            under_way.append(runner.launch(plan))
            launching.append(time.perf_counter() - began)
            while len(under_way) > (self._args.depth if plan.step > 1 else 0):
                pending = under_way.popleft()
                pending.wait()
                pending.finish()
                ended.append(time.perf_counter())
        gaps = [after - before for before, after in itertools.pairwise(ended)]
        return Figures(
            1e3 * statistics.median(gaps[_WARM_STEPS:]),
            1e3 * statistics.median(launching[_WARM_STEPS:]),
        )

    def _plans(self, batch: int, width: int) -> Iterator[pb.StepPlan]:
        """The end of a prompt, then steps; lengths are planned as if every draft were accepted."""
        slots, context = self.built.runner.parts.slots, self._args.context
        plan = pb.StepPlan(epoch=self._epoch, step=1)
        sampling = pb.SamplingParams(top_p=1, repetition_penalty=1)
        for slot in range(batch):
            plan.admissions.add(
                slot=slot, slot_epoch=1, token_ids=[(7 * slot + 1) % 1000] * (context + 1),
                prompt_len=context + 1, num_cached=context, max_len=self._length, sampling=sampling,
            )  # fmt: skip
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


def _add_row(
    plan: pb.StepPlan, slot: int, mode: pb.DecodeMode, low: int, high: int, width: int
) -> None:
    plan.slot.append(slot)
    plan.slot_epoch.append(1)
    plan.mode.append(mode)
    plan.num_tokens.append(int(mode == pb.PREFILL_LAST))
    plan.len_lo.append(low)
    plan.len_hi.append(high)
    plan.k_cap.append(width - 1)
    plan.accepted_step.append(0)
    plan.accepted.append(0)
    plan.depends_on_step.append(plan.step - 1)
    plan.catch_up.append(0)


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
