"""POST /v1/score and /v1/rerank over HTTP: which texts are compared, and in which order they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.fakes.scheduler import emulated_vector, failing
from support.processes.gateway_stack import Stack, StartStack
from surestep_common.errors import ModelFault
from surestep_gateway.apis.embeddings.routes import RERANK_PATHS, SCORE_PATHS
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.sampling_pb2 import LABEL_LOGITS, LAST_TOKEN

TEXTS = ["the quick brown fox", "hello world", "Grüße, 你好", "x"]


def likeness(tokenizer: Tokenizer, one: str, other: str) -> float:
    """The cosine of what the scheduler makes of two texts."""
    texts = (tokenizer.encode_now(text, add_special_tokens=True) for text in (one, other))
    a, b = (np.array(emulated_vector(ids, LAST_TOKEN)) for ids in texts)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


async def results(stack: Stack, path: str, **body: Any) -> dict[str, Any]:
    response = await stack.client.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0
    assert found["model"] == "tiny"
    return found


@pytest.mark.parametrize("path", SCORE_PATHS)
async def test_scores_stand_in_the_order_of_their_pairs(
    stack: Stack, tokenizer: Tokenizer, path: str
) -> None:
    query, *rest = TEXTS
    for body, pairs in (
        ({"text_1": query, "text_2": rest}, [(query, one) for one in rest]),
        ({"text_1": [query], "text_2": rest[0]}, [(query, rest[0])]),
        ({"text_1": TEXTS[:2], "text_2": TEXTS[2:]}, [*zip(TEXTS[:2], TEXTS[2:], strict=True)]),
        ({"queries": query, "documents": rest}, [(query, one) for one in rest]),
        ({"data_1": query, "data_2": query}, [(query, query)]),
    ):
        found = await results(stack, path, **body)
        assert [entry["index"] for entry in found["data"]] == list(range(len(pairs)))
        wanted = [likeness(tokenizer, *pair) for pair in pairs]
        assert [entry["score"] for entry in found["data"]] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("path", RERANK_PATHS)
async def test_documents_are_ranked(stack: Stack, tokenizer: Tokenizer, path: str) -> None:
    query, *rest = TEXTS
    documents: Sequence[Any] = [*rest, {"text": query}]
    texts = [*rest, query]
    order = sorted(range(4), key=lambda n: -likeness(tokenizer, query, texts[n]))
    for asked, count in (({}, 4), ({"top_n": 2}, 2), ({"top_n": 0}, 4), ({"top_n": 9}, 4)):
        found = (await results(stack, path, query=query, documents=documents, **asked))["results"]
        assert [one["index"] for one in found] == order[:count]
        assert [one["document"] for one in found] == [{"text": texts[n]} for n in order[:count]]
        assert found[0]["index"] == 3
        assert found[0]["relevance_score"] == pytest.approx(1.0)
    bare = await results(stack, path, query=query, documents=texts, return_documents=False)
    assert bare["results"][0].keys() == {"index", "relevance_score"}


async def test_large_requests_are_prepared_apart(start_stack: StartStack) -> None:
    """In a text process, with the same answer."""
    near, apart = await start_stack(), await start_stack(text_processes=1)
    body = {"query": "fox", "documents": [f"{n} foxes" for n in range(100)]}
    first, second = [await results(stack, "/rerank", **body) for stack in (near, apart)]
    assert first["results"] == second["results"]


JUDGE = {"classifier_from_token": ["n", "y"]}


async def test_a_judge_scores_by_its_logits(start_stack: StartStack) -> None:
    """In a text process as on the event loop; the logits themselves, where they are wanted."""
    near = await start_stack(hf_overrides=JUDGE)
    apart = await start_stack(hf_overrides=JUDGE, text_processes=1)
    query, *documents = [*TEXTS, *(f"{n} foxes" for n in range(20))]
    body = {"query": query, "documents": documents}
    ranked = await results(near, "/rerank", **body)
    assert ranked["results"] == (await results(apart, "/rerank", **body))["results"]
    calls = near.scheduler.requests[-len(documents) :]
    labels = [near.server.gateway.tokenizer.id(token) for token in ("n", "y")]
    assert all(list(call.label_ids) == labels for call in calls)
    assert all(call.pooling == LABEL_LOGITS for call in calls)
    assert ranked["usage"]["prompt_tokens"] == sum(len(call.prompt_ids) for call in calls)
    order = {call.request_id.rpartition("-")[2]: call for call in calls}
    logits = [
        np.diff(emulated_vector(order[str(n)].prompt_ids, LABEL_LOGITS, order[str(n)].label_ids))
        for n in range(len(documents))
    ]
    wanted = [float(1 / (1 + np.exp(-logit[0]))) for logit in logits]
    found = sorted(ranked["results"], key=lambda one: one["index"])
    assert [one["relevance_score"] for one in found] == pytest.approx(wanted, abs=1e-6)
    assert ranked["results"][0]["relevance_score"] == max(wanted)
    pairs = {"text_1": query, "text_2": documents, "use_activation": False}
    scored = await results(near, "/score", **pairs)
    assert [one["score"] for one in scored["data"]] == pytest.approx([float(x[0]) for x in logits])
    plain = await near.client.post("/v1/embeddings", json={"input": "x"})
    assert len(plain.json()["data"][0]["embedding"]) == 8  # which it makes as before


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "must be one text, or 1"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1", "or 3 like text_2, not 2"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2", "at least 1"),
    ("/score", {"text_1": "a"}, "text_2", "missing"),
    ("/score", {"text_1": "a", "text_2": [5]}, "text_2[0]", "valid string"),
    ("/score", {"text_1": "a", "text_2": "b", "model": "other"}, "model", "'other'"),
    ("/score", {"text_1": "word " * 300, "text_2": "b"}, "text_1", "602 tokens"),
    ("/rerank", {"query": "a", "documents": []}, "documents", "at least 1"),
    ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048"),
    ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text", "missing"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than"),
    ("/rerank", {"query": "a", "documents": ["word " * 300]}, "documents", "602 tokens"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED)
async def test_refused_by_name(
    stack: Stack, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    response = await stack.client.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400), response.text
    assert error["param"] == param
    assert message in error["message"]


async def test_a_failure_is_the_whole_answer(stack: Stack) -> None:
    stack.scheduler.script = failing(ModelFault("no usable states"))
    response = await stack.client.post("/rerank", json={"query": "a", "documents": ["b", "c"]})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "no usable states"
