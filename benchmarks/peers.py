"""Compare OpenAI servers on one machine in one run: a Markdown table of medians and ratios.

python benchmarks/peers.py --rounds 3 \
    --server surestep http://127.0.0.1:8000 "surestep serve --port 8000 --dtype bfloat16" \
    --server vllm http://127.0.0.1:8001 "vllm serve MODEL --port 8001 --dtype bfloat16"

Only one server runs at a time. Each round starts, times, loads and stops every server in turn
(A B A B ...), so that a machine that slows down for a while slows all of them, and a ratio is the
median of the ratios within the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bandwidth
import machine
import peers_picture
import uvloop
import yaml
from launch import http_first_token, launched
from surestep_cli.bench.load import run_load

Figures = dict[str, float]  # what one round measured of one server, by row of the table


@dataclass(frozen=True, slots=True)
class Server:
    """A server under test. Without a command it is expected to run already."""

    name: str
    url: str
    command: str | None = None
    weights: Path | None = None  # GGUF file or folder, for the share of the memory's bandwidth
    extra: dict[str, Any] | None = None  # of every request's body; None in it leaves a field out


def listed_server(fields: dict[str, Any]) -> Server:
    """Return the server of an entry of `--servers`."""
    weights = Path(fields["weights"]) if "weights" in fields else None
    command, extra = fields.get("command"), fields.get("extra")
    return Server(fields["name"], fields["url"], command, weights, extra)


async def measure(server: Server, seed: int, args: argparse.Namespace) -> Figures:
    """Start `server`, put every concurrency on it, stop it."""
    figures: Figures = {}
    async with contextlib.AsyncExitStack() as stack:
        if server.command is not None:
            log_path = args.log_dir / f"{server.name}.log"
            process = await stack.enter_async_context(launched(server.command, log_path))
            figures["start to first token, s"] = await process.first_token(
                lambda: http_first_token(server.url, server.extra), args.start_timeout
            )
        for concurrency in args.concurrency:
            figures |= await load(server, concurrency, seed, args)
    if server.weights is not None and "TPOT p50, ms, c=1" in figures:
        tok_s = 1e3 / figures["TPOT p50, ms, c=1"]
        read = bandwidth.share(server.weights, tok_s, args.read_bytes_s)
        figures["share of memory bandwidth, c=1"] = read
    return figures


async def load(server: Server, concurrency: int, seed: int, args: argparse.Namespace) -> Figures:
    """Run a load. Raises RuntimeError when a request fails: such a run compares nothing."""
    report = await run_load(
        server.url,
        concurrency=concurrency,
        num_requests=max(args.min_requests, args.requests_per_client * concurrency),
        extra=server.extra,
        max_tokens=args.max_tokens,
        prompt_tokens=args.prompt_tokens,
        prompt_kind=args.prompt_kind,
        seed=seed,
        num_warmup=args.num_warmup,
    )
    if report.num_errors:
        raise RuntimeError(f"{server.name}: {report.errors}: {report.error_sample}")
    tokens = report.output_tokens / report.num_requests
    figures = {
        "output tok/s": report.output_tok_s,
        "tokens per answer": tokens if tokens < args.max_tokens else None,
        "TTFT p50, ms": report.ttft_ms.p50,
        "TTFT p99, ms": report.ttft_ms.p99,
        "TPOT p50, ms": report.tpot_ms.p50,
        "inter-token p99, ms": report.itl_ms.p99,
    }
    return {
        f"{name}, c={concurrency}": value for name, value in figures.items() if value is not None
    }


async def compare(servers: list[Server], args: argparse.Namespace) -> dict[str, list[Figures]]:
    """Figures of every server, one entry per round. Each is also a line of JSON as it comes."""
    rounds: dict[str, list[Figures]] = {server.name: [] for server in servers}
    for index in range(args.rounds):
        for server in servers:
            before = machine.describe()
            figures = await measure(server, args.seed + index, args)
            rounds[server.name].append(figures)
            line = {
                "server": asdict(server) | {"weights": str(server.weights)},
                "round": index,
                "figures": figures,
                "machine": before,
            }
            print(json.dumps(line), file=args.json, flush=True)
    return rounds


def table(rounds: dict[str, list[Figures]]) -> str:
    """Medians per server, and the first server's figure over each other's."""
    first, *others = rounds
    header = ["median", *rounds, *(f"{first} / {other}" for other in others)]
    lines = [header, ["---"] * len(header)]
    for row in dict.fromkeys(key for figures in rounds.values() for f in figures for key in f):
        cells = [_median([f[row] for f in rounds[name] if row in f]) for name in rounds]
        pairs = [zip(rounds[first], rounds[other], strict=True) for other in others]
        cells += [_median([a[row] / b[row] for a, b in p if row in a and row in b]) for p in pairs]
        lines.append([row, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _median(values: list[float]) -> str:
    if not values:
        return ""
    value = statistics.median(values)
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--server", nargs=3, action="append", default=[], metavar=("NAME", "URL", "COMMAND"))
    add("--servers", type=Path, help="YAML list of {name, url, command, weights, extra}")
    add("--rounds", type=int, default=3)
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    add("--requests-per-client", type=int, default=2)
    add("--min-requests", type=int, default=4, help="of a load, whatever its number of clients")
    add("--num-warmup", type=int, default=1, help="requests before each load, not counted")
    add("--max-tokens", type=int, default=128)
    add("--prompt-tokens", type=int, default=64, help="words, about one token each")
    add("--prompt-kind", choices=["random", "repeat"], default="random")
    add("--seed", type=int, default=0)
    add("--start-timeout", type=float, default=600.0, help="seconds to the first token")
    add("--log-dir", type=Path, default=Path(tempfile.gettempdir()), help="of the servers' output")
    add("--picture", type=Path, help="SVG file with bars of output tokens per second")
    add("--json", type=argparse.FileType("a"), default=sys.stderr, help="each round as it ends")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Run the comparison and print its table."""
    args = parse(argv)
    listed = yaml.safe_load(args.servers.read_text()) if args.servers else []
    servers = [Server(*fields) for fields in args.server] + [listed_server(f) for f in listed]
    if any(server.weights for server in servers):
        args.read_bytes_s = bandwidth.read_bandwidth(len(os.sched_getaffinity(0)))
        print(f"memory is read at {args.read_bytes_s / 1e9:.1f} GB/s", file=sys.stderr)
    rounds = uvloop.run(compare(servers, args))
    print(table(rounds))
    where = machine.describe()
    about = (
        f"{args.rounds} rounds; {where['cpu']}, {where['cores']} cores; commit {where['commit']}"
    )
    print(f"\n{about}")
    if args.picture is not None:
        args.picture.write_text(peers_picture.to_svg(rounds, about))


if __name__ == "__main__":
    main()
