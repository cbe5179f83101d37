"""Load an OpenAI server and print one JSON line per concurrency.

python benchmarks/online.py --url http://127.0.0.1:8000 --concurrency 1 8 32
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

import machine
import uvloop
from pydantic import SecretStr
from surestep_cli.bench.load import run_load


async def measure(args: argparse.Namespace) -> int:
    """Run every concurrency in turn; returns the number of failed requests."""
    num_errors = 0
    for concurrency in args.concurrency:
        report = await run_load(
            args.url,
            args.model,
            concurrency=concurrency,
            num_requests=args.num_requests or max(4, 2 * concurrency),
            max_tokens=args.max_tokens,
            prompt_tokens=args.prompt_tokens,
            prompt_kind=args.prompt_kind,
            seed=args.seed,
            extra=args.extra,
            api_key=args.api_key,
            num_warmup=args.num_warmup,
            timeout_s=args.timeout,
        )
        num_errors += report.num_errors
        print(json.dumps({**asdict(report), "machine": machine.describe()}), flush=True)
    return num_errors


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", type=SecretStr)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--num-requests", type=int, help="default: max(4, 2 x concurrency)")
    parser.add_argument("--num-warmup", type=int, default=1, help="sent first, not counted")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="words, about one token each")
    parser.add_argument("--prompt-kind", choices=["random", "repeat"], default="random")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other prompts")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON for every body")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds per request")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(1 if uvloop.run(measure(parse())) else 0)
