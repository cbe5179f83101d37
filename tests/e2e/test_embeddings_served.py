"""An embedding checkpoint and a model that writes text, both asked for vectors over HTTP."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from e2e.conftest import FLAGS
from openai import BadRequestError
from support.checkpoints.embedders import make_tiny_embedder, vectors_by_transformers
from support.clients.completions import client_of
from support.processes.stack import Stack, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(3, turn=1)]

TOLERANCE = 1e-5
TEXTS = [f"text {i} " + "the quick brown fox jumps " * i for i in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint like Qwen3-Embedding: named a model that writes text, saved without its head."""
    return make_tiny_embedder(tmp_path_factory.mktemp("embedder") / "tiny", mean=True)


@pytest.fixture(scope="module")
def embedder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = (*FLAGS, "--hf-overrides", '{"is_matryoshka": true}')
    with serve(folder, tmp_path_factory.mktemp("logs"), *flags) as running:
        yield running


def embed(stack: Stack, texts: list[str] | list[list[int]], **options: int) -> np.ndarray:
    """Vectors [N, H] of one request."""
    answer = client_of(stack).embeddings.create(model="tiny", input=texts, **options)  # type: ignore[arg-type]
    assert [one.index for one in answer.data] == list(range(len(texts)))
    return np.array([one.embedding for one in answer.data], dtype=np.float32)


def token_ids(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def test_vectors_are_those_of_transformers(embedder: Stack, folder: Path) -> None:
    ids = token_ids(folder)
    theirs = vectors_by_transformers(folder, ids, mean=True).numpy()
    ours = embed(embedder, TEXTS)
    assert np.abs(ours - theirs).max() < TOLERANCE
    assert np.array_equal(embed(embedder, ids), ours)  # what langchain sends
    short = embed(embedder, TEXTS, dimensions=16)
    assert np.allclose(short, ours[:, :16] / np.linalg.norm(ours[:, :16], axis=1, keepdims=True))


def test_one_by_one_or_together_the_bits_are_the_same(embedder: Stack) -> None:
    together = embed(embedder, TEXTS)
    with ThreadPoolExecutor(4) as threads:
        alone = list(threads.map(lambda text: embed(embedder, [text])[0], TEXTS))
    assert np.array_equal(np.stack(alone), together)


def test_scores_are_cosines_of_the_vectors(embedder: Stack) -> None:
    query, *documents = TEXTS
    vectors = embed(embedder, TEXTS)
    wanted = vectors[1:] @ vectors[0]
    body = {"text_1": query, "text_2": documents}
    scored = httpx.post(f"{embedder.url}/v1/score", json=body, timeout=60).json()["data"]
    assert np.allclose([one["score"] for one in scored], wanted, atol=1e-5)
    body = {"query": query, "documents": documents}
    ranked = httpx.post(f"{embedder.url}/v1/rerank", json=body, timeout=60).json()["results"]
    assert [one["index"] for one in ranked] == np.argsort(-wanted, kind="stable").tolist()


def test_a_model_without_head_writes_nothing(embedder: Stack) -> None:
    with pytest.raises(BadRequestError, match="it makes embeddings"):
        client_of(embedder).completions.create(model="tiny", prompt="x")


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
def test_a_killed_process_costs_no_vector(embedder: Stack, victim: str) -> None:
    """Every request that was open starts over."""
    before = embed(embedder, TEXTS)
    scheduler = embedder.status()["scheduler"]
    killed = threading.Event()

    def ask() -> None:
        """Send request after request, so that some are open when the process dies."""
        while True:
            is_last = killed.is_set()
            assert np.array_equal(embed(embedder, TEXTS * 10), np.tile(before, (10, 1)))
            if is_last:
                return

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(ask) for _ in range(4)]
        try:
            embedder.wait_until(
                lambda: embedder.status()["scheduler"]["num_open_requests"] > 0, "requests"
            )
            process = scheduler["ranks"][0] if victim == "worker" else scheduler
            os.kill(process["pid"], signal.SIGKILL)
        finally:
            killed.set()
        for call in calls:
            call.result()
    assert embedder.status()["scheduler"]["epoch"] > scheduler["epoch"]


def test_a_model_that_writes_text_makes_vectors_too(stack: Stack, tiny_model: Path) -> None:
    ids = token_ids(tiny_model)
    theirs = vectors_by_transformers(tiny_model, ids, mean=False).numpy()
    assert np.abs(embed(stack, TEXTS) - theirs).max() < TOLERANCE
    text = client_of(stack).completions.create(model="tiny", prompt="x", max_tokens=3)
    assert text.choices[0].text


def test_a_judge_is_served_by_the_command_line_of_vllm(tiny_model: Path, tmp_path: Path) -> None:
    """Its class of vLLM is no obstacle; scores are those of transformers' logits."""
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    template = "{{ messages[0].content }} | {{ messages[1].content }} 'query' 'document'"
    flags = (*FLAGS, "--runner", "pooling", "--chat-template", template)
    query, *documents = TEXTS
    with serve(tiny_model, tmp_path, *flags, "--hf-overrides", json.dumps(overrides)) as stack:
        body = {"text_1": query, "text_2": documents}
        scored = httpx.post(f"{stack.url}/v1/score", json=body, timeout=60).json()["data"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    labels = tokenizer.convert_tokens_to_ids(["n", "y"])
    for one, document in zip(scored, documents, strict=True):
        ids = tokenizer(f"{query} | {document} 'query' 'document'", return_tensors="pt")
        with torch.inference_mode():
            logits = model(ids["input_ids"]).logits[0, -1, labels]
        assert one["score"] == pytest.approx(float(logits.softmax(0)[1]), abs=TOLERANCE)
