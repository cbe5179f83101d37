"""What a scheduler says about itself by vllm.grpc.engine, and what it does not serve."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.clients.vllm_calls import MODEL, ask, served
from support.clients.vllm_wire import SERVICE, WireClient
from support.fakes.worker import FakeWorker, serving
from support.processes.scheduler_harness import Gate, code_of, make_settings, scheduler
from surestep_common.request_params import neutral
from surestep_proto import scheduler_pb2
from surestep_scheduler.vllm import facts as facts_module


@pytest.mark.parametrize(
    ("method", "word"),
    [
        ("Embed", "/v1/embeddings"),
        ("FlushCache", "prefix cache"),
        ("StartProfile", "metrics"),
        ("StopProfile", "profiler"),
    ],
)
async def test_what_is_not_served_says_so(method: str, word: str) -> None:
    async with served() as (_, wire):
        error = await code_of(wire.ask(method))
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
    assert word in (error.details() or "")


async def test_events_of_the_cache_are_not_served() -> None:
    async with served() as (_, wire):
        error = await code_of(wire.read("SubscribeKvEvents", start_sequence_number=1))
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
    assert "cache_aware" in (error.details() or "")


async def test_the_age_of_the_server_is_not_told_by_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served() as (_, wire):
        set_back = SimpleNamespace(time=lambda: 0.0, monotonic=time.monotonic)
        monkeypatch.setattr(facts_module, "time", set_back)  # gRPC's own must go on
        server = await wire.ask("GetServerInfo")
    assert 0 <= server.uptime_seconds < 60


async def test_facts_of_model_and_server() -> None:
    defaults = neutral()
    defaults.temperature, defaults.top_k = 0.6, 20
    model = replace(MODEL, defaults=defaults, eos_token_ids=(2, 3))
    async with served(model) as (_, wire):
        facts = await wire.ask("GetModelInfo")
        server = await wire.ask("GetServerInfo")
        await wire.generate(ask())
        later = await wire.ask("GetServerInfo")
    assert (facts.model_path, facts.served_model_name) == ("fake", "fake")
    assert (facts.max_context_length, facts.max_req_input_len, facts.vocab_size) == (128, 127, 101)
    assert facts.is_generation
    assert list(facts.eos_token_ids) == [2, 3]
    assert list(facts.architectures) == ["FakeForCausalLM"]
    assert json.loads(facts.default_sampling_params_json) == {"temperature": 0.6, "top_k": 20}
    assert (server.server_type, server.data_parallel_size) == ("surestep", 1)
    assert (server.max_num_seqs, server.block_size, server.model_dtype) == (16, 4, "float32")
    assert (server.active_requests, server.last_receive_timestamp) == (0, 0)
    assert later.last_receive_timestamp > 1e9
    assert later.uptime_seconds > server.uptime_seconds > 0


async def test_the_name_that_clients_use() -> None:
    async with served(served_model_name="small,alias") as (_, wire):
        facts = await wire.ask("GetModelInfo")
    assert facts.served_model_name == "small"
    assert facts.default_sampling_params_json == ""


async def test_loads() -> None:
    gate = Gate(epoch=1, steps=3)
    async with served(gate=gate, max_num_seqs=2) as (client, wire):
        (idle,) = (await wire.ask("GetLoads", include=["core"])).loads
        calls = [asyncio.ensure_future(wire.generate(ask(f"r{i}"))) for i in range(3)]
        await gate.reached.wait()
        await client.until(lambda stats: stats.num_running == 2 and stats.num_waiting == 1)
        answer = await wire.ask("GetLoads", dp_rank=0)
        (busy,) = answer.loads
        gate.opened.set()
        await asyncio.gather(*calls)
        refused = await code_of(wire.ask("GetLoads", dp_rank=1))
    assert (idle.num_total_reqs, idle.token_usage, idle.max_running_requests) == (0, 0, 2)
    assert idle.max_total_num_tokens == 127 * 4
    assert (busy.num_running_reqs, busy.num_waiting_reqs, busy.num_total_reqs) == (2, 1, 3)
    assert busy.num_waiting_uncached_tokens == 5
    assert busy.utilization == 1
    assert 0 < busy.token_usage == busy.num_used_tokens / busy.max_total_num_tokens < 1
    assert answer.dp_rank_count == 1
    assert answer.timestamp.endswith("+00:00")
    assert answer.version
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_before_there_is_a_worker() -> None:
    """A router must not take it for started, and its model for unknown."""
    async with scheduler(make_settings(["127.0.0.1:1"]), serving=False) as client:
        wire = WireClient(client.channel)
        loads = await wire.ask("GetLoads")
        errors = [
            await code_of(wire.ask("HealthCheck")),
            await code_of(wire.ask("GetModelInfo")),
            await code_of(wire.ask("GetServerInfo")),
            await code_of(wire.generate(ask())),
            await code_of(wire.read("GetTokenizer")),
        ]
    assert [load.max_running_requests for load in loads.loads] == [0]
    assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}


async def test_the_tokenizer_comes_in_pieces(tmp_path: Path) -> None:
    texts = {
        "tokenizer.json": "x" * 150_000,
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "config.json": "{}",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    worker = FakeWorker(MODEL)
    plain = worker.Info

    async def info(request: Any, context: Any) -> Any:
        answer = await plain(request, context)
        answer.model_path = str(tmp_path)
        return answer

    worker.Info = info  # type: ignore[method-assign]
    async with serving(worker) as address, scheduler(make_settings([address])) as client:
        chunks = await WireClient(client.channel).read("GetTokenizer")
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert len(chunks) == 3
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as files:
        assert {name: files.read(name).decode() for name in files.namelist()} == texts


async def test_a_tokenizer_that_is_elsewhere_is_not_found() -> None:
    async with served() as (_, wire):
        error = await code_of(wire.read("GetTokenizer"))
    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert "no tokenizer in fake" in (error.details() or "")


async def test_health_and_reflection_know_the_service() -> None:
    async with served() as (client, _):
        answer = await health_pb2_grpc.HealthStub(client.channel).Check(
            health_pb2.HealthCheckRequest(service=SERVICE)
        )
        reflection = reflection_pb2_grpc.ServerReflectionStub(client.channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection.ServerReflectionInfo(iter([question]))
        (listed,) = [reply async for reply in call]
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    names = {service.name for service in listed.list_services_response.service}
    own = scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"].full_name
    assert {SERVICE, own} <= names
