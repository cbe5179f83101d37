"""vllm-project/vllm#40926: GLM-5.1-FP8 with its MTP layer, by the report's command line.

Two ranks share out heads and experts; latents and index keys are FP8, and longer than what indexers
choose. Every answer is compared with the one without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from support.checkpoints.deepseek import TOP_K, make_tiny_glm_fp8
from support.clients.completions import client_of, read
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(300), pytest.mark.rotates(3, turn=0)]

LONGEST = 202752
# As in the report, but for the number of GPUs, the store of LMCache and the parsers of text.
REPORTED = (
    *("--served-model-name", "glm", "--tensor-parallel-size", "2", "--enable-expert-parallel"),
    *("--kv-cache-dtype", "fp8", "--enable-prefix-caching", "--max-model-len", f"{LONGEST}"),
    *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}'),
    *("--disable-custom-all-reduce", "--no-enable-flashinfer-autotune"),
)
OURS = ("--kv-cache-memory", "0.05", "--max-num-seqs", "8", "--no-adaptive-draft-length")
TEXT = " ".join(["the dog and the fox,"] * 6)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = make_tiny_glm_fp8(tmp_path_factory.mktemp("glm") / "model", LONGEST)
    with serve(model, tmp_path_factory.mktemp("glm-logs"), *REPORTED, *OURS) as running:
        yield running


@pytest.fixture(scope="module")
def client(glm: Stack) -> OpenAI:
    return client_of(glm)


def complete(client: OpenAI, drafts: int | None, **options: Any) -> Any:
    """A completion with at most so many drafts a step; its prompt is longer than what is chosen."""
    extra: dict[str, Any] = {"ignore_eos": True}
    extra |= {"speculative": {"num_tokens": drafts}} if drafts is not None else {}
    options = {"max_tokens": 5 * TOP_K, "temperature": 0.0} | options
    return client.completions.create(model="glm", prompt=TEXT, extra_body=extra, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_text(glm: Stack, client: OpenAI, temperature: float) -> None:
    """Nor does the prefix, whose latents and index keys the cache has after the first answer."""
    options = {"temperature": temperature, "seed": 11}
    plain = complete(client, 0, **options)
    before = glm.metric("vllm:spec_decode_num_draft_tokens_total")
    for drafts in (1, 2, None):
        answer = complete(client, drafts, **options)
        assert answer.choices[0].text == plain.choices[0].text
        assert answer.usage.prompt_tokens_details.cached_tokens > TOP_K
    assert glm.metric("vllm:spec_decode_num_draft_tokens_total") > before


def test_a_killed_worker_changes_no_text(glm: Stack, client: OpenAI) -> None:
    """Weights are found in shared memory; latents and index keys are made again of all tokens."""
    options = {"temperature": 0.8, "seed": 5, "max_tokens": 100}
    quiet = complete(client, None, **options).choices[0].text
    stream = complete(client, None, stream=True, **options)
    assert read(stream, glm.kill_rank).text == quiet
