"""Measure the engine without HTTP or text: token ids in, token ids out, over the scheduler's gRPC.

python benchmarks/offline.py throughput --scheduler 127.0.0.1:50051
python benchmarks/offline.py speculation --scheduler 127.0.0.1:50051  # drafts off against on
python benchmarks/offline.py speculation --scheduler 127.0.0.1:50051 --num-drafts 1 2 3 4 \
    --concurrency 1 8 32 --text FILE --model FOLDER  # each draft length against none
python benchmarks/offline.py steps --scheduler 127.0.0.1:50051  # steps, and the pauses between them
python benchmarks/offline.py startup --scheduler 127.0.0.1:50051 --launch "surestep serve ..."

`--launch` starts a command first and stops it at the end. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import machine
import uvloop
from launch import Start, launched
from surestep_common import access
from surestep_common.access import PeerSettings
from surestep_common.config import ENV_PREFIX
from surestep_common.rpc import connect
from surestep_proto import sampling_pb2, scheduler_pb2, scheduler_pb2_grpc
from tokenizers import Tokenizer

_PHRASE_TOKENS = 12  # length of what a repetitive prompt repeats
_COMMON_IDS = range(256, 8192)  # byte-pair ids are ordered by frequency; special ids come first


@dataclass(frozen=True, slots=True)
class Round:
    """Every prompt once."""

    tok_s: float
    outputs: list[tuple[int, ...]]
    num_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    step_ms: dict[str, float]  # of the mean step on rank 0, by phase

    def summary(self) -> dict[str, float]:
        """Ratios worth printing."""
        num_tokens = sum(map(len, self.outputs))
        return {
            "tok_s": self.tok_s,
            "tokens_per_step": num_tokens / max(1, self.num_steps),
            "acceptance": self.num_accepted_tokens / max(1, self.num_draft_tokens),
            **self.step_ms,
        }


def requests(
    args: argparse.Namespace, seed: int, num_drafts: int | None
) -> Iterator[scheduler_pb2.GenerateRequest]:
    """Requests to the full length. Prompts depend on `seed`, the index and nothing else."""
    run = uuid.uuid4().hex  # as salt: no round finds another one's prompts in the prefix cache
    for index in range(args.num_prompts):
        rng = random.Random(f"{seed}:{index}")
        sampling = sampling_pb2.SamplingParams(
            temperature=args.temperature,
            top_p=args.top_p,
            repetition_penalty=1,
            seed=rng.getrandbits(64),
        )
        yield scheduler_pb2.GenerateRequest(
            request_id=f"{run}-{index}",
            prompt_ids=prompt(args, rng, index),
            max_tokens=args.max_tokens,
            sampling=sampling,
            cache_salt=run,
            num_draft_tokens=num_drafts,
        )


def prompt(args: argparse.Namespace, rng: random.Random, index: int) -> list[int]:
    """Ids drawn at random, a phrase of them over and over, a piece of the text, or a question."""
    if args.chats is not None:
        questions = chat_ids(args.chats, args.model)
        return questions[index % len(questions)]
    if args.text is not None:
        ids = text_ids(args.text, args.model)
        start = rng.randrange(len(ids) - args.prompt_tokens)
        return ids[start : start + args.prompt_tokens]
    period = _PHRASE_TOKENS if args.prompt_kind == "repeat" else args.prompt_tokens
    phrase = rng.choices(_COMMON_IDS, k=period)
    return [phrase[i % period] for i in range(args.prompt_tokens)]


@cache
def text_ids(text: Path, model: Path) -> list[int]:
    """A text in the ids of a model folder's tokenizer."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return list(tokenizer.encode(text.read_text(), add_special_tokens=False).ids)


