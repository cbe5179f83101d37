"""`surestep bench`: runs the load generator and prints its report."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.table import Table
from surestep_common.errors import SurestepError

from surestep_cli.api.http import no_answer
from surestep_cli.terminal.output import report_console, write_file

from .picture import in_characters, to_svg

if TYPE_CHECKING:
    from .command import Bench
    from .load import LoadReport, Percentiles, PromptKind


def bench(options: Bench, console: Console) -> int:
    """Run the load and print the report; return 1 when a request failed. Raise Unavailable."""
    with console.status(f"{options.num_requests} requests, {options.concurrency} at a time"):
        report = asyncio.run(_measure(options))
    output = report_console(soft_wrap=True)
    if options.json_output:
        output.print(report.to_json(), markup=False)
    else:
        output.print(_table(report))
        for line in in_characters(report, ascii_only=output.options.ascii_only):
            output.print(line, markup=False)
    if options.picture is not None:
        write_file(options.picture, to_svg(report))
    return 1 if report.num_errors else 0


async def _measure(options: Bench) -> LoadReport:
    try:
        import aiohttp

        from .load import asks_of, run_load
    except ImportError as error:
        raise SurestepError("`surestep bench` needs aiohttp: pip install aiohttp") from error
    try:
        return await run_load(
            options.url,
            options.model,
            concurrency=options.concurrency,
            num_requests=options.num_requests,
            max_tokens=options.max_tokens,
            prompt_tokens=options.prompt_tokens,
            prompt_kind=cast("PromptKind", options.prompt_kind),
            asks=asks_of(options.prompts),
            seed=options.seed,
            extra=options.extra,
            api_key=options.key(),
            num_warmup=options.warmup,
            ready_timeout_s=options.ready_check_timeout_sec,
        )
    except aiohttp.ClientError as error:
        raise no_answer(options.url, error) from error


def _table(report: LoadReport) -> Table:
    good = report.num_requests - report.num_errors
    table = Table(title=f"{report.model}, {report.concurrency} at a time", show_header=False)
    for name, value in (
        ("requests", f"{good} of {report.num_requests} good, {report.requests_s:.2f} a second"),
        ("prompts", f"{report.prompt_tok_s:.1f} tok/s"),
        ("output", f"{report.output_tok_s:.1f} tok/s"),
        ("time to first token", _span(report.ttft_ms)),
        ("between chunks", _span(report.itl_ms)),
        ("per output token", _span(report.tpot_ms)),
        *((f"failed: {kind}", str(count)) for kind, count in report.errors.items()),
    ):
        table.add_row(name, value)
    if report.num_reconnects:
        table.add_row("sent again", f"{report.num_reconnects}: idle connections were closed")
    if report.error_sample:
        table.add_row("first failure", report.error_sample)
    return table


def _span(value: Percentiles) -> str:
    if value.p50 is None or value.p99 is None:
        return "-"
    return f"{value.p50:.1f} ms p50, {value.p99:.1f} ms p99"
