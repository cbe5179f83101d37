"""Measure how long a worker takes to be ready again after its rank was killed.

python benchmarks/recovery.py                      # the default model
python benchmarks/recovery.py --layers 16 64 256   # random models of these sizes: does it grow?
python benchmarks/recovery.py --model FOLDER --device cuda
python benchmarks/recovery.py --no-standby
python benchmarks/recovery.py --streams 16 --prompt-tokens 8000   # what a kill costs long prompts

Each model gets a supervisor of its own; its rank is killed with SIGKILL `--rounds` times, each time
when there is a standby. With `--streams` a scheduler plans for the rank, which is killed while all
streams decode: once with the prefix cache, where the caches outlive it, and once without, where all
prompts are computed again. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import machine
import torch
import uvloop
from launch import launched
from rich.console import Console
from safetensors.torch import save_file
from surestep_cli.serve.model_source import resolve
from surestep_cli.serve.ports import free_addresses
from surestep_common.rpc import connect
from surestep_proto import sampling_pb2, scheduler_pb2
from surestep_proto import supervisor_pb2 as pb
from surestep_proto.scheduler_pb2_grpc import SchedulerStub
from surestep_proto.supervisor_pb2_grpc import SupervisorStub

_WIDTH, _HEAD_DIM, _VOCAB = 1024, 64, 32000
_NARROW = 256  # of a model whose prompts are long
_BEFORE = 4  # tokens of each stream before the kill
_POLL_S = 0.02


async def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Load, then kill and wait, several times."""
    async with supervised(folder, args) as stub:
        began = time.monotonic()
        await until(stub, lambda now: now.rank_state == pb.READY, args.timeout)
        load_s = time.monotonic() - began
        seconds = [await kill(stub, args) for _ in range(args.rounds)]
        status = await stub.Status(pb.SupervisorStatusRequest())
    return {
        "weights_mb": status.held_weight_bytes >> 20,
        "first_load_s": round(load_s, 2),
        "ready_again_s": [round(s, 3) for s in seconds],
        "median_s": round(statistics.median(seconds), 3),
    }


