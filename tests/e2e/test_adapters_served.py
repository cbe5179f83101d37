"""Adapters on a served engine: peft's tokens, whatever runs beside, is killed or is loaded."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from e2e.conftest import SPECULATION
from openai import NotFoundError, OpenAI, PermissionDeniedError
from support.checkpoints.adapters import EXPERTS, Asked, make_adapter, peft_answers
from support.checkpoints.tiny import make_tiny_checkpoint
from support.clients.completions import client_of
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(600), pytest.mark.rotates(2, turn=1)]

KEY = {"authorization": "Bearer admin"}
LENGTH = 16
SPARE = 3  # places beyond those of the adapters at the start
ATTENTION = ["q_proj", "v_proj", "o_proj"]
TARGETS = {"llama": [*ATTENTION, "gate_proj", "down_proj"], "mixtral": [*ATTENTION, *EXPERTS]}


class Adapted(NamedTuple):
    """A server, its model, and adapters by name."""

    stack: Stack
    model: Path
    folders: dict[str, Path]

    def order(self, path: str, body: Any, *, expect: int = 200) -> str:
        reply = httpx.post(self.stack.url + path, headers=KEY, json=body, timeout=60)
        assert reply.status_code == expect, reply.text
        return reply.text

    def load(self, name: str, folder: Path, *, expect: int = 200, **extra: Any) -> str:
        body = {"lora_name": name, "lora_path": str(folder)} | extra
        return self.order("/v1/load_lora_adapter", body, expect=expect)

    def unload(self, name: str, *, expect: int = 200) -> str:
        return self.order("/v1/unload_lora_adapter", {"lora_name": name}, expect=expect)

    def answer(self, name: str, prompt: Sequence[int], seed: int) -> list[int]:
        asked = {"return_token_ids": True, "ignore_eos": True}
        with client_of(self.stack) as client:
            made = client.completions.create(
                model=name,
                prompt=list(prompt),
                max_tokens=LENGTH,
                temperature=0.7 if seed % 2 else 0.0,
                seed=seed,
                extra_body=asked,
            )
        return list(made.choices[0].model_dump()["token_ids"])

    def stream(
        self, name: str, prompt: list[int], length: int, begun: threading.Event
    ) -> list[int]:
        asked = {"return_token_ids": True, "ignore_eos": True}
        chunks = client_of(self.stack).completions.create(
            model=name,
            prompt=prompt,
            max_tokens=length,
            temperature=0,
            stream=True,
            extra_body=asked,
        )
        ids = list[int]()
        for chunk in chunks:
            ids += chunk.choices[0].model_dump()["token_ids"]
            begun.set()
        return ids

    def expected(self, name: str, prompt: Sequence[int], seed: int) -> list[int]:
        asked = how_asked(prompt, seed)
        return peft_answers(self.model, self.folders.get(name), [asked], LENGTH)[asked]


def how_asked(prompt: Sequence[int], seed: int) -> Asked:
    """Every other request is seeded, the others are greedy."""
    return Asked(tuple(prompt), 0.7 if seed % 2 else 0.0, seed)


def prompts(count: int) -> list[list[int]]:
    """Ends differ, so that prefixes are found in the cache; some repeat what they say."""
    return [[*range(30, 50), *([7, 8, 9, 7, 8, 9] if i % 2 else []), 60 + i] for i in range(count)]


def differing(adapted: Adapted, num_prompts: int, disturb: Callable[[], object]) -> list[str]:
    """Ask all adapters and the model for answers to all prompts at once, and disturb; return those
    that are not peft's."""
    folders = {"tiny": None, **adapted.folders}
    asked = [how_asked(prompt, seed) for seed, prompt in enumerate(prompts(num_prompts))]
    expected = {
        name: peft_answers(adapted.model, folder, asked, LENGTH) for name, folder in folders.items()
    }
    pairs = [(name, one) for one in asked for name in folders]
    with ThreadPoolExecutor(32) as threads:
        found = [threads.submit(adapted.answer, name, *one[::2]) for name, one in pairs]
        found[len(found) // 4].result()
        disturb()
        return [
            f"{name} {one}"
            for (name, one), answer in zip(pairs, found, strict=True)
            if answer.result() != expected[name][one]
        ]


def serve_adapters(
    folder: Path, count: int, *flags: str, on_demand: bool = False, family: str = "llama"
) -> Iterator[Adapted]:
    model = make_tiny_checkpoint(folder / "tiny", family, seed=7, tokenizer=True)
    folders = {
        f"adapter-{i}": make_adapter(
            model,
            folder / "adapters" / f"adapter-{i}",
            seed=i,
            rank=1 + i % 8,
            targets=TARGETS[family],
        )
        for i in range(count)
    }
    places = 2 if on_demand else count + SPARE
    opened = "--enable-lora", "--max-loras", str(places), "--admin-api-key", "admin"
    at_start = "--lora-modules", *(f"{name}={path}" for name, path in folders.items())
    asked = "--lora-folder", str(folder / "adapters")
    words = (*opened, *(asked if on_demand else at_start), *flags)
    with serve(model, folder / "logs", "--kv-cache-memory", "0.1", *words) as stack:
        stack.headers = KEY
        yield Adapted(stack, model, folders)


RANKS = {
    "one rank": ("llama",),
    "two ranks": ("llama", "--tensor-parallel-size", "2"),
    "experts": ("mixtral", "--tensor-parallel-size", "2", "--enable-expert-parallel"),
}


@pytest.fixture(scope="module", params=RANKS)
def adapted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Adapted]:
    folder, (family, *ranks) = tmp_path_factory.mktemp("adapted"), RANKS[request.param]
    speculation = "--speculative-config", SPECULATION
    yield from serve_adapters(folder, 4, *speculation, *ranks, family=family)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_tokens_are_those_of_peft_although_processes_are_killed(adapted: Adapted) -> None:
    stack = adapted.stack
    assert not differing(adapted, 3, lambda: None)
    assert not differing(adapted, 3, lambda: kill(stack.scheduler()["ranks"][0]["pid"]))
    assert not differing(adapted, 3, lambda: kill(stack.scheduler()["pid"]))
    stack.wait_until(lambda: stack.scheduler()["epoch"] >= 3, "an epoch after both")
    cards = httpx.get(f"{stack.url}/v1/models", headers=KEY, timeout=30).json()["data"]
    assert {card["id"]: card["parent"] for card in cards} == {
        "tiny": None,
        **dict.fromkeys(adapted.folders, "tiny"),
    }


