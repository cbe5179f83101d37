"""Measure what the folder behind the KV blocks saves the second turn of a chat after a restart.

python benchmarks/kv_tiers.py                        # random weights of the default model's size
python benchmarks/kv_tiers.py --model FOLDER --device cuda --rounds 5

A supervisor with its rank and a scheduler answer the first turn, end, and are started again for
the second, in turns with and without the folder. Prints one JSON line: the wait for the first token
of the second turn, how many of its tokens were not computed, and whether the answers are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import machine
import uvloop
from recovery import ask_status, random_model, scheduled, until
from surestep_proto import sampling_pb2, scheduler_pb2
from surestep_proto import supervisor_pb2 as pb

_VOCAB = 32000
_LAYERS, _WIDTH = 30, 576  # of the default model, but for its heads: here each has keys of its own
_BLOCK = 16  # tokens
_POLL_S = 0.05
_FOLDER = "SURESTEP_KV_OFFLOADING_FOLDER"


async def turn(folder: Path, prompt: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Start everything, answer a prompt, and end when the folder, if there is one, has it."""
    async with served(folder, args) as scheduler:
        request = scheduler_pb2.GenerateRequest(
            request_id=str(len(prompt)),
            prompt_ids=prompt,
            max_tokens=args.max_tokens,
            sampling=sampling_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1),
            ignore_eos=True,
        )
        began, first, answer = time.monotonic(), 0.0, list[int]()
        async for chunk in scheduler.Generate(request):
            if chunk.token_ids and not answer:
                first = time.monotonic() - began
            answer += chunk.token_ids
        if _FOLDER in os.environ:
            await stored(Path(os.environ[_FOLDER]), (len(prompt) + args.max_tokens - 1) // _BLOCK)
        stats = await scheduler.Stats(scheduler_pb2.StatsRequest())
    return {"first_token_s": first, "answer": answer, "loaded": stats.num_tier_hits}


@contextlib.asynccontextmanager
async def served(folder: Path, args: argparse.Namespace) -> AsyncIterator[Any]:
    """A scheduler that serves."""
    async with scheduled(folder, args, "") as (supervisor, scheduler):
        await until(supervisor, lambda now: now.rank_state == pb.READY, args.timeout)
        async with asyncio.timeout(args.timeout):
            while (await ask_status(scheduler)).state != scheduler_pb2.SERVING:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        yield scheduler


async def stored(folder: Path, num_blocks: int) -> None:
    """Return when the folder has so many blocks."""
    async with asyncio.timeout(60):
        while await asyncio.to_thread(_num_files, folder) < num_blocks:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


def _num_files(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.*"))


async def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both turns, with and without the folder, so many times."""
    found: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    for number in range(args.rounds):
        rng = random.Random(number)
        prompt = [rng.randrange(3, _VOCAB) for _ in range(args.prompt_tokens)]
        more = [rng.randrange(3, _VOCAB) for _ in range(args.more_tokens)]
        for name, rounds in found.items():
            with tempfile.TemporaryDirectory() as tier:
                os.environ.pop(_FOLDER, None)
                if name == "with":
                    os.environ[_FOLDER] = tier
                first = await turn(folder, prompt, args)
                second = await turn(folder, [*prompt, *first["answer"], *more], args)
                rounds.append(second)
    medians = {
        name: statistics.median(second["first_token_s"] for second in rounds)
        for name, rounds in found.items()
    }
    return {
        "first_token_s": {
            name: [round(second["first_token_s"], 3) for second in rounds]
            for name, rounds in found.items()
        },
        "times_as_fast": round(medians["without"] / medians["with"], 2),
        "loaded_tokens": [second["loaded"] for second in found["with"]],
        "equal_answers": [
            a["answer"] == b["answer"] for a, b in zip(found["with"], found["without"], strict=True)
        ],
    }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure a model, or random weights."""
    if args.model:
        return await measure(args.model, args)
    with tempfile.TemporaryDirectory() as scratch:
        room = args.prompt_tokens + args.more_tokens + 2 * args.max_tokens
        folder = random_model(Path(scratch) / "model", _LAYERS, _WIDTH, room)
        return await measure(folder, args)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="folder in Hugging Face format")
    add("--device", choices=("cpu", "cuda"), help="where it is served; the worker's own choice")
    add("--prompt-tokens", type=int, default=6000, help="of the first turn")
    add("--more-tokens", type=int, default=100, help="that the second turn adds")
    add("--max-tokens", type=int, default=64, help="of each answer")
    add("--rounds", type=int, default=3)
    add("--timeout", type=float, default=120.0, help="seconds until it serves")
    add("--out", type=Path, help="also write the figures to this file, as JSON")
    args = parser.parse_args(argv)
    args.standby, args.streams = False, 1
    figures = uvloop.run(run(args))
    about = machine.describe() | (machine.accelerator(args.device) if args.device else {})
    print(json.dumps({**figures, "machine": about}))
    machine.write(args.out, about, kv_tiers=figures)


if __name__ == "__main__":
    main()
