"""CPU time per output token of every process of a server, gateway and scheduler among them.

    python benchmarks/token_cost.py --rounds 3 \
        --server now "surestep serve --port 8000 --speculative-config none --max-num-seqs 64" \
        --server before "../before/.venv/bin/surestep serve --port 8000 ..."

One server at a time, in turns. What the processes have used, by the module that each runs, is read
before and after each load, so start-up is not in it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import uvloop
from launch import cpu_seconds, http_first_token, launched
from surestep_cli.bench.load import LoadReport, run_load


async def measure(command: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Microseconds per token by process, and tokens per second."""
    async with launched(command, args.log_dir / "token_cost.log") as server:
        await server.first_token(lambda: http_first_token(args.url), args.start_timeout)
        await load(args.concurrency, seed - 1, args)  # what is loaded after the start
        before = cpu_seconds(server.process.pid)
        report = await load(args.num_requests, seed, args)
        after = cpu_seconds(server.process.pid)
    if report.num_errors:
        raise RuntimeError(f"{report.errors}: {report.error_sample}")
    used = {name: after[name] - before.get(name, 0.0) for name in sorted(after)}
    figures = {name: round(1e6 * s / report.output_tokens, 1) for name, s in used.items()}
    return figures | {"tok/s": round(report.output_tok_s, 1)}


async def load(num_requests: int, seed: int, args: argparse.Namespace) -> LoadReport:
    """Put the load on the server."""
    return await run_load(
        args.url,
        concurrency=args.concurrency,
        num_requests=num_requests,
        max_tokens=args.max_tokens,
        prompt_tokens=args.prompt_tokens,
        seed=seed,
    )


async def main(args: argparse.Namespace) -> None:
    """Print a line of JSON per round and server."""
    for index in range(args.rounds):
        for name, command in args.server:
            figures = await measure(command, args.seed + 2 * index, args)
            print(json.dumps({"server": name, "round": index} | figures), flush=True)


def parse() -> argparse.Namespace:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--server", nargs=2, action="append", required=True, metavar=("NAME", "COMMAND"))
    add("--url", default="http://127.0.0.1:8000")
    add("--rounds", type=int, default=3)
    add("--concurrency", type=int, default=64)
    add("--num-requests", type=int, default=192)
    add("--max-tokens", type=int, default=128)
    add("--prompt-tokens", type=int, default=64)
    add("--seed", type=int, default=1)
    add("--start-timeout", type=float, default=120.0)
    add("--log-dir", type=Path, default=Path(tempfile.gettempdir()), help="of the servers' output")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(uvloop.run(main(parse())))
