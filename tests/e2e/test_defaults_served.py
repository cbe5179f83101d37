"""What the model folder says about sampling holds for whoever says nothing, over HTTP and gRPC."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.processes.ports import free_port
from support.processes.stack import Stack, serve
from surestep.client import Client
from surestep_common.request_params import neutral, shown

CHAT = {"messages": [{"role": "user", "content": "ab"}]}
LENGTH = 9
KEY = "a key of a gRPC client"


class Served(NamedTuple):
    """A server, its model folder, and where its scheduler listens."""

    stack: Stack
    folder: Path
    scheduler: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("defaults") / "tiny", tokenizer=True)
    file = folder / "generation_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "temperature": 0.0, "max_new_tokens": LENGTH}))
    scheduler = f"127.0.0.1:{free_port()}"
    flags: tuple[str, ...] = (
        "--override-generation-config",
        '{"top_k": 5}',
        "--scheduler-listen",
        scheduler,
    )
    flags += ("--speculative-config", "auto", "--grpc-api-key", KEY)
    with serve(folder, folder.parent / "logs", *flags) as stack:
        yield Served(stack, folder, scheduler)


def chat(served: Served, **fields: Any) -> Any:
    reply = httpx.post(
        f"{served.stack.url}/v1/chat/completions",
        json={**CHAT, "return_token_ids": True, **fields},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def ids(answer: Any) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def test_a_drafter_is_chosen(served: Served) -> None:
    log = (served.folder.parent / "logs/worker0.log").read_text()
    assert "ngram drafts: no draft head for this model is here" in log


def test_cards_and_log_say_what_holds(served: Served) -> None:
    (card,) = served.stack.get("/v1/models")["data"]
    changed = {"temperature": 0.0, "top_k": 5, "max_tokens": LENGTH}
    told = {**shown(neutral()), **changed}
    assert card["default_sampling_params"] == told
    log = (served.stack.logs / "worker0.log").read_text()
    assert "{'temperature': 0.0, 'top_k': 5, 'max_tokens': 9}" in log


def test_whoever_says_nothing_gets_what_the_folder_says(served: Served) -> None:
    greedy = chat(served, temperature=0, max_tokens=LENGTH, ignore_eos=True)
    quiet = [chat(served, ignore_eos=True, seed=seed) for seed in (1, 2)]
    assert [ids(answer) for answer in quiet] == [ids(greedy)] * 2
    assert len(ids(greedy)) == LENGTH
    nothing = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "max_tokens"))
    assert ids(chat(served, ignore_eos=True, **nothing)) == ids(greedy)


def test_whoever_says_something_gets_that(served: Served) -> None:
    warm = [chat(served, temperature=2.0, top_k=0, seed=seed, max_tokens=20) for seed in range(3)]
    assert len({tuple(ids(answer)) for answer in warm}) == 3


def test_a_grpc_client_that_says_nothing_gets_the_same(served: Served) -> None:
    answer = chat(served)
    with Client(served.scheduler, api_key=KEY) as client:
        completion = client.generate(answer["prompt_token_ids"], timeout_s=30)
    assert completion.token_ids == ids(answer)
    assert completion.finish_reason == answer["choices"][0]["finish_reason"]


def test_a_rank_that_comes_back_without_the_folder_says_the_same(served: Served) -> None:
    before = chat(served, ignore_eos=True)
    (rank,) = served.stack.status()["scheduler"]["ranks"]
    served.folder.rename(served.folder.with_name("elsewhere"))
    os.kill(rank["pid"], signal.SIGKILL)

    def is_back() -> bool:
        ranks = served.stack.status()["scheduler"].get("ranks", [])
        return bool(ranks) and ranks[0]["pid"] != rank["pid"] and served.stack.is_ready()

    served.stack.wait_until(is_back, "a new rank")
    assert ids(chat(served, ignore_eos=True)) == ids(before)
