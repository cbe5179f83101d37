"""What the endpoint picker of the Gateway API inference extension reads of a model server.

Its contract is "003 Model Server Protocol" (kubernetes-sigs/gateway-api-inference-extension) and the same
in llm-d-router; it reads the newest sample of each family, whatever its labels are.
"""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.processes.gateway_stack import Stack, StartStack
from surestep_proto.scheduler_pb2 import AdapterLoad, SchedulerStats

BUSY = SchedulerStats(num_running=3, num_waiting=7, num_blocks_used=30, num_blocks_total=40)


async def read(stack: Stack) -> dict[str, list[Sample]]:
    """Samples of the gauges that it knows."""
    text = (await stack.client.get("/metrics")).text
    return {
        family.name: family.samples
        for family in text_string_to_metric_families(text)
        if family.type == "gauge"
    }


@pytest.mark.parametrize("replicas", [1, 2])
async def test_load_of_a_server(start_stack: StartStack, replicas: int) -> None:
    """All its schedulers have one sample, or a picker would take that of one for all."""
    stack = await start_stack(replicas=replicas)
    for scheduler in stack.schedulers:
        scheduler.stats = BUSY
    found = await read(stack)
    values = {
        name: [sample.value for sample in found[f"vllm:{name}"]]
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    }
    assert values == {
        "num_requests_waiting": [7.0 * replicas],
        "num_requests_running": [3.0 * replicas],
        "kv_cache_usage_perc": [0.75],
    }


async def test_sizes_of_the_cache_are_labels(stack: Stack) -> None:
    (sample,) = (await read(stack))["vllm:cache_config_info"]
    assert int(sample.labels["block_size"]) > 0
    assert int(sample.labels["num_gpu_blocks"]) > 0


async def test_requests_are_told_by_adapter(stack: Stack) -> None:
    """Together for one that leaves and one that has come in its place."""
    loads = [
        AdapterLoad(name="a", num_running=2, leaving=True),
        AdapterLoad(name="a", num_waiting=1),
    ]
    for scheduler in stack.schedulers:
        scheduler.stats = SchedulerStats(adapters=[*loads, AdapterLoad(name="b", num_running=1)])
    found = (await read(stack))["surestep:adapter_requests"]
    told = [(one.labels["adapter"], one.labels["state"], one.value) for one in found]
    running, waiting = [("a", "running", 2.0), ("b", "running", 1.0)], [("a", "waiting", 1.0)]
    assert told == [*running, *waiting, ("b", "waiting", 0.0)]


async def test_there_are_no_adapters(stack: Stack) -> None:
    (sample,) = (await read(stack))["vllm:lora_requests_info"]
    assert sample.labels == {
        "max_lora": "0",
        "running_lora_adapters": "",
        "waiting_lora_adapters": "",
    }
