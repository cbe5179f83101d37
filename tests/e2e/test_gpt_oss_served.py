"""A random gpt-oss behind `surestep serve`, used with the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from support.checkpoints.gpt_oss import WINDOW, make_mxfp4_twins
from support.clients.completions import client_of, read
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(3, turn=2)]

FLAGS = (
    *("--served-model-name", "gpt-oss", "--max-num-seqs", "8", "--kv-cache-memory", "0.05"),
    *(
        "--speculative-config",
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}',
    ),
    "--no-adaptive-draft-length",
)
TEXT = "the dog and the fox, the dog and the fox, the dog"


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Of experts in MXFP4, in float32."""
    folder = make_mxfp4_twins(tmp_path_factory.mktemp("gpt-oss"), tokenizer=True).quantized
    with serve(folder, tmp_path_factory.mktemp("gpt-oss-logs"), *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(gpt_oss: Stack) -> OpenAI:
    return client_of(gpt_oss)


def complete(client: OpenAI, drafts: int | None, **options: Any) -> Any:
    """A completion with at most so many drafts a step, several windows long."""
    extra: dict[str, Any] = {"ignore_eos": True}
    extra |= {"speculative": {"num_tokens": drafts}} if drafts is not None else {}
    options = {"max_tokens": 5 * WINDOW, "temperature": 0.0} | options
    return client.completions.create(model="gpt-oss", prompt=TEXT, extra_body=extra, **options)


def test_a_chat_is_answered(client: OpenAI) -> None:
    answers = [
        client.chat.completions.create(
            model="gpt-oss",
            messages=[{"role": "user", "content": TEXT}],
            max_tokens=24,
            temperature=0,
            extra_body={"ignore_eos": True, "speculative": {"num_tokens": drafts}},
        )
        for drafts in (0, 4)
    ]
    assert answers[0].choices[0].message.content
    assert answers[0].choices[0].message == answers[1].choices[0].message
    assert answers[0].usage is not None
    assert answers[0].usage.completion_tokens == 24


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_text(gpt_oss: Stack, client: OpenAI, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 11}
    plain = complete(client, 0, **options).choices[0].text
    before = gpt_oss.metric("vllm:spec_decode_num_draft_tokens_total")
    for drafts in (1, 2, 4, None):
        assert complete(client, drafts, **options).choices[0].text == plain
    assert gpt_oss.metric("vllm:spec_decode_num_draft_tokens_total") > before


def test_a_killed_worker_changes_no_text(gpt_oss: Stack, client: OpenAI) -> None:
    """Keys and values are made again of prompt and emitted tokens, in windows and out of them."""
    options = {"temperature": 0.8, "seed": 5, "max_tokens": 100}
    quiet = complete(client, None, **options).choices[0].text
    stream = complete(client, None, stream=True, **options)
    assert read(stream, gpt_oss.kill_rank).text == quiet