@cache
def chat_ids(questions: Path, model: Path) -> list[list[int]]:
    """The lines of a file, each as a chat that the model is to answer."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": line}], add_generation_prompt=True, return_dict=False
        )
        for line in questions.read_text().splitlines()
    ]


async def measure(
    stub: scheduler_pb2_grpc.SchedulerStub,
    args: argparse.Namespace,
    seed: int,
    concurrency: int,
    num_drafts: int | None,
) -> Round:
    """Run a round with so many requests open at most; drafts as the server likes, or so many."""
    gate = asyncio.Semaphore(concurrency)

    async def generate(request: scheduler_pb2.GenerateRequest) -> list[scheduler_pb2.GenerateChunk]:
        async with gate:
            return [chunk async for chunk in stub.Generate(request, timeout=args.timeout)]

    before = await stub.Stats(scheduler_pb2.StatsRequest(), timeout=args.timeout)
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate(r)) for r in requests(args, seed, num_drafts)]
    wall_s = time.perf_counter() - start
    after = await stub.Stats(scheduler_pb2.StatsRequest(), timeout=args.timeout)
    replies = [task.result() for task in tasks]
    outputs = [tuple(i for chunk in reply for i in chunk.token_ids) for reply in replies]
    ends = [reply[-1].end for reply in replies]
    return Round(
        tok_s=sum(map(len, outputs)) / wall_s,
        outputs=outputs,
        num_steps=sum(end.num_steps for end in ends),
        num_draft_tokens=sum(end.num_draft_tokens for end in ends),
        num_accepted_tokens=sum(end.num_accepted_tokens for end in ends),
        step_ms=phases_ms(before, after),
    )


def phases_ms(
    before: scheduler_pb2.SchedulerStats, after: scheduler_pb2.SchedulerStats
) -> dict[str, float]:
    """Return how long rank 0 was in each phase of a step, on average, between two moments."""
    (spent,), (earlier,) = after.steps.ranks[:1], before.steps.ranks[:1]
    num_steps = max(1, after.num_steps - before.num_steps)
    return {
        f"{field.name.removesuffix('_s')}_ms": 1e3
        * (getattr(spent, field.name) - getattr(earlier, field.name))
        / num_steps
        for field in spent.DESCRIPTOR.fields
    }


async def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, with drafts as the server is configured."""
    async with engine(args) as (stub, start):
        limit = max(args.concurrency)
        rounds = [await measure(stub, args, seed, limit, None) for seed in range(args.rounds)]
    return {"start_s": start and start.start_s, **_medians(rounds)}


async def speculation(args: argparse.Namespace) -> dict[str, Any]:
    """Off, then each draft length, then off again ... over the same prompts.

    A speed-up is the median over the rounds of a ratio within one round.
    """
    arms: list[int | None] = args.num_drafts or [None]
    async with engine(args) as (stub, start):
        await measure(stub, args, args.rounds, max(args.concurrency), None)  # warms everything up
        results = {}
        for concurrency in args.concurrency:
            rounds: dict[int | None, list[Round]] = {arm: [] for arm in (0, *arms)}
            for seed in range(args.rounds):
                for arm, done in rounds.items():
                    done.append(await measure(stub, args, seed, concurrency, arm))
            results[concurrency] = _compared(rounds)
    return {"start_s": start and start.start_s, "concurrency": results}


def _compared(rounds: dict[int | None, list[Round]]) -> dict[str, Any]:
    """Every arm against the one without drafts."""
    plain = rounds[0]
    figures: dict[str, Any] = {"off": _medians(plain)}
    for arm, done in rounds.items():
        if arm == 0:
            continue
        pairs = list(zip(plain, done, strict=True))
        equal = [x == y for a, b in pairs for x, y in zip(a.outputs, b.outputs, strict=True)]
        figures["on" if arm is None else f"K={arm}"] = {
            **_medians(done),
            "speedup": statistics.median(b.tok_s / a.tok_s for a, b in pairs),
            "outputs": len(equal),
            "equal_outputs": sum(equal),
        }
    return figures


