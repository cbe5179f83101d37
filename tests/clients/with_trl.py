"""TRL, `GRPOTrainer` and its asynchronous form"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from accelerate import PartialState
from clients.checks import (
    LOGLIKELIHOODS,
    MODEL,
    SCORED,
    STORY,
    WEATHER,
    Server,
    raises,
    varied,
    works,
)
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient
from trl.generation import vllm_client

# Without vLLM the client lacks what opens NCCL's group: it runs where a trainer has no GPU, too.
vllm_client.is_vllm_available = lambda *_, **__: True
TOLERANCE = 1e-3  # of a sum of log-probabilities; float32 on both sides


def root(server: Server) -> str:
    """The URL, with the key as its password: TRL sends no headers."""
    return (
        urlsplit(server.root)
        ._replace(netloc=f"trl:{server.key}@{urlsplit(server.root).netloc}")
        .geturl()
    )


def sampler(server: Server) -> Any:
    client = vllm_client.VLLMClient(base_url=root(server), connection_timeout=10)
    assert client.model == MODEL
    return client


@works("seeds, logprobs")
def groups(server: Server) -> None:
    """Groups of samples, with the log-probability of each token, seeded."""
    client, prompts = sampler(server), [STORY, WEATHER]
    asked = {"n": 4, "max_tokens": 12, "generation_kwargs": {"seed": 3}}
    first, again = client.generate(prompts, **asked), client.generate(prompts, **asked)
    assert first == again, "one seed, two answers"
    assert (len(first["prompt_ids"]), len(first["completion_ids"])) == (2, 8)
    for ids, found, known in zip(
        first["completion_ids"], first["logprobs"], first["logprob_token_ids"], strict=True
    ):
        assert [[token] for token in ids] == known
        assert all(len(each) == 1 and each[0] <= 0 for each in found)
    by_ids = client.generate(first["prompt_ids"], **asked)
    assert by_ids["completion_ids"] == first["completion_ids"]


@works("chat")
def chats(server: Server) -> None:
    client, messages = sampler(server), [[{"role": "user", "content": STORY}]]
    made = [
        client.chat(messages, max_tokens=8, generation_kwargs={"seed": seed})
        for seed in (1, 1, 2, 3)
    ]
    varied([str(each["completion_ids"]) for each in made])
    assert made[0]["prompt_ids"] == made[1]["prompt_ids"]


@works("scoring")
def scores(server: Server) -> None:
    """A teacher's log-probabilities are those of transformers."""
    client = sampler(server)
    for prompt, wanted in json.loads((server.folder / LOGLIKELIHOODS).read_text()).items():
        for answer, expected in zip(SCORED[prompt], wanted, strict=True):
            whole, start = (
                client.generate([text], max_tokens=1)["prompt_ids"][0]
                for text in (prompt + answer, prompt)
            )
            found = client.get_sequence_logprobs([whole], [len(start)], top_logprobs=20)
            total = sum(value for each in found["actual_logprobs"] for (value,) in each)
            assert abs(total - expected) < TOLERANCE, (prompt, answer, total, expected)


@contextmanager
def paused(client: AsyncClient) -> Iterator[None]:
    client.pause()
    try:
        yield
    finally:
        client.resume()


@works("training")
def trainers_calls(server: Server) -> None:
    """A trainer asks before it starts, and pauses the server between two updates."""
    PartialState(cpu=True)  # which a trainer has
    client = AsyncClient(root(server), server_timeout=10)
    client.wait_for_server_ready()
    assert client.get_max_model_len() == 16_384
    assert client.get_dtype() == "torch.float32"
    assert client.get_world_size() == 1
    with paused(client):
        assert client.get_server_info()["model_config"]["max_model_len"] == 16_384
    sampler(server).reset_prefix_cache()
    assert sampler(server).generate([STORY], max_tokens=2)["completion_ids"]


@works("errors")
def errors(server: Server) -> None:
    """Weights do not come over NCCL: a trainer is told how they do."""
    client = AsyncClient(root(server), server_timeout=10)
    with raises(Exception, "send them as safetensors"):
        client.init_weight_transfer_engine({})