def test_adapters_come_and_go_while_requests_run(adapted: Adapted) -> None:
    """Open requests go on with what they began with."""
    prompt, first, second = prompts(1)[0], *list(adapted.folders)[:2]
    with ThreadPoolExecutor(2) as threads:
        adapted.load("new", adapted.folders[first])
        assert adapted.answer("new", prompt, 0) == adapted.expected(first, prompt, 0)
        begun = threading.Event()
        long = threads.submit(adapted.stream, "new", prompt, 400, begun)
        assert begun.wait(60)
        adapted.unload("new")
        with pytest.raises(NotFoundError):
            adapted.answer("new", prompt, 0)
        assert long.result()[:LENGTH] == adapted.expected(first, prompt, 0)
        assert len(long.result()) == 400
    adapted.load("new", adapted.folders[second])
    assert adapted.answer("new", prompt, 0) == adapted.expected(second, prompt, 0)
    assert "loaded already" in adapted.load("new", adapted.folders[first], expect=400)
    adapted.load("new", adapted.folders[first], load_inplace=True)
    assert adapted.answer("new", prompt, 0) == adapted.expected(first, prompt, 0)
    assert adapted.unload("new") == "Success: LoRA adapter 'new' removed successfully."


def test_what_cannot_be_loaded_is_refused_by_name(adapted: Adapted, tmp_path: Path) -> None:
    first = next(iter(adapted.folders.values()))
    assert "cannot read" in adapted.load("wrong", tmp_path, expect=404)
    assert "no absolute path" in adapted.load("wrong", Path("relative"), expect=400)
    assert "name of a model" in adapted.load("tiny", first, expect=400)
    assert "not_found" in adapted.unload("wrong", expect=404)
    names = [f"one-{i}" for i in range(SPARE)]
    for name in names:
        adapted.load(name, first)
    assert "--max-loras" in adapted.load("too-many", first, expect=429)
    for name in names:
        adapted.unload(name)
    body = {"lora_name": "x", "lora_path": str(first)}
    reply = httpx.post(f"{adapted.stack.url}/v1/load_lora_adapter", json=body, timeout=30)
    assert reply.status_code == 401


def lists(client: OpenAI, names: list[str]) -> bool:
    return [card.id for card in client.models.list().data] == names


def test_requests_load_what_the_folder_has(tmp_path: Path) -> None:
    """In turns at two places, all at once where they wait for one, and although a worker dies."""
    keys = tmp_path / "keys"
    keys.write_text("none\nlimited adapters=adapter-1\n")
    prompt = prompts(2)[1]
    for adapted in serve_adapters(tmp_path, 4, "--api-key-file", str(keys), on_demand=True):
        for name in (*adapted.folders, "adapter-3", "tiny", "adapter-0"):
            assert adapted.answer(name, prompt, 0) == adapted.expected(name, prompt, 0)
        assert not differing(adapted, 4, adapted.stack.kill_rank)  # four at two places
        for name in ("adapter-1", "adapter-3"):
            assert adapted.answer(name, prompt, 1) == adapted.expected(name, prompt, 1)
        for name in ("adapter-4", "../adapters/adapter-0"):
            with pytest.raises(NotFoundError, match="does not exist"):
                adapted.answer(name, prompt, 0)
        limited = client_of(adapted.stack).with_options(api_key="limited")
        adapted.stack.wait_until(partial(lists, limited, ["tiny", "adapter-1"]), "its next look")
        limited.completions.create(model="adapter-1", prompt=prompt, max_tokens=1)
        with pytest.raises(PermissionDeniedError):
            limited.completions.create(model="adapter-3", prompt=prompt, max_tokens=1)
        with pytest.raises(PermissionDeniedError):
            limited.models.retrieve("adapter-3")


@pytest.mark.parametrize("drafting", [SPECULATION, "none"], ids=["drafts", "no drafts"])
@pytest.mark.rotates(64)  # ten minutes each
@pytest.mark.timeout(1800)
def test_sixty_four_adapters_at_once(tmp_path: Path, drafting: str) -> None:
    for adapted in serve_adapters(tmp_path, 64, "--speculative-config", drafting):
        assert not differing(adapted, 20, adapted.stack.kill_rank)
