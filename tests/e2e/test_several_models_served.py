"""Two models of different families behind one URL: their streams, their faults, their sleep."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from openai import OpenAI
from support.checkpoints.tiny import make_tiny_checkpoint
from support.clients.completions import client_of
from support.faults.server import PACED
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(240), pytest.mark.rotates(2, turn=0)]

FLAGS = ("--kv-cache-memory", "0.05", "--max-num-batched-tokens", "128")
LONG: dict[str, Any] = {"prompt": "abcabc abc", "max_tokens": 400, "seed": 5, "temperature": 0.8}
IDS = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3, beside the Llama that is called tiny."""
    path = tmp_path_factory.mktemp("second") / "qwen"
    make_tiny_checkpoint(path, "qwen3", seed=8, tokenizer=True)
    return path


@pytest.fixture(scope="module")
def both(tiny_model: Path, qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """`surestep serve tiny qwen`."""
    logs = tmp_path_factory.mktemp("both")
    with serve(tiny_model, logs, str(qwen), *FLAGS, variables=PACED) as running:
        yield running


@pytest.fixture(scope="module")
def turns(
    tiny_model: Path, qwen: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Two models on demand, one awake at a time, and a third one whose weights are cut off."""
    folder = tmp_path_factory.mktemp("turns")
    broken = make_tiny_checkpoint(folder / "broken", "llama", tokenizer=True)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:20_000])
    entries = [
        {"name": "tiny", "model": str(tiny_model)},
        {"name": "qwen", "model": str(qwen), "max_n": 1},
        {"name": "broken", "model": str(broken)},
    ]
    file = folder / "models.yaml"
    file.write_text(yaml.safe_dump({"models": entries}))
    flags = "--models", str(file), "--load-on-demand", "--max-loaded-models", "1"
    with serve(None, folder / "logs", *flags, *FLAGS) as running:
        yield running


def stream(client: OpenAI, model: str, begun: threading.Event | None = None) -> list[int]:
    """Token ids of a long answer."""
    ids: list[int] = []
    for chunk in client.completions.create(model=model, stream=True, extra_body=IDS, **LONG):
        ids += getattr(chunk.choices[0], "token_ids", None) or []
        if ids and begun is not None:
            begun.set()
    return ids


def short(client: OpenAI, model: str) -> str:
    return client.completions.create(model=model, prompt="hello", max_tokens=4, seed=1).model


def loads(stack: Stack, name: str) -> int:
    """Return the number of times that the gateway has woken a model."""
    return (stack.logs / "gateway.log").read_text().count(f"{name} is awake after")


def residence(stack: Stack) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in stack.get("/v1/models")["data"]}


def test_the_official_client_uses_both(both: Stack) -> None:
    client = client_of(both)
    assert [model.id for model in client.models.list()] == ["tiny", "qwen"]
    assert client.models.retrieve("qwen").id == "qwen"
    answers = [stream(client, name) for name in ("tiny", "qwen")]
    assert answers[0] != answers[1]
    assert [len(ids) for ids in answers] == [400, 400]
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model="qwen", messages=messages, max_tokens=4)
    assert chat.model == "qwen"
    reply = client.responses.create(model="tiny", input="hello", max_output_tokens=4)
    assert reply.model == "tiny"
    assert client.embeddings.create(model="qwen", input="hello").model == "qwen"
    with pytest.raises(openai.NotFoundError) as refused:
        short(client, "other")
    assert refused.value.code == "model_not_found"


def test_a_lost_rank_pauses_its_own_model_alone(both: Stack) -> None:
    """The other model's ranks, epoch and answers are as without the fault."""
    client = client_of(both)
    alone = {name: stream(client, name) for name in ("tiny", "qwen")}
    before = {one["model"]: one["status"] for one in both.status()["schedulers"]}
    begun = {name: threading.Event() for name in alone}
    with ThreadPoolExecutor() as pool:
        asked = {name: pool.submit(stream, client, name, begun[name]) for name in alone}
        assert all(event.wait(60) for event in begun.values())
        os.kill(before["tiny"]["ranks"][0]["pid"], signal.SIGKILL)
        assert {name: one.result(120) for name, one in asked.items()} == alone
    both.wait_until(lambda: both.is_ready(), "the lost rank is back")
    after = {one["model"]: one["status"] for one in both.status()["schedulers"]}
    assert [after[name]["epoch"] - before[name]["epoch"] for name in ("tiny", "qwen")] == [1, 0]
    assert after["qwen"]["ranks"][0]["pid"] == before["qwen"]["ranks"][0]["pid"]
    assert not after["qwen"]["incidents"]


def test_a_herd_loads_a_cold_model_once(turns: Stack) -> None:
    client, before = client_of(turns), loads(turns, "qwen")
    with ThreadPoolExecutor(32) as pool:
        told = Counter(pool.map(lambda _: short(client, "qwen"), range(32)))
    assert told == {"qwen": 32}
    assert loads(turns, "qwen") == before + 1
    assert residence(turns)["qwen"] == "loaded"


def test_nobody_is_put_to_sleep_in_mid_answer(turns: Stack) -> None:
    """Have a model that wants the room wait for the end of the answer; then both go on."""
    client, begun = client_of(turns), threading.Event()
    whole = stream(client, "tiny")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(stream, client, "tiny", begun)
        assert begun.wait(60)
        assert short(client, "qwen") == "qwen"
        assert asked.result(60) == whole
    assert residence(turns) | {"broken": ""} == {"tiny": "sleeping", "qwen": "loaded", "broken": ""}
    assert stream(client, "tiny") == whole


def test_what_cannot_be_loaded_is_told_and_harms_nobody(turns: Stack) -> None:
    """Try once for all that ask; each has the same error, and the other model answers."""
    client = client_of(turns)
    short(client, "tiny")
    with ThreadPoolExecutor(8) as pool:
        failed = [pool.submit(short, client, "broken") for _ in range(8)]
        errors = [one.exception(120) for one in failed]
    assert all(isinstance(error, openai.InternalServerError) for error in errors)
    assert {(error.status_code, error.code) for error in errors} == {(503, "model_not_loaded")}  # type: ignore[union-attr]
    assert "the file is cut off" in str(errors[0])
    log = next(turns.logs.glob("broken-*-worker0.log")).read_text()
    assert log.count("cannot start") <= 2 * (turns.logs / "gateway.log").read_text().count(
        "broken cannot be loaded"
    )
    assert residence(turns)["broken"] == "failed"
    assert short(client, "tiny") == "tiny"


def test_services_that_die_beside_a_sleeping_model(turns: Stack) -> None:
    """It is woken by the next request as if nothing had happened."""
    client = client_of(turns)
    whole = stream(client, "qwen")
    short(client, "tiny")  # so that the other one sleeps
    sleeping = next(one for one in turns.status()["schedulers"] if one["model"] == "qwen")
    assert sleeping["status"]["state"] == "SLEEPING"
    victims = [sleeping["status"]["pid"], turns.get("/status")["gateway"]["pid"]]
    victims += [one["pid"] for one in sleeping["status"]["supervisors"]]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        try:
            assert stream(client, "qwen") == whole
            return
        except openai.APIConnectionError:  # until there is a gateway again
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_limits_are_the_models_own(turns: Stack) -> None:
    client = client_of(turns)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="qwen", prompt="a", n=2, max_tokens=1)
    both = client.completions.create(model="tiny", prompt="a", n=2, max_tokens=1)
    assert len(both.choices) == 2
