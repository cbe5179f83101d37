"""Closed-loop load generator for any server with OpenAI's streaming completions.

`concurrency` clients each send a request, read its stream to the end and send the next one. Output
is greedy and runs to exactly `max_tokens` (`ignore_eos`, if it is sent), and prompts depend on the
seed and the request's index alone, so two runs, also against two servers, do the same work.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
from pydantic import SecretStr

from surestep_cli.api.sessions import open_session
from surestep_cli.verify.prompts import read_prompts

from .stream import Trace, request, served_model

PromptKind = Literal["random", "repeat"]
Ask = tuple[str, Mapping[str, Any]]  # path and body of a request

_WARMUP_INDEX = 1 << 30  # warm-up prompts must not fill a prefix cache with measured ones
_REPEAT_WORDS = 12
_BUCKETS = 40  # of a run, for its course
_QUANTILES = 20

# With a leading space each is one token in most BPE vocabularies, so words count as tokens.
_VOCABULARY = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government number
night point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law car
city name team minute idea body back parent face level office door health art war history party
result change morning reason research girl guy moment air teacher force order food love light
"""
_WORDS = _VOCABULARY.split()


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds; None when nothing was measured."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Return the percentiles of durations in seconds."""
        return cls(_percentile_ms(seconds, 0.50), _percentile_ms(seconds, 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The measurements of one run, all of them on the client's side.

    Only successful requests are timed and counted as output; `wall_s` spans all of them.
    """

    model: str
    concurrency: int
    num_requests: int
    prompt_tokens: float  # mean of the servers' usage blocks; 0 when it sends none
    wall_s: float
    requests_s: float
    prompt_tok_s: float
    output_tokens: int
    output_tok_s: float
    ttft_ms: Percentiles  # request sent -> first chunk that carries output
    itl_ms: Percentiles  # gap between chunks that carry output (a chunk may hold several tokens)
    tpot_ms: Percentiles  # (last chunk - first chunk) / (tokens - 1), per request
    e2e_ms: Percentiles  # request sent -> end of its stream
    num_chunks: int
    num_errors: int
    errors: dict[str, int]  # kind -> requests
    num_reconnects: int  # requests sent again: the server had closed the idle connection
    error_sample: str | None  # the first failure in the server's words
    output_sha256: str  # of all texts in request order: equal digests, equal outputs
    bucket_s: float  # length of each part of `tok_s_over_time`
    tok_s_over_time: list[float]  # a chunk counts as the mean number of tokens of its stream's
    ttft_quantiles_ms: list[float]  # from the least to the greatest in steps of 5 %
    itl_quantiles_ms: list[float]

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))


async def run_load(
    url: str,
    model: str | None = None,
    *,
    concurrency: int,
    num_requests: int,
    max_tokens: int,
    prompt_tokens: int,
    prompt_kind: PromptKind = "random",
    asks: Sequence[Ask] = (),
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
    api_key: SecretStr | None = None,
    certificate: Path | None = None,
    num_warmup: int = 0,
    timeout_s: float = 600.0,
    ready_timeout_s: float = 0.0,
) -> LoadReport:
    """Send `num_requests` requests to the server at `url` and report.

    `model` None asks the server for its first model. `asks` take turns in place of prompts that are
    made up. `extra` goes into every request body; None in it leaves a field out, and without
    `ignore_eos` an answer may end early. `certificate` as for `call`.
    `num_warmup` requests with prompts of their own run first and are not counted. `timeout_s`
    bounds each request. Failed requests are counted, not raised; only when `model` is None, or
    `ready_timeout_s` says how long to wait for the server, are there aiohttp.ClientError from one
    that does not answer, InvalidRequest without a model, Unavailable when it stays unready.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    opened = open_session(url, api_key=api_key, timeout=timeout, certificate=certificate)
    async with opened as session:
        served = await served_model(session, model, ready_timeout_s)
        fields = {
            "model": served,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(extra or {}),
        }
        common = {name: value for name, value in fields.items() if value is not None}
        at_least = max_tokens if common.get("ignore_eos") else 0

        async def send(index: int) -> Trace:
            if asks:
                path, body = asks[index % len(asks)]
                return await request(session, {**common, **body}, 0, path)
            prompt = make_prompt(index, prompt_tokens, seed=seed, kind=prompt_kind)
            return await request(session, {**common, "prompt": prompt}, at_least)

        await _closed_loop(send, range(_WARMUP_INDEX, _WARMUP_INDEX + num_warmup), concurrency)
        start = time.perf_counter()
        traces = await _closed_loop(send, range(num_requests), concurrency)
        wall_s = time.perf_counter() - start
    return _report(served, concurrency, (start, wall_s), traces)


def asks_of(file: Path | None) -> list[Ask]:
    """Return the requests of a file of prompts, none without one. Raise InvalidRequest."""
    prompts = read_prompts(file) if file is not None else []
    return [(prompt.path, prompt.body) for prompt in prompts]


def make_prompt(index: int, num_words: int, *, seed: int, kind: PromptKind) -> str:
    """Return the prompt of request `index`; "repeat" is one short phrase over and over, which
    drafts well.
    """
    rng = random.Random(f"{seed}:{index}")  # noqa: S311  # wants to be predictable
    if kind == "repeat":
        phrase = rng.choices(_WORDS, k=_REPEAT_WORDS)
        return " ".join(phrase[i % _REPEAT_WORDS] for i in range(num_words))
    return " ".join(rng.choices(_WORDS, k=num_words))


async def _closed_loop(
    send: Callable[[int], Awaitable[Trace]], indices: range, concurrency: int
) -> list[Trace]:
    queue = iter(indices)
    traces: dict[int, Trace] = {}

    async def client() -> None:
        for index in queue:  # one iterator shared by all clients
            traces[index] = await send(index)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(indices))):
            tasks.create_task(client())
    return [traces[index] for index in indices]


