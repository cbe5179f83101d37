"""Measure the engine without HTTP or text: token ids in, token ids out, over the scheduler's gRPC.

python benchmarks/offline.py throughput --scheduler 127.0.0.1:50051
python benchmarks/offline.py speculation --scheduler 127.0.0.1:50051  # drafts off against on
python benchmarks/offline.py startup --scheduler 127.0.0.1:50051 --launch "surestep serve ..."

`--launch` starts a command first and stops it at the end. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import machine
import uvloop
from launch import launched
from surestep_common.rpc import connect
from surestep_proto import engine_pb2, generate_pb2, generate_pb2_grpc

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

    def summary(self) -> dict[str, float]:
        """Ratios worth printing."""
        num_tokens = sum(map(len, self.outputs))
        return {
            "tok_s": self.tok_s,
            "tokens_per_step": num_tokens / max(1, self.num_steps),
            "acceptance": self.num_accepted_tokens / max(1, self.num_draft_tokens),
        }


def requests(
    args: argparse.Namespace, seed: int, *, drafts: bool
) -> Iterator[generate_pb2.GenerateRequest]:
    """Greedy requests to the full length. Prompts depend on `seed`, the index and nothing else."""
    run = uuid.uuid4().hex  # as salt: no round finds another one's prompts in the prefix cache
    sampling = engine_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1)
    for index in range(args.num_prompts):
        rng = random.Random(f"{seed}:{index}")
        period = _PHRASE_TOKENS if args.prompt_kind == "repeat" else args.prompt_tokens
        phrase = rng.choices(_COMMON_IDS, k=period)
        yield generate_pb2.GenerateRequest(
            request_id=f"{run}-{index}",
            prompt_ids=[phrase[i % period] for i in range(args.prompt_tokens)],
            max_tokens=args.max_tokens,
            sampling=sampling,
            cache_salt=run,
            num_draft_tokens=None if drafts else 0,
        )


async def measure(
    stub: generate_pb2_grpc.SchedulerStub, args: argparse.Namespace, seed: int, *, drafts: bool
) -> Round:
    """One round with at most `args.concurrency` requests open."""
    gate = asyncio.Semaphore(args.concurrency)

    async def generate(request: generate_pb2.GenerateRequest) -> list[generate_pb2.GenerateChunk]:
        async with gate:
            return [chunk async for chunk in stub.Generate(request, timeout=args.timeout)]

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(generate(r)) for r in requests(args, seed, drafts=drafts)]
    wall_s = time.perf_counter() - start
    replies = [task.result() for task in tasks]
    outputs = [tuple(i for chunk in reply for i in chunk.token_ids) for reply in replies]
    ends = [reply[-1].end for reply in replies]
    return Round(
        tok_s=sum(map(len, outputs)) / wall_s,
        outputs=outputs,
        num_steps=sum(end.num_steps for end in ends),
        num_draft_tokens=sum(end.num_draft_tokens for end in ends),
        num_accepted_tokens=sum(end.num_accepted_tokens for end in ends),
    )


async def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, with drafts as the server is configured."""
    async with engine(args) as (stub, start_s):
        rounds = [await measure(stub, args, seed, drafts=True) for seed in range(args.rounds)]
    return {"start_s": start_s, **_medians(rounds)}


async def speculation(args: argparse.Namespace) -> dict[str, Any]:
    """Drafts off, on, off, on ... over the same prompts; the speed-up is a median of pairs."""
    off, on = [], []
    async with engine(args) as (stub, start_s):
        for seed in range(args.rounds):
            off.append(await measure(stub, args, seed, drafts=False))
            on.append(await measure(stub, args, seed, drafts=True))
    pairs = list(zip(off, on, strict=True))
    equal = [x == y for a, b in pairs for x, y in zip(a.outputs, b.outputs, strict=True)]
    return {
        "start_s": start_s,
        "off": _medians(off),
        "on": _medians(on),
        "speedup": statistics.median(b.tok_s / a.tok_s for a, b in pairs),
        "outputs": len(equal),
        "equal_outputs": sum(equal),
    }


async def startup(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from launch to first token, once per round; the first may find cold caches."""
    seconds = []
    for _ in range(args.rounds):
        async with engine(args) as (_, start_s):
            seconds.append(start_s)
    return {"start_s": seconds}


@contextlib.asynccontextmanager
async def engine(
    args: argparse.Namespace,
) -> AsyncIterator[tuple[generate_pb2_grpc.SchedulerStub, float | None]]:
    """The scheduler, launched if asked, and the seconds its first token took if so."""
    async with contextlib.AsyncExitStack() as stack:
        server = None
        if args.launch is not None:  # before the channel: gRPC and fork do not like each other
            log_path = Path(tempfile.gettempdir()) / "offline-launch.log"
            server = await stack.enter_async_context(launched(args.launch, log_path))
        channel = await stack.enter_async_context(connect(args.scheduler))
        stub = generate_pb2_grpc.SchedulerStub(channel)

        async def probe() -> bool:
            request = next(requests(args, 0, drafts=True))
            request.max_tokens = 1
            try:
                return [chunk async for chunk in stub.Generate(request, timeout=args.timeout)] != []
            except grpc.aio.AioRpcError:
                return False

        yield stub, await server.first_token(probe, args.timeout) if server else None


def _medians(rounds: list[Round]) -> dict[str, float]:
    summaries = [r.summary() for r in rounds]
    return {key: statistics.median(s[key] for s in summaries) for key in summaries[0]}


_MODES = {"throughput": throughput, "speculation": speculation, "startup": startup}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("mode", choices=_MODES)
    add("--scheduler", required=True, metavar="HOST:PORT")
    add("--launch", metavar="COMMAND", help="what makes a scheduler listen there")
    add("--rounds", type=int, default=3)
    add("--num-prompts", type=int, default=16)
    add("--concurrency", type=int, default=256, help="most requests open at once")
    add("--max-tokens", type=int, default=128)
    add("--prompt-tokens", type=int, default=64)
    add("--prompt-kind", choices=["random", "repeat"], help="default: repeat for speculation")
    add("--timeout", type=float, default=600.0, help="seconds per request and per launch")
    args = parser.parse_args(argv)
    if args.mode == "startup" and args.launch is None:
        parser.error("startup needs --launch")
    args.prompt_kind = args.prompt_kind or ("repeat" if args.mode == "speculation" else "random")
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    args = parse(argv)
    figures = uvloop.run(_MODES[args.mode](args))
    print(json.dumps({"mode": args.mode, **figures, "machine": machine.describe()}))


if __name__ == "__main__":
    main()