async def measure_streams(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Kill the rank below open streams, with kept caches and with prompts that are recomputed."""
    figures = {}
    for name, option in (("kept", ""), ("recomputed", "--no-enable-prefix-caching")):
        async with scheduled(folder, args, option) as (supervisor, scheduler):
            await until(supervisor, lambda now: now.rank_state == pb.READY, args.timeout)
            while (await ask_status(scheduler)).state != scheduler_pb2.SERVING:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            quiet = [each.token_ids for each in await read_all(scheduler, args, asyncio.Event())]
            rounds = [
                await interrupt(supervisor, scheduler, quiet, args) for _ in range(args.rounds)
            ]
        figures[name] = {key: [each[key] for each in rounds] for key in rounds[0]}
    return figures


async def ask_status(scheduler: Any) -> scheduler_pb2.SchedulerStatus:
    """Ask a scheduler that may not listen yet."""
    asked = scheduler_pb2.SchedulerStatusRequest()
    status: scheduler_pb2.SchedulerStatus = await scheduler.Status(asked, wait_for_ready=True)
    return status


@dataclass(slots=True)
class Received:
    """Tokens of a stream, and when each chunk came (seconds, monotonic)."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def pause_s(self, moment: float) -> float:
        """Return the longest wait for a chunk that came after a moment."""
        return max((b - a for a, b in pairwise(self.times) if b > moment), default=0.0)


async def read_all(
    scheduler: Any, args: argparse.Namespace, decoding: asyncio.Event
) -> list[Received]:
    """Read all streams to their ends; `decoding` is set when each has a few tokens."""
    streams, salt = [Received() for _ in range(args.streams)], str(time.monotonic_ns())

    async def read(index: int, received: Received) -> None:
        wanted = request(index, salt, args)
        async for chunk in scheduler.Generate(wanted, wait_for_ready=True):
            if chunk.token_ids:
                received.times.append(time.monotonic())
                received.token_ids += chunk.token_ids
            if all(len(each.token_ids) >= _BEFORE for each in streams):
                decoding.set()

    await asyncio.gather(*(read(index, each) for index, each in enumerate(streams)))
    return streams


async def interrupt(
    supervisor: Any, scheduler: Any, quiet: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Read all streams, kill the rank when all decode, and return what that cost."""
    if args.standby:
        await until(supervisor, lambda now: now.standby_pid, args.timeout)
    decoding = asyncio.Event()
    reading = asyncio.ensure_future(read_all(scheduler, args, decoding))
    await decoding.wait()
    status = await supervisor.Status(pb.SupervisorStatusRequest())
    killed = time.monotonic()
    os.kill(status.rank_pid, signal.SIGKILL)
    streams = await reading
    incident = (await ask_status(scheduler)).incidents[0]
    return {
        "longest_pause_s": round(max(each.pause_s(killed) for each in streams), 3),
        "recover_s": round(incident.recover_s, 3),
        "replayed_tokens": incident.num_replayed_tokens,
        "recomputed_tokens": incident.num_replayed_tokens - incident.num_kept_tokens,
        "equal_answers": sum(a == b.token_ids for a, b in zip(quiet, streams, strict=True)),
    }


def request(index: int, salt: str, args: argparse.Namespace) -> scheduler_pb2.GenerateRequest:
    """Ask for the answer to a long prompt that no other one begins like."""
    rng = random.Random(index)
    return scheduler_pb2.GenerateRequest(
        request_id=f"{salt}-{index}",
        prompt_ids=[rng.randrange(3, _VOCAB) for _ in range(args.prompt_tokens)],
        max_tokens=args.max_tokens,
        sampling=sampling_pb2.SamplingParams(temperature=0, top_p=1, repetition_penalty=1),
        ignore_eos=True,
        cache_salt=salt,
    )


async def kill(stub: Any, args: argparse.Namespace) -> float:
    """Seconds from the kill to a rank that is ready."""
    if args.standby:
        await until(stub, lambda now: now.standby_pid, args.timeout)
    status = await stub.Status(pb.SupervisorStatusRequest())
    began = time.monotonic()
    os.kill(status.rank_pid, signal.SIGKILL)
    await until(
        stub,
        lambda now: now.rank_state == pb.READY and now.restarts > status.restarts,
        args.timeout,
    )
    return time.monotonic() - began


async def until(stub: Any, wanted: Callable[[Any], object], timeout_s: float) -> None:
    """Poll the supervisor until its status is as wanted."""
    async with asyncio.timeout(timeout_s):
        while not wanted(await stub.Status(pb.SupervisorStatusRequest(), wait_for_ready=True)):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


@contextlib.asynccontextmanager
async def scheduled(
    folder: Path, args: argparse.Namespace, option: str
) -> AsyncIterator[tuple[Any, Any]]:
    """A supervisor with its rank, and a scheduler that plans for it."""
    addresses = free_addresses({"worker_listen": 1, "supervisor_listen": 1, "scheduler_listen": 1})
    listen, to = addresses["scheduler_listen"], json.dumps([addresses["supervisor_listen"]])
    command = f"{sys.executable} -m surestep_scheduler --scheduler-listen {listen} "
    command += f"--supervisor-addresses {shlex.quote(to)} {option}"
    log_path = Path(tempfile.gettempdir()) / "recovery-scheduler.log"
    log_path.unlink(missing_ok=True)
    async with (
        supervised(folder, args, addresses) as supervisor,
        launched(command, log_path),
        connect(listen) as channel,
    ):
        yield supervisor, SchedulerStub(channel)


@contextlib.asynccontextmanager
async def supervised(
    folder: Path, args: argparse.Namespace, addresses: Mapping[str, str] | None = None
) -> AsyncIterator[Any]:
    """A supervisor and its rank."""
    addresses = addresses or free_addresses({"worker_listen": 1, "supervisor_listen": 1})
    listening = ("worker_listen", "supervisor_listen")
    options = [f"--{name.replace('_', '-')}={addresses[name]}" for name in listening]
    if not args.standby:
        options.append("--no-standby")
    if args.streams:
        options.append("--dtype=float32")  # in which the answers are equal in any batch
    if args.device:
        options.append(f"--device={args.device}")
    command = f"{sys.executable} -m surestep_worker --model {folder} {' '.join(options)}"
    log_path = Path(tempfile.gettempdir()) / "recovery-worker.log"
    log_path.unlink(missing_ok=True)
    async with launched(command, log_path), connect(addresses["supervisor_listen"]) as channel:
        yield SupervisorStub(channel)


def random_model(folder: Path, layers: int, width: int = _WIDTH, positions: int = 2048) -> Path:
    """A Llama with random weights in bfloat16; 25 MB a layer, if it is as wide as usual."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_attention_heads": width // _HEAD_DIM,
        "num_key_value_heads": width // _HEAD_DIM,
        "num_hidden_layers": layers,
        "vocab_size": _VOCAB,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = dict(_shapes(layers, width))
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(layers: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    inner = 11 * width // 4
    yield "model.embed_tokens.weight", (_VOCAB, width)
    yield "model.norm.weight", (width,)
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name in ("q", "k", "v", "o"):
            yield f"{layer}self_attn.{name}_proj.weight", (width, width)
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", (inner, width)
        yield f"{layer}mlp.down_proj.weight", (width, inner)
        yield f"{layer}input_layernorm.weight", (width,)
        yield f"{layer}post_attention_layernorm.weight", (width,)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every model in turn."""
    if args.streams and not args.model:
        with tempfile.TemporaryDirectory() as scratch:
            room = args.prompt_tokens + args.max_tokens
            folder = random_model(Path(scratch) / "model", 2, _NARROW, room)
            return {"2 narrow layers": await measure_streams(folder, args)}
    if args.streams:
        return {args.model.name: await measure_streams(args.model, args)}
    if args.model:
        return {args.model.name: await measure(args.model, args)}
    if not args.layers:
        model = resolve(None, Console(stderr=True))
        return {model.name: await measure(model.path, args)}
    results = {}
    for layers in args.layers:
        with tempfile.TemporaryDirectory() as scratch:
            folder = random_model(Path(scratch) / "model", layers)
            results[f"{layers} layers"] = await measure(folder, args)
    return results


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="a folder; the default model if neither this nor --layers")
    add("--device", choices=("cpu", "cuda"), help="where it is served; the worker's own choice")
    add("--layers", type=int, nargs="+", help="random models instead of the default one")
    add("--rounds", type=int, default=3)
    add("--streams", type=int, default=0, help="open while the rank is killed; 0 = none")
    add("--prompt-tokens", type=int, default=8000, help="of each stream")
    add("--max-tokens", type=int, default=400, help="of each stream")
    add("--standby", action=argparse.BooleanOptionalAction, default=True)
    add("--timeout", type=float, default=300.0, help="seconds for each wait")
    add("--out", type=Path, help="also write the figures to this file, as JSON")
    args = parser.parse_args(argv)
    figures = {**uvloop.run(run(args)), "standby": args.standby}
    about = machine.describe() | (machine.accelerator(args.device) if args.device else {})
    print(json.dumps({**figures, "machine": about}))
    machine.write(args.out, about, recovery=figures)


if __name__ == "__main__":
    main()