def _report(
    model: str, concurrency: int, span: tuple[float, float], traces: Sequence[Trace]
) -> LoadReport:
    start, wall_s = span
    good = [t for t in traces if t.error is None]
    bad = [t for t in traces if t.error is not None]
    streamed = [t for t in good if t.arrivals]
    output_tokens = sum(t.num_tokens for t in good)
    prompt_tokens = sum(t.usage.get("prompt_tokens", 0) for t in good)
    digest = hashlib.sha256("\0".join("".join(t.texts) for t in traces).encode())
    ttft = [t.arrivals[0] - t.sent for t in streamed]
    itl = [gap for t in streamed for gap in _gaps(t.arrivals)]
    return LoadReport(
        model=model,
        concurrency=concurrency,
        num_requests=len(traces),
        prompt_tokens=prompt_tokens / max(1, len(good)),
        wall_s=wall_s,
        requests_s=len(good) / wall_s,
        prompt_tok_s=prompt_tokens / wall_s,
        output_tokens=output_tokens,
        output_tok_s=output_tokens / wall_s,
        ttft_ms=Percentiles.of(ttft),
        itl_ms=Percentiles.of(itl),
        tpot_ms=Percentiles.of(
            [
                (t.arrivals[-1] - t.arrivals[0]) / (t.num_tokens - 1)
                for t in streamed
                if t.num_tokens > 1
            ]
        ),
        e2e_ms=Percentiles.of([t.ended - t.sent for t in good]),
        num_chunks=sum(len(t.arrivals) for t in good),
        num_errors=len(bad),
        errors=dict(Counter(t.error for t in bad if t.error is not None)),
        num_reconnects=sum(t.reconnects for t in traces),
        error_sample=next((t.error_detail for t in bad), None),
        output_sha256=digest.hexdigest(),
        bucket_s=wall_s / _BUCKETS,
        tok_s_over_time=_speeds(streamed, start, wall_s / _BUCKETS),
        ttft_quantiles_ms=_quantiles_ms(ttft),
        itl_quantiles_ms=_quantiles_ms(itl),
    )


def _speeds(streamed: Sequence[Trace], start: float, bucket_s: float) -> list[float]:
    tokens = [0.0] * _BUCKETS
    for trace in streamed:
        for moment in trace.arrivals:
            bucket = min(int((moment - start) / bucket_s), _BUCKETS - 1)
            tokens[bucket] += trace.num_tokens / len(trace.arrivals)
    return [count / bucket_s for count in tokens]


def _quantiles_ms(seconds: Sequence[float]) -> list[float]:
    found = (_percentile_ms(seconds, step / _QUANTILES) for step in range(_QUANTILES + 1))
    return [value for value in found if value is not None]


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _percentile_ms(seconds: Sequence[float], q: float) -> float | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return 1e3 * (ordered[low] + (at - low) * (ordered[high] - ordered[low]))
