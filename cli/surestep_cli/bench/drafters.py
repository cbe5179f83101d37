"""`surestep bench --drafters`: which configuration of speculation is fastest on these prompts.

Each configuration has a server of its own, one after the other. On it rounds with drafts and
without take turns, so that a ratio is of moments side by side on one server: two servers of one
command differ by more than many a drafter is worth.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Console
from rich.table import Table
from surestep_common.errors import Unavailable

from surestep_cli.api.sessions import open_session
from surestep_cli.serve.serving import Server, key_of, serving
from surestep_cli.terminal.output import report_console
from surestep_cli.terminal.pictures import bar, sparkline
from surestep_cli.verify.prompts import built_in

from .load import Ask, LoadReport, asks_of, run_load

if TYPE_CHECKING:
    from .command import Bench

_ROUNDS = 4  # with drafts and without each
_WORTHWHILE = 1.02  # less is within the noise
_BAR_WIDTH = 30
_NO_DRAFTS = {"speculative": {"num_tokens": 0}}
_COUNTS = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens_per_pos)_total\{(.*)\} (\S+)$", re.MULTILINE
)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class Speed:
    """Speeds of one server."""

    concurrency: int
    tok_s: float
    undrafted_tok_s: float  # of the same requests, without drafts
    equal: bool  # whether all texts were

    @property
    def ratio(self) -> float:
        """Return the speed with drafts as a multiple of that without."""
        return self.tok_s / self.undrafted_tok_s


@dataclass(frozen=True, slots=True)
class DrafterResult:
    """Measurement of one configuration."""

    config: str
    speeds: list[Speed]  # by concurrency
    accepted: list[float]  # share of windows whose first 1, 2, .. drafts were accepted


def compare(options: Bench, console: Console) -> int:
    """Measure each configuration and print what is best; return 1 where texts differ.

    Raise Unavailable, and SettingsError for flags of servers that are wrong.
    """
    results = []
    for config in options.drafters:
        name = config if isinstance(config, str) else json.dumps(config)
        with console.status(f"{name}: starting, then {_ROUNDS} rounds with drafts and without"):
            results.append(asyncio.run(_measure(name, options)))
    output = report_console(soft_wrap=True)
    if options.json_output:
        output.print(json.dumps([asdict(result) for result in results]), markup=False)
    else:
        output.print(_table(results))
        for line in _picture(results, ascii_only=output.options.ascii_only):
            output.print(line, markup=False)
    return 0 if all(speed.equal for result in results for speed in result.speeds) else 1


async def _measure(name: str, options: Bench) -> DrafterResult:
    words = [*shlex.split(options.serve), "--speculative-config", name]
    asks = asks_of(options.prompts) or [(prompt.path, prompt.body) for prompt in built_in()]
    async with serving(words=words) as server:
        load = partial(_load, server, options, asks)
        await load(1)  # what a server does for the first time takes longer
        before = await _counts(server)
        speeds = [await _speed(load, each) for each in sorted({1, options.concurrency})]
        counts = await _counts(server) - before  # of which those above 0 are left
    windows = counts.pop(0, 1)
    return DrafterResult(name, speeds, [counts[at] / windows for at in sorted(counts)])


async def _load(
    server: Server, options: Bench, asks: Sequence[Ask], concurrency: int, **extra: Any
) -> LoadReport:
    report = await run_load(
        server.url,
        options.model,
        api_key=key_of(server.settings),
        certificate=server.settings.ssl_certfile,
        concurrency=concurrency,
        num_requests=max(options.num_requests // _ROUNDS, concurrency),
        max_tokens=options.max_tokens,
        prompt_tokens=options.prompt_tokens,
        asks=asks,
        extra={"ignore_eos": None, **options.extra, **extra},
        num_warmup=options.warmup,
    )
    if report.num_errors:
        raise Unavailable(f"{report.num_errors} requests failed: {report.error_sample}")
    return report


async def _speed(load: Any, concurrency: int) -> Speed:
    """Measure in turns: with drafts first, then without, then without, then with."""
    drafted, undrafted = list[LoadReport](), list[LoadReport]()
    for number in range(2 * _ROUNDS):
        plain = number % 4 in (1, 2)
        salt = {"cache_salt": f"{concurrency}:{number}"}  # nothing is cached for the next round
        report = await load(concurrency, **salt, **(_NO_DRAFTS if plain else {}))
        (undrafted if plain else drafted).append(report)
    texts = {report.output_sha256 for report in (*drafted, *undrafted)}
    return Speed(concurrency, _rate(drafted), _rate(undrafted), len(texts) == 1)


def _rate(reports: Sequence[LoadReport]) -> float:
    """Return tokens per second of all rounds together."""
    return sum(r.output_tokens for r in reports) / sum(r.wall_s for r in reports)


async def _counts(server: Server) -> Counter[int]:
    """Return the windows with drafts at 0, and at n those whose n-th draft was accepted."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        open_session(
            server.url,
            api_key=key_of(server.settings),
            timeout=timeout,
            certificate=server.settings.ssl_certfile,
        ) as session,
        session.get("metrics", raise_for_status=True) as response,
    ):
        text = await response.text()
    found = Counter[int]()
    for _, labels, value in _COUNTS.findall(text):
        position = _POSITION.search(labels)
        found[int(position[1]) + 1 if position is not None else 0] += int(float(value))
    return found


def _table(results: Sequence[DrafterResult]) -> Table:
    table = Table(title="tok/s with drafts, and as a multiple of the same server without")
    table.add_column("--speculative-config")
    for speed in results[0].speeds:
        table.add_column(f"{speed.concurrency} at a time", justify="right")
    for heading in ("accepted by position", "texts"):
        table.add_column(heading)
    for result in results:
        table.add_row(
            result.config,
            *(f"{speed.tok_s:.1f}  {speed.ratio:.2f}x" for speed in result.speeds),
            " ".join(f"{share:.0%}" for share in result.accepted) or "no drafts",
            "equal" if all(speed.equal for speed in result.speeds) else "DIFFER",
        )
    return table


def _picture(results: Sequence[DrafterResult], *, ascii_only: bool) -> Iterator[str]:
    """Yield bars of the ratios, and what is recommended."""
    most = max(speed.ratio for result in results for speed in result.speeds)
    for index, speed in enumerate(results[0].speeds):
        yield f"{speed.concurrency} at a time:"
        for result in results:
            ratio = result.speeds[index].ratio
            drawn = bar(ratio / most, _BAR_WIDTH, ascii_only=ascii_only)
            accepted = sparkline(result.accepted, ascii_only=ascii_only, most=1.0)
            yield f"  {drawn} {ratio:.2f}x {accepted} {result.config}"
    for index, speed in enumerate(results[0].speeds):
        best = max(results, key=lambda result: result.speeds[index].ratio)
        ratio = best.speeds[index].ratio
        advice = f"--speculative-config {shlex.quote(best.config)}" if ratio >= _WORTHWHILE else ""
        advice = advice or "none of them is faster than no drafts"
        yield f"Best with {speed.concurrency} at a time: {advice} ({ratio:.2f}x)"