async def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Quantiles of the last 1000 steps: how long they took, how long workers waited before them.

    A pause is what policy, conversion and RPC cost and pipelining did not hide.
    """
    async with engine(args) as (stub, _):
        for seed in range(args.rounds):
            await measure(stub, args, seed, max(args.concurrency), None)
        stats = await stub.Stats(scheduler_pb2.StatsRequest(), timeout=args.timeout)
    return {
        "step_ms": {"p50": 1e3 * stats.step_time_p50_s, "p99": 1e3 * stats.step_time_p99_s},
        "pause_ms": {"p50": 1e3 * stats.step_gap_p50_s, "p99": 1e3 * stats.step_gap_p99_s},
    }


async def startup(args: argparse.Namespace) -> dict[str, Any]:
    """Measure starts, one per round; the first may find cold caches."""
    starts = []
    for _ in range(args.rounds):
        async with engine(args) as (_, start):
            starts.append(start)
    return {name: [getattr(s, name) for s in starts] for name in Start._fields}


@contextlib.asynccontextmanager
async def engine(
    args: argparse.Namespace,
) -> AsyncIterator[tuple[scheduler_pb2_grpc.SchedulerStub, Start | None]]:
    """The scheduler, launched if asked, and what that took until its first token if so."""
    async with contextlib.AsyncExitStack() as stack:
        server = None
        if args.launch is not None:  # before the channel: gRPC and fork do not like each other
            log_path = Path(tempfile.gettempdir()) / "offline-launch.log"
            server = await stack.enter_async_context(launched(args.launch, log_path))
        channel = await stack.enter_async_context(connect(args.scheduler))
        stub = scheduler_pb2_grpc.SchedulerStub(channel)

        request = next(requests(args, 0, None))
        request.max_tokens = 1

        async def probe() -> bool:
            try:
                return [chunk async for chunk in stub.Generate(request, timeout=args.timeout)] != []
            except grpc.aio.AioRpcError:
                return False

        yield stub, await server.start(probe, args.timeout) if server else None


def _medians(rounds: list[Round]) -> dict[str, float]:
    summaries = [r.summary() for r in rounds]
    return {key: statistics.median(s[key] for s in summaries) for key in summaries[0]}


_MODES = {
    "throughput": throughput,
    "speculation": speculation,
    "steps": steps,
    "startup": startup,
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("mode", choices=_MODES)
    add("--scheduler", required=True, metavar="HOST:PORT")
    add("--launch", metavar="COMMAND", help="what makes a scheduler listen there")
    add("--rounds", type=int, default=3)
    add("--num-prompts", type=int, default=16)
    add("--concurrency", type=int, nargs="+", default=[256], help="most requests open at once")
    add("--num-drafts", type=int, nargs="+", help="draft lengths to compare; default: the server's")
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float, default=1.0)
    add("--text", type=Path, help="prompts are pieces of this file")
    add("--chats", type=Path, help="prompts are the lines of this file, as questions of a chat")
    add("--model", type=Path, help="folder whose tokenizer reads --text or --chats")
    add("--max-tokens", type=int, default=128)
    add("--prompt-tokens", type=int, default=64)
    add("--prompt-kind", choices=["random", "repeat"], help="default: repeat for speculation")
    add("--timeout", type=float, default=600.0, help="seconds per request and per launch")
    args = parser.parse_args(argv)
    if args.mode == "startup" and args.launch is None:
        parser.error("startup needs --launch")
    if (args.text is not None or args.chats is not None) and args.model is None:
        parser.error("--text and --chats need --model")
    args.prompt_kind = args.prompt_kind or ("repeat" if args.mode == "speculation" else "random")
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse(argv)
    if args.launch is not None:  # the server and we share a secret
        os.environ.setdefault(f"{ENV_PREFIX}GRPC_SECRET", secrets.token_urlsafe())
    access.use(PeerSettings.load([]))
    figures = uvloop.run(_MODES[args.mode](args))
    print(json.dumps({"mode": args.mode, **figures, "machine": machine.describe()}))


if __name__ == "__main__":
    main()
