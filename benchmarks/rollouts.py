"""Measure groups of samples: `n` answers to a prompt in one request beside as many requests.

python benchmarks/rollouts.py                        # the default model
python benchmarks/rollouts.py --model tests/data/tiny-hybrid --speculative-config auto none
M=tests/data/tiny-hybrid; python benchmarks/rollouts.py --model $M --chats $M/prompts.json \\
    --groups 8 --speculative-config auto none        # 64 samples of what the model has learnt

Each round samples `--groups` prompts of `--prompt-tokens` at temperature 1, first as one request
with `n`, then as `n` requests at once; no random prompt is asked twice. With `--chats` prompts are
conversations of a file, and answers end where the model ends them. `shared` is tokens per second of
the first to the second. Each speculative configuration gets a server of its own, with equal seeds
and prompts, and `equal` says whether the token ids are those of the last one. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import machine
import uvloop
from surestep_cli.serve.serving import serving

Ids = list[list[int]]


class Sampled(NamedTuple):
    """Answers of one way of asking."""

    ids: Ids
    took_s: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(map(len, self.ids)) / self.took_s


class Sampler:
    """A client that samples groups."""

    def __init__(self, session: aiohttp.ClientSession, args: argparse.Namespace) -> None:
        self._session, self._args = session, args

    async def groups(self, number: int, *, together: bool) -> Sampled:
        """Return the samples of a round, each group in one request or in `n`."""
        begun = time.monotonic()
        made = await asyncio.gather(
            *(
                self._group(f"{number} {group} {together}", together=together)
                for group in range(self._args.groups)
            )
        )
        return Sampled([ids for each in made for ids in each], time.monotonic() - begun)

    async def _group(self, name: str, *, together: bool) -> Ids:
        n, prompt = self._args.n, self._prompt(random.Random(name))
        if together:
            return await self._ask(prompt, n, seed=0)
        made = await asyncio.gather(*(self._ask(prompt, 1, seed) for seed in range(n)))
        return [ids for each in made for ids in each]

    def _prompt(self, draw: random.Random) -> dict[str, Any]:
        """Return the fields of a request that say what is asked."""
        if self._args.chats:
            chat = draw.choice(self._args.chats)
            kwargs = {"enable_thinking": chat.get("enable_thinking", True)}
            return {"messages": chat["messages"], "chat_template_kwargs": kwargs}
        vocabulary, length = self._args.vocabulary, self._args.prompt_tokens
        ids = [draw.randrange(vocabulary) for _ in range(length)]
        return {"prompt": ids, "ignore_eos": True}

    async def _ask(self, prompt: Mapping[str, Any], n: int, seed: int) -> Ids:
        body = {
            **prompt,
            "n": n,
            "seed": seed,
            "temperature": 1,
            "max_tokens": self._args.max_tokens,
            "return_token_ids": True,
        }
        path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
        async with self._session.post(path, json=body) as reply:
            reply.raise_for_status()
            return [choice["token_ids"] for choice in (await reply.json())["choices"]]


async def measure(speculative: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[Ids]]:
    """Return a server's figures, and the token ids of each round."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    texts = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        async with (
            serving(args.model, args.flags, log=log, speculative_config=speculative) as server,
            aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout()) as session,
        ):
            sampler = Sampler(session, args)
            for number in range(-1, args.rounds):
                for together in rates:
                    sampled = await sampler.groups(number, together=together)
                    texts.append(sampled.ids)
                    if number >= 0:  # after a round to warm up
                        rates[together].append(sampled.rate)
    shared, apart = (statistics.median(rates[key]) for key in (True, False))
    figures = {"tokens_per_s": round(shared, 1), "of_requests": round(apart, 1)}
    return figures | {"shared": round(shared / apart, 3)}, texts


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every configuration; ratios are to the last one."""
    found = {name: await measure(name, args) for name in args.speculative_config}
    last, wanted = found[args.speculative_config[-1]]
    return {
        name: figures
        | {
            "equal": texts == wanted,
            "speedup": round(figures["tokens_per_s"] / last["tokens_per_s"], 3),
        }
        for name, (figures, texts) in found.items()
    }


def _chats(path: str) -> list[dict[str, Any]]:
    """Return the conversations of a file, those with tools left out."""
    return [chat for chat in json.loads(Path(path).read_text()) if not chat.get("tools")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="folder or name; none = default")
    parser.add_argument("--speculative-config", nargs="+", default=["none"])
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--groups", type=int, default=2, help="prompts at once")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--chats", type=_chats, metavar="FILE", help="of objects with messages")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=90, help="token ids that prompts have")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="further flags of the server, behind --")
    args = parser.parse_args()
    figures = uvloop.run(run(args))
    asked = vars(args) | {"chats": len(args.chats or ())}
    print(json.dumps({"machine": machine.describe()} | asked | figures))


if __name__ == "__main__":
    main()
