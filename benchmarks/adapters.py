"""Answers of clients over as many adapters, against those of the model alone; time of a load.

python benchmarks/adapters.py --model FOLDER --clients 32 --rank 8

Adapters are random, of all linear layers that --targets names, and lie in a folder that goes again.
Runs of the model and of its adapters take turns on one server. A load is timed while as many
streams run, and so are the gaps between steps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import machine
import torch
import uvloop
from safetensors import safe_open
from safetensors.torch import save_file
from surestep_cli.bench.load import LoadReport, run_load
from surestep_cli.serve.serving import serving

KEY = "adapters"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(model: Path, to: Path, rank: int, targets: Sequence[str], seed: int) -> Path:
    """Write an adapter of the layers whose names end in one of the targets, as peft does."""
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for file in model.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                module = name.removesuffix(".weight")
                if module.endswith(tuple(targets)):
                    outputs, inputs = opened.get_slice(name).get_shape()
                    at = f"base_model.model.{module}.lora_"
                    shape = (rank, inputs)
                    tensors[f"{at}A.weight"] = 0.02 * torch.randn(shape, generator=generator)
                    shape = (outputs, rank)
                    tensors[f"{at}B.weight"] = 0.02 * torch.randn(shape, generator=generator)
    to.mkdir()
    save_file(tensors, to / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (to / "adapter_config.json").write_text(json.dumps(config))
    return to


async def load(url: str, models: Sequence[str], args: argparse.Namespace) -> LoadReport:
    """Run clients that take the models in turns."""
    words = ["time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child"]
    prompt = " ".join(words * (args.prompt_tokens // len(words) + 1))
    asks = [
        ("/v1/completions", {"model": model, "prompt": f"{number} {prompt}"})
        for number, model in enumerate(models)
    ]
    report = await run_load(
        url,
        models[0],
        concurrency=args.clients,
        num_requests=args.clients,
        max_tokens=args.max_tokens,
        prompt_tokens=args.prompt_tokens,
        asks=asks,
        num_warmup=1,
    )
    assert not report.num_errors, report
    return report


async def timed_load(url: str, name: str, folder: Path) -> float:
    """Milliseconds of a load over HTTP."""
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"lora_name": name, "lora_path": str(folder)}
    began = time.perf_counter()
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.post(f"{url}/v1/load_lora_adapter", json=body) as answer:
            answer.raise_for_status()
            took_ms = 1e3 * (time.perf_counter() - began)
        unload = {"lora_name": name}
        async with session.post(f"{url}/v1/unload_lora_adapter", json=unload) as answer:
            answer.raise_for_status()
    return took_ms


async def step_gap_ms(url: str) -> float:
    """Milliseconds that workers with work wait between two steps: the 99th percentile of 1000."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    line = next(line for line in lines if line.startswith("surestep:step_gap_p99_seconds{"))
    return round(1e3 * float(line.rpartition(" ")[2]), 2)


async def loads(url: str, folder: Path, base: str, args: argparse.Namespace) -> dict[str, Any]:
    """Load one adapter again and again while streams of the model run."""
    quiet = await load(url, [base] * args.clients, args)
    quiet_ms = await step_gap_ms(url)
    streams = asyncio.create_task(load(url, [base] * args.clients, args))
    await asyncio.sleep(0.5)
    took = list[float]()
    while not streams.done():
        took.append(await timed_load(url, "another", folder))
        await asyncio.sleep(0.2)
    beside = await streams
    gap_ms = await step_gap_ms(url)
    return {
        "load_ms_p50": round(median(took), 1),
        "load_ms_most": round(max(took), 1),
        "num_loads": len(took),
        "step_gap_ms_p99": gap_ms,
        "step_gap_ms_p99_without_loads": quiet_ms,
        "output_tok_s": [round(quiet.output_tok_s, 1), round(beside.output_tok_s, 1)],
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything on one server."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = [
            make_adapter(args.model, Path(scratch, f"a{i}"), args.rank, args.targets, i)
            for i in range(args.adapters)
        ]
        flags: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": args.adapters + 2,
            "max_lora_rank": args.rank,
            "admin_api_key": KEY,
            "speculative_config": args.speculative_config,
            "dtype": args.dtype,
            "max_num_seqs": args.clients,
        }
        words = ["--lora-modules", *(f"{folder.name}={folder}" for folder in folders)]
        async with serving(args.model, words, **flags) as server:
            rates = dict[str, list[float]](model=[], adapters=[])
            names = [folder.name for folder in folders]
            named = [names[i % len(names)] for i in range(args.clients)]
            for _ in range(args.rounds):
                for kind, models in (
                    ("model", [args.model.name] * args.clients),
                    ("adapters", named),
                ):
                    report = await load(server.url, models, args)
                    rates[kind].append(round(report.output_tok_s, 1))
            figures = await loads(server.url, folders[0], args.model.name, args)
    ratio = median(rates["adapters"]) / median(rates["model"])
    return {"tok_s": rates, "ratio": round(ratio, 3), **figures}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with safetensors")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--speculative-config", default="none")
    return parser.parse_args(argv)


if __name__ == "__main__":
    wanted = parse()
    found = uvloop.run(measure(wanted))
    about = {name: getattr(wanted, name) for name in ("clients", "adapters", "rank", "targets")}
    print(json.dumps({**about, **found, "machine": machine.describe()}))
