"""POST /v1/embeddings over HTTP: shapes, order, cuts, bounds, refusals and lost schedulers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.checkpoints import tiny_tokenizer
from support.checkpoints.embedders import end_texts, write_modules
from support.fakes.scheduler import default_info, emulated_vector, emulating, failing
from support.processes.gateway_stack import Stack, StartStack, stacks
from surestep_common.errors import ConnectionLost, InvalidRequest, ModelFault, QueueFull
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.sampling_pb2 import LAST_TOKEN, MEAN
from surestep_proto.scheduler_pb2 import GenerateChunk, GenerateRequest

PATH = "/v1/embeddings"
TEXTS = ["the quick brown fox", "hello world", "Grüße, 你好", "x"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of an embedding model: mean pooling, and a token behind every text."""
    folder = tiny_tokenizer.save(tmp_path_factory.mktemp("models") / "embedder")
    write_modules(folder, pooling_mode_mean_tokens=True, pooling_mode_lasttoken=False)
    (folder / "config.json").write_text(json.dumps({"matryoshka_dimensions": [2, 4]}))
    end_texts(folder)
    return folder


async def embed(stack: Stack, **body: Any) -> httpx.Response:
    return await stack.client.post(PATH, json=body)


def vectors(response: httpx.Response) -> list[list[float]]:
    """Return those of an answer that is in order."""
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    assert all(entry["object"] == "embedding" for entry in data)
    return [entry["embedding"] for entry in data]


def expected(ids: Sequence[int], pooling: int = LAST_TOKEN, dimensions: int = 8) -> list[float]:
    vector = np.array(emulated_vector(ids, pooling)[:dimensions])
    return (vector / np.linalg.norm(vector)).tolist()  # type: ignore[no-any-return]


def refusal(response: httpx.Response, status: int = 400) -> tuple[str, str]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


async def test_every_form_of_input_is_answered_in_order(stack: Stack, tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode_now(text, add_special_tokens=True) for text in TEXTS]
    for given, wanted in (
        (TEXTS[0], ids[:1]),
        (TEXTS, ids),
        (ids[0], ids[:1]),
        (ids, ids),
        ([TEXTS[1]] * 3, [ids[1]] * 3),
    ):
        response = await embed(stack, input=given)
        found = vectors(response)
        assert found == [pytest.approx(expected(one), abs=1e-7) for one in wanted]
        count = sum(map(len, wanted))
        assert response.json()["usage"] == {"prompt_tokens": count, "total_tokens": count}
        assert response.json()["object"] == "list"
        assert response.json()["model"] == "tiny"
    request = stack.scheduler.requests[-1]
    assert request.pooling == LAST_TOKEN
    assert not request.HasField("sampling")


async def test_base64_holds_the_same_numbers(stack: Stack) -> None:
    floats = vectors(await embed(stack, input=TEXTS, encoding_format="float"))
    texts = vectors(await embed(stack, input=TEXTS, encoding_format="base64"))
    for numbers, text in zip(floats, texts, strict=True):
        decoded = np.frombuffer(base64.b64decode(str(text)), dtype="<f4")
        assert decoded.tolist() == np.array(numbers, dtype=np.float32).tolist()


