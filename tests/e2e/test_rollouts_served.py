"""Rollouts: samples with drafts between updates of the weights, and a rank that dies on the way.

What a trainer takes for the policy's is the policy's, bit for bit, whatever happened meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from repo.source import ROOT
from safetensors.torch import load_file, save
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotates(3, turn=2)]

MODEL = ROOT / "tests/data/tiny-hybrid"
KEY = {"authorization": "Bearer admin"}
FLAGS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--kv-cache-memory", "0.05")
DRAFTS = '{"method": "mtp", "num_speculative_tokens": 3}'
PROMPTS = [[(37 * i + 11 * j) % 1000 + 5 for j in range(9 + 7 * i)] for i in range(4)]
SAMPLES, LENGTH, NUM_UPDATES = 4, 24, 3


class Sample(NamedTuple):
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    version: str


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    logs = tmp_path_factory.mktemp("policy-logs")
    opened = "--enable-weight-updates", "--admin-api-key", "admin"
    with serve(MODEL, logs, *FLAGS, *opened, "--speculative-config", DRAFTS) as running:
        running.headers = KEY
        yield running


def complete(stack: Stack, prompt: list[int], **asked: Any) -> list[dict[str, Any]]:
    """The choices of a completion of token ids, in token ids."""
    body = {"prompt": prompt, "temperature": 1.0, "return_token_ids": True, "ignore_eos": True}
    reply = httpx.post(f"{stack.url}/v1/completions", json=body | asked, timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-weight-version"] == reply.json()["choices"][0]["weight_version"]
    choices: list[dict[str, Any]] = reply.json()["choices"]
    return choices


def rollout(stack: Stack, **asked: Any) -> list[Sample]:
    """Several samples of each prompt, all at once."""

    def of(prompt: list[int]) -> list[Sample]:
        choices = complete(
            stack, prompt, n=SAMPLES, seed=len(prompt), max_tokens=LENGTH, logprobs=1, **asked
        )
        return [
            Sample(prompt, c["token_ids"], c["logprobs"]["token_logprobs"], c["weight_version"])
            for c in choices
        ]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [sample for samples in pool.map(of, PROMPTS) for sample in samples]


def recomputed(stack: Stack, sample: Sample) -> list[float]:
    """What the weights that are served make of each token of a sample behind those before it."""
    whole = sample.prompt + sample.ids
    (choice,) = complete(stack, whole, max_tokens=1, prompt_logprobs=0)
    behind = choice["prompt_logprobs"][len(sample.prompt) :]
    return [at[str(id_)]["logprob"] for at, id_ in zip(behind, sample.ids, strict=True)]


def trained_on(folder: Path, step: int) -> bytes:
    """All weights of the policy, a step of training later: each changes a little."""
    tensors = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    noise = torch.Generator().manual_seed(step)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        by = torch.randn(tensor.shape, generator=noise) * 0.02
        return (tensor * (1 + by)).to(tensor.dtype)

    return save({name: moved(tensor) for name, tensor in tensors.items()})


def update(stack: Stack, data: bytes, version: str) -> dict[str, Any]:
    headers = KEY | {"content-type": "application/octet-stream"}
    query = {"weight_version": version, "mode": "keep"}
    url = f"{stack.url}/update_weights_from_tensor"
    reply = httpx.post(url, params=query, headers=headers, content=data, timeout=120)
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    return told


def test_samples_are_the_policys_bit_for_bit(policy: Stack) -> None:
    seen: set[tuple[int, ...]] = set()
    for step in range(NUM_UPDATES + 1):
        version = str(step) if step else "default"
        if step:
            told = update(policy, trained_on(MODEL, step), version)
            assert not told["schedulers"][0]["unchanged"]
            assert told["schedulers"][0]["check_accepted"] > 0
        drafted = policy.metric("vllm:spec_decode_num_accepted_tokens_total")
        with ThreadPoolExecutor(1) as pool:
            rolling = pool.submit(rollout, policy)
            if step % 2:
                policy.kill_rank()
            samples = rolling.result()
        assert policy.metric("vllm:spec_decode_num_accepted_tokens_total") > drafted
        assert {sample.version for sample in samples} == {version}
        assert [sample.logprobs for sample in samples] == [
            recomputed(policy, sample) for sample in samples
        ]
        assert samples == rollout(policy, speculative={"num_tokens": 0})
        texts = {tuple(sample.ids) for sample in samples}
        assert len(texts) > len(PROMPTS)  # samples of one prompt differ
        assert not texts <= seen
        seen |= texts


def test_weights_that_are_the_same_are_told(policy: Stack) -> None:
    """A trainer that sends what it has sent before learns of it, and so do its answers."""
    data = trained_on(MODEL, 9)
    assert not update(policy, data, "once")["schedulers"][0]["unchanged"]
    before = rollout(policy)
    told = update(policy, data, "again")
    assert told["schedulers"][0]["unchanged"]
    after = rollout(policy)
    assert [s.ids for s in after] == [s.ids for s in before]
    assert {s.version for s in after} == {"again"}
