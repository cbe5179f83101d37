"""Measure how long a worker takes to be ready again after its rank was killed.

python benchmarks/recovery.py                      # the default model
python benchmarks/recovery.py --layers 16 64 256   # random models of these sizes: does it grow?
python benchmarks/recovery.py --model FOLDER --device cuda
python benchmarks/recovery.py --no-standby

Each model gets a supervisor of its own; its rank is killed with SIGKILL `--rounds` times, each time
when there is a standby. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
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
from surestep_proto import supervisor_pb2 as pb
from surestep_proto.supervisor_pb2_grpc import SupervisorStub

_WIDTH, _HEADS, _INNER, _VOCAB = 1024, 16, 2816, 32000
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
async def supervised(folder: Path, args: argparse.Namespace) -> AsyncIterator[Any]:
    """A supervisor and its rank."""
    addresses = free_addresses({"worker_listen": 1, "supervisor_listen": 1})
    options = [f"--{name.replace('_', '-')}={address}" for name, address in addresses.items()]
    if not args.standby:
        options.append("--no-standby")
    if args.device:
        options.append(f"--device={args.device}")
    command = f"{sys.executable} -m surestep_worker --model {folder} {' '.join(options)}"
    log_path = Path(tempfile.gettempdir()) / "recovery-worker.log"
    log_path.unlink(missing_ok=True)
    async with launched(command, log_path), connect(addresses["supervisor_listen"]) as channel:
        yield SupervisorStub(channel)


def random_model(folder: Path, layers: int) -> Path:
    """A Llama with random weights in bfloat16, 25 MB a layer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "num_hidden_layers": layers,
        "vocab_size": _VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = dict(_shapes(layers))
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (_VOCAB, _WIDTH)
    yield "model.norm.weight", (_WIDTH,)
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name in ("q", "k", "v", "o"):
            yield f"{layer}self_attn.{name}_proj.weight", (_WIDTH, _WIDTH)
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", (_INNER, _WIDTH)
        yield f"{layer}mlp.down_proj.weight", (_WIDTH, _INNER)
        yield f"{layer}input_layernorm.weight", (_WIDTH,)
        yield f"{layer}post_attention_layernorm.weight", (_WIDTH,)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Every model in turn."""
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
