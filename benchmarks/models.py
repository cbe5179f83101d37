"""Measure two models behind one URL: how soon one wakes, and what it costs the other while idle.

python benchmarks/models.py                  # the default model, twice
python benchmarks/models.py FOLDER OTHER --rounds 5 --concurrency 8

The second one is loaded on demand. `first_load_s`, `wake_s` and `wake_from_disk_s` are seconds from
sending a request until its first token: for a model never loaded, one whose weights stayed in
memory, and one of which nothing stayed. Throughput of the first one is measured in turns, with the
second one asleep and awake but idle; `ratio` is awake to asleep. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import machine
import uvloop
from surestep_cli.serve.serving import serving

_FIRST, _SECOND = "first", "second"
_ADMIN = {"authorization": "Bearer admin"}
_POLL_S = 0.1
_STANDBY_S = 30.0  # that the next rank is imported beside the one that serves
_TOKENS = 64  # of each answer


class Client:
    """A client of one server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session

    async def first_token_s(self, model: str) -> float:
        """Seconds until the first event with text, of a short answer."""
        began, first = time.monotonic(), 0.0
        body = self._body(model, 4) | {"stream": True}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - began
        return first

    async def tokens_per_s(self, model: str, concurrency: int, seconds: float) -> float:
        """Tokens a second of so many clients that ask again and again."""
        began, tokens = time.monotonic(), 0

        async def insist() -> None:
            nonlocal tokens
            while time.monotonic() - began < seconds:
                body = self._body(model, _TOKENS)
                async with self._session.post(f"{self._url}/v1/completions", json=body) as reply:
                    reply.raise_for_status()
                    tokens += (await reply.json())["usage"]["completion_tokens"]

        await asyncio.gather(*(insist() for _ in range(concurrency)))
        return tokens / (time.monotonic() - began)

    async def sleep(self, level: int) -> None:
        """Put the second model to sleep, once its next rank is there."""
        await self.until_standby()
        url = f"{self._url}/sleep?model={_SECOND}&mode=wait&level={level}"
        async with self._session.post(url, headers=_ADMIN) as reply:
            reply.raise_for_status()

    async def until_standby(self) -> None:
        """Wait until the second model's next rank is imported."""
        async with asyncio.timeout(_STANDBY_S):
            while not await self._has_standby():  # noqa: ASYNC110  # another process tells
                await asyncio.sleep(_POLL_S)

    async def _has_standby(self) -> bool:
        async with self._session.get(f"{self._url}/status", headers=_ADMIN) as reply:
            schedulers = (await reply.json())["schedulers"]
        (status,) = (one["status"] for one in schedulers if one["model"] == _SECOND)
        return bool(status) and all(one["standby_pid"] for one in status["supervisors"])

    @staticmethod
    def _body(model: str, max_tokens: int) -> dict[str, Any]:
        prompt = "Once upon a time"
        return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}


async def measure(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of a server that has just started."""
    first_load_s = await client.first_token_s(_SECOND)
    waking: dict[int, list[float]] = {1: [], 2: []}
    asleep, awake = [], []
    await client.tokens_per_s(_FIRST, args.concurrency, 1)  # so that it is warm
    for _ in range(args.rounds):
        for level, seconds in waking.items():
            await client.sleep(level)
            asleep.append(await client.tokens_per_s(_FIRST, args.concurrency, args.seconds))
            seconds.append(await client.first_token_s(_SECOND))
            await client.until_standby()  # which takes a core for seconds
            awake.append(await client.tokens_per_s(_FIRST, args.concurrency, args.seconds))
    rates = {"asleep": statistics.median(asleep), "awake": statistics.median(awake)}
    return {
        "first_load_s": round(first_load_s, 2),
        "wake_s": round(statistics.median(waking[1]), 3),
        "wake_from_disk_s": round(statistics.median(waking[2]), 3),
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "ratio": round(rates["awake"] / rates["asleep"], 3),
    }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        models = [
            {"name": _FIRST, "model": args.first},
            {"name": _SECOND, "model": args.second, "load_on_demand": True},
        ]
        file = Path(folder) / "models.toml"
        entries = (
            "\n".join(f"{key} = {json.dumps(value)}" for key, value in one.items())
            for one in models
        )
        file.write_text("".join(f"[[models]]\n{entry}\n" for entry in entries))
        flags = "--enable-sleep-mode", "--admin-api-key", "admin", "--models", str(file)
        log = Path(folder) / "log"
        async with (
            serving(None, flags, log=log, speculative_config="none") as server,
            aiohttp.ClientSession() as session,
        ):
            return await measure(Client(server.url, session), args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("first", nargs="?", default="", help="model that serves; none = default")
    parser.add_argument("second", nargs="?", default="", help="model on demand; none = default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    args = parser.parse_args()
    figures = uvloop.run(run(args))
    print(json.dumps({"machine": machine.describe()} | vars(args) | figures))


if __name__ == "__main__":
    main()
