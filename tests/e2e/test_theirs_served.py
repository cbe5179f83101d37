"""An architecture that nobody prepared, computed by transformers' code: drafts, a killed rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.checkpoints.tiny import make_tiny_checkpoint
from support.clients.completions import client_of, read
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(2, turn=1)]

FLAGS = (
    *("--max-num-seqs", "8", "--kv-cache-memory", "0.02", "--max-model-len", "400"),
    *("--no-adaptive-draft-length", "--dtype", "bfloat16"),
    *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'),
)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


@pytest.fixture(scope="module")
def stack(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = (*FLAGS, "--tensor-parallel-size", str(ranks))
    folder = make_tiny_checkpoint(
        tmp_path_factory.mktemp("model") / "cohere", "cohere", tokenizer=True, intermediate=100
    )
    with serve(folder, tmp_path_factory.mktemp("logs"), *flags) as running:
        yield running


def complete(stack: Stack, drafts: int, **options: Any) -> Any:
    options = {"max_tokens": 150, "temperature": 0.9, "seed": 5} | options
    extra = {"speculative": {"num_tokens": drafts}}
    return client_of(stack).completions.create(
        model="cohere", prompt="a quick", extra_body=extra, **options
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_text_of_theirs(stack: Stack, temperature: float) -> None:
    texts = {
        complete(stack, drafts, temperature=temperature).choices[0].text for drafts in (0, 1, 4)
    }
    assert len(texts) == 1
    assert texts != {""}
    assert stack.metric("vllm:spec_decode_num_draft_tokens_total") > 0


def test_a_killed_rank_changes_no_text_of_theirs(stack: Stack, ranks: int) -> None:
    plain = complete(stack, 0).choices[0].text
    told = read(complete(stack, 4, stream=True), lambda: stack.kill_rank(ranks - 1))
    assert told.text == plain