async def test_the_official_client_reads_it(stack: Stack) -> None:
    """It asks for base64 unless it is told otherwise, and decodes it."""
    url = f"http://{stack.server.address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        plain = await client.embeddings.create(model="tiny", input=TEXTS)
        told = await client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    assert [one.index for one in plain.data] == [0, 1, 2, 3]
    for one, other in zip(plain.data, told.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
    assert plain.usage == told.usage


async def test_the_folder_says_how_vectors_are_made(embedder: Path) -> None:
    async with stacks(embedder) as start:
        stack = await start()
        ids = Tokenizer.load(embedder).encode_now("x", add_special_tokens=True)
        assert ids[-1] == 0
        assert vectors(await embed(stack, input="x")) == [pytest.approx(expected(ids, MEAN))]
        for dimensions in (2, 4, 8):
            found = vectors(await embed(stack, input="x", dimensions=dimensions))
            assert found == [pytest.approx(expected(ids, MEAN, dimensions))]
        for dimensions, message in ((3, "one of [2, 4, 8], got 3"), (9, "at most 8, got 9")):
            param, told = refusal(await embed(stack, input="x", dimensions=dimensions))
            assert (param, told) == ("dimensions", f"dimensions must be {message}")


async def test_the_operator_may_say_otherwise(start_stack: StartStack) -> None:
    raw = pytest.approx(emulated_vector([5, 6, 7], MEAN))
    pooler = {"pooling_type": "MEAN", "normalize": False}
    stack = await start_stack(pooler_config=pooler, hf_overrides={"is_matryoshka": True})
    assert vectors(await embed(stack, input=[5, 6, 7])) == [raw]
    for name in ("normalize", "use_activation"):
        body = {"input": [5, 6, 7], "dimensions": 3, name: True}
        assert vectors(await embed(stack, **body)) == [pytest.approx(expected([5, 6, 7], MEAN, 3))]


async def test_cut_inputs_keep_what_ends_a_text(embedder: Path) -> None:
    async with stacks(embedder) as start:
        stack = await start()
        text = TEXTS[0] * 30
        ids = Tokenizer.load(embedder).encode_now(text, add_special_tokens=True)
        for cut, wanted in (
            ({"truncate_prompt_tokens": 5}, [*ids[:4], 0]),
            ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, ids[-5:]),
            ({"truncate_prompt_tokens": 5, "add_special_tokens": False}, ids[:5]),
            ({"truncate_prompt_tokens": 1}, ids[:1]),
            ({"truncate_prompt_tokens": -1}, ids if len(ids) <= 256 else [*ids[:255], 0]),
        ):
            assert vectors(await embed(stack, input=text, **cut))
            assert list(stack.scheduler.requests[-1].prompt_ids) == wanted
        await embed(stack, input=ids, truncate_prompt_tokens=5)
        assert list(stack.scheduler.requests[-1].prompt_ids) == ids[:5]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "missing required parameter 'input'"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ""}, "input", "no tokens"),
        ({"input": [[]]}, "input", "no tokens"),
        ({"input": [1, "x"]}, "input[1]", "valid integer"),
        ({"input": ["x", 1]}, "input[1]", "valid string"),
        ({"input": [400]}, "input", "not in the vocabulary of 400"),
        ({"input": [-1]}, "input[0]", "greater than or equal to 0"),
        ({"input": [5] * 257}, "input", "maximum context length is 256 tokens"),
        ({"input": "word " * 5000}, "input", "maximum context length is 256 tokens"),
        ({"input": ["x"] * 2049}, "input", "at most 2048"),
        ({"input": 5}, "input", "valid string"),
        ({"input": "x", "encoding_format": "bytes"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "x", "dimensions": 4}, "dimensions", "not trained for other numbers"),
        ({"input": "x", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "x", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "at most 256"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "input", "no tokens"),
        ({"input": "x", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
        ({"input": "x", "endianness": "big"}, "endianness", "not supported"),
        ({"input": "x", "stream": True}, "stream", "not supported"),
        ({"input": "x", "padding": "max_length"}, "padding", "not supported"),
        ({"input": "x", "user": "u" * 4097}, "user", "at most 4096"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages", "write them into 'input'"),
    ],
)
@pytest.mark.rotates(1)
async def test_what_is_not_served_is_refused_by_name(
    stack: Stack, body: dict[str, Any], param: str, message: str
) -> None:
    named, told = refusal(await embed(stack, **body))
    assert named == param
    assert message in told
    assert not stack.scheduler.requests


async def test_what_is_too_long_has_the_code_that_clients_look_for(stack: Stack) -> None:
    for long in ([5] * 257, "word " * 300, "word " * 5000):
        error = (await embed(stack, input=long)).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("This model's maximum context length is 256 tokens.")


async def test_neutral_values_are_accepted(stack: Stack) -> None:
    body = {
        "padding": "do_not_pad",
        "embed_dtype": "float32",
        "endianness": "native",
        "stream": False,
        "dimensions": 8,
    }
    neutral = {"messages": None, "encoding_format": None, "user": "me", "request_id": "r1"}
    assert vectors(await embed(stack, input="x", **body, **neutral)) == vectors(
        await embed(stack, input="x")
    )


async def test_another_model_is_not_found(stack: Stack) -> None:
    param, _ = refusal(await embed(stack, input="x", model="other"), 404)
    assert param == "model"


async def test_a_model_without_head_writes_no_text(start_stack: StartStack) -> None:
    stack = await start_stack(ready=False)
    stack.scheduler.info = default_info(headless=True)
    await stack.until_serving()
    for response in (await stack.chat(), await stack.complete()):
        assert refusal(response) == ("model", "the model writes no text, it makes embeddings")
    assert vectors(await embed(stack, input="x"))


async def test_a_large_batch_is_prepared_apart_and_kept_in_order(start_stack: StartStack) -> None:
    """More inputs than the loop prepares, and more than a scheduler runs at once."""
    stack = await start_stack(ready=False)
    stack.scheduler.info = default_info(max_num_seqs=3)
    await stack.until_serving()
    inputs = [[5 + index % 200, 6, 7 + index // 200] for index in range(500)]
    found = vectors(await embed(stack, input=inputs))
    assert found == [pytest.approx(expected(ids), abs=1e-6) for ids in inputs]


async def test_an_answer_has_a_bound(start_stack: StartStack) -> None:
    stack = await start_stack(max_answer_bytes=500)
    assert vectors(await embed(stack, input=TEXTS[:2]))
    assert "larger than 500 bytes" in refusal(await embed(stack, input=TEXTS * 5))[1]


async def test_a_lost_scheduler_is_made_up_for(stack: Stack) -> None:
    calls = 0

    async def losing(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise ConnectionLost("gone")
        async for chunk in emulating(request):
            yield chunk

    stack.scheduler.script = losing
    assert vectors(await embed(stack, input=[5, 6])) == [pytest.approx(expected([5, 6]))]
    assert calls == 3
    metrics = (await stack.client.get("/metrics")).text
    assert (
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 1.0'
        in metrics
    )
    assert 'vllm:request_prompt_tokens_sum{engine="0",model_name="tiny"} 2.0' in metrics


async def test_vectors_of_two_models_stand_in_no_answer(stack: Stack) -> None:
    async def changing(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        async for chunk in emulating(request):
            chunk.start.model_fingerprint = str(request.prompt_ids[0])
            yield chunk

    stack.scheduler.script = changing
    assert vectors(await embed(stack, input=[[5], [5, 6]]))
    response = await embed(stack, input=[[5], [6]])
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "model_changed_error"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelFault("no numbers"), 500),
        (QueueFull("full", retry_after=1), 429),
        (InvalidRequest("no", param="prompt_ids"), 400),
    ],
)
async def test_a_schedulers_refusal_is_passed_on(
    stack: Stack, error: Exception, status: int
) -> None:
    stack.scheduler.script = failing(error)
    refusal(await embed(stack, input=["x", "y"]), status)


async def test_a_client_that_leaves_cancels_its_inputs(stack: Stack) -> None:
    stack.scheduler.script = never
    with pytest.raises(httpx.ReadTimeout):
        await stack.client.post(PATH, json={"input": TEXTS}, timeout=0.5)
    await stack.scheduler.until(lambda scheduler: not scheduler.num_open)
    assert stack.scheduler.num_cancelled >= 1


async def never(request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
    await asyncio.Event().wait()
    yield GenerateChunk()
