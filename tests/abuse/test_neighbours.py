"""What a tenant learns of another's prompts: cached tokens, and times to the first token."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(300), pytest.mark.rotates(3, turn=2)]
LENGTH, BUDGET = 960, 64  # a prompt takes 15 steps, and one that is known takes one
TRIALS = 24
# Of pairs of times of two equal kinds, half have the smaller one first; the standard deviation of
# that share is 0.084 with so many trials (Mann and Whitney, 1947), and this is 4 of it.
EVEN = (0.16, 0.84)


class Seen(NamedTuple):
    """What one request shows its sender."""

    cached: int
    text: str
    took_s: float  # until the first token, which is the only one


class Tenant(httpx.Client):
    """Sends requests with one key."""

    def __init__(self, stack: Stack, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        super().__init__(base_url=stack.url, headers=headers, timeout=60)

    def ask(self, prompt: list[int], **fields: Any) -> Seen:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True} | fields
        begun = time.perf_counter()
        response = self.post("/v1/completions", json=body)
        took_s = time.perf_counter() - begun
        response.raise_for_status()
        answer = response.json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return Seen(cached, answer["choices"][0]["text"], took_s)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_checkpoint(folder, "llama", seed=7, tokenizer=True, max_position=2048)


@contextmanager
def two_tenants(model: Path, folder: Path, *flags: str) -> Iterator[tuple[Tenant, Tenant, Tenant]]:
    """A server's tenant with two keys, and one with another."""
    keys = folder / "keys"
    keys.write_text("key-of-a name=a\nother-key-of-a name=a\nkey-of-b name=b\n")
    sizes = (
        *("--max-num-seqs", "8", "--max-num-batched-tokens", str(BUDGET)),
        *("--kv-cache-memory", "0.1"),
    )
    with (
        serve(model, folder / "logs", *sizes, "--api-key-file", str(keys), *flags) as stack,
        Tenant(stack, "key-of-a") as a,
        Tenant(stack, "other-key-of-a") as again,
        Tenant(stack, "key-of-b") as b,
    ):
        yield a, again, b


def prompts(seed: int) -> Iterator[list[int]]:
    """Prompts of one length that have no block in common."""
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(3, 380) for _ in range(LENGTH)]


def faster(known: list[float], fresh: list[float]) -> float:
    """The share of pairs in which the known prompt was the faster one."""
    pairs = list(itertools.product(known, fresh))
    return sum(one < other for one, other in pairs) / len(pairs)


@pytest.mark.parametrize("shares", [False, True], ids=["apart", "shared"])
def test_nobody_can_tell_what_another_key_asked(model: Path, tmp_path: Path, shares: bool) -> None:
    """`shared` shows that the measurement sees what is to be seen."""
    flags = ["--share-prefix-cache-between-keys"] if shares else []
    known: list[Seen] = []
    fresh: list[Seen] = []
    texts = []
    with two_tenants(model, tmp_path, *flags) as (a, again, b):
        unseen = prompts(1)
        for trial in range(TRIALS):
            warm = next(unseen)
            texts.append(a.ask(warm).text)
            turns = [(known, warm), (fresh, next(unseen))]
            for seen, prompt in turns if trial % 2 else reversed(turns):
                seen.append(b.ask(prompt))
        own = again.ask(warm)
        salted = again.ask(warm, cache_salt="b")
        forged = b.ask(warm, cache_salt="a")
    share = faster([seen.took_s for seen in known], [seen.took_s for seen in fresh])
    medians = [sorted(seen.took_s for seen in kind)[TRIALS // 2] for kind in (known, fresh)]
    assert [seen.text for seen in known] == texts
    assert {seen.cached for seen in fresh} == {0}
    assert {seen.cached for seen in known} == ({LENGTH - 16} if shares else {0})
    assert own.cached == LENGTH - 16
    assert (salted.cached, forged.cached) == (0, 0)
    assert (EVEN[0] <= share <= EVEN[1]) != shares, (share, medians)
