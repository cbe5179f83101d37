"""Dashboards made for vLLM: every panel of its example has its series, with one scheduler or two."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.processes.gateway_stack import Stack, StartStack
from surestep_proto.scheduler_pb2 import PauseInfo, SchedulerStats

MODEL = '{model_name="$model_name"}'


def quantiles(name: str) -> tuple[str, ...]:
    """Queries for quantiles of a histogram, and for its mean."""
    buckets = f"sum by(le) (rate(vllm:{name}_bucket{MODEL}[$__rate_interval]))"
    total, count = f"rate(vllm:{name}_sum{MODEL}[1m])", f"rate(vllm:{name}_count{MODEL}[1m])"
    shown = (f"histogram_quantile({q}, {buckets})" for q in (0.99, 0.95, 0.9, 0.5))
    return (*shown, f"{total} / {count}")


def rates(*names: str) -> tuple[str, ...]:
    return tuple(f"rate(vllm:{name}{MODEL}[$__rate_interval])" for name in names)


PANELS: dict[str, tuple[str, ...]] = {
    "E2E Request Latency": quantiles("e2e_request_latency_seconds"),
    "Token Throughput": rates("prompt_tokens_total", "generation_tokens_total"),
    "Inter Token Latency": quantiles("inter_token_latency_seconds"),
    "Scheduler State": (f"vllm:num_requests_running{MODEL}", f"vllm:num_requests_waiting{MODEL}"),
    "Time To First Token Latency": quantiles("time_to_first_token_seconds"),
    "Cache Utilization": (f"vllm:kv_cache_usage_perc{MODEL}",),
    "Request Prompt Length": (
        f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{MODEL}[1m]))",
    ),
    "Request Generation Length": (
        f"sum by(le) (increase(vllm:request_generation_tokens_bucket{MODEL}[1m]))",
    ),
    "Finish Reason": (
        f"sum by(finished_reason) (increase(vllm:request_success_total{MODEL}[1m]))",
    ),
    "Queue Time": rates("request_queue_time_seconds_sum"),
    "Requests Prefill and Decode Time": rates(
        "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"
    ),
    "Max Generation Token in Sequence Group": rates("request_max_num_generation_tokens_sum"),
}
SELECTOR = re.compile(r'(vllm:\w+)\{model_name="\$model_name"\}')
FURTHER = {  # families with a label more, which vLLM has and dashboards split by
    "vllm:num_requests_waiting_by_reason": ("reason", {"capacity": 7.0, "deferred": 0.0}),
    "vllm:prompt_tokens_by_source_total": (
        "source",
        {"local_compute": 160.0, "local_cache_hit": 28.0, "external_kv_transfer": 12.0},
    ),
    "vllm:prompt_tokens_cached_by_source_total": ("source", {"device": 28.0, "external": 12.0}),
}


async def scrape(stack: Stack) -> list[Sample]:
    text = (await stack.client.get("/metrics")).text
    return [one for family in text_string_to_metric_families(text) for one in family.samples]


def selected(samples: list[Sample], name: str) -> list[Sample]:
    return [one for one in samples if one.name == name and one.labels.get("model_name") == "tiny"]


def selectors() -> Iterator[tuple[str, str]]:
    for panel, expressions in PANELS.items():
        for expression in expressions:
            found = SELECTOR.findall(expression)
            assert found, expression
            yield from ((panel, name) for name in found)


def told(running: int, scale: int = 1) -> SchedulerStats:
    return SchedulerStats(
        num_running=running,
        num_waiting=running + 1,
        num_blocks_total=100,
        num_blocks_used=25 * running,
        prompt_tokens=100 * scale,
        num_prompt_tokens_cached=20 * scale,
        num_prompt_tokens_loaded=6 * scale,
        generation_tokens=50 * scale,
        num_step_tokens=150 * scale,
        num_steps_by_tokens={1: 3 * scale, 8: 2 * scale, 0: scale},
    )


@pytest.mark.parametrize("replicas", [1, 2])
async def test_every_panel_has_its_series(start_stack: StartStack, replicas: int) -> None:
    stack = await start_stack(replicas=replicas)
    for scheduler in stack.schedulers:
        scheduler.stats = told(1)
    await stack.chat(max_tokens=4, n=2)
    await stack.complete(prompt=["a", "b"], max_tokens=2)
    samples = await scrape(stack)
    assert len(PANELS) == 12
    for panel, name in selectors():
        found = selected(samples, name)
        split = {"le", "finished_reason"} & set(found[0].labels if found else ())
        assert found, (panel, name)
        if not split:  # the panel draws one line, whatever there is behind the gateway
            assert len(found) == 1, (panel, name)
        assert sum(one.value for one in found) > 0, (panel, name)
        assert {one.labels["engine"] for one in found} == {"0"}


async def test_it_says_who_sleeps(start_stack: StartStack) -> None:
    """A pause of level 0 stops steps, and is no sleep."""
    stack = await start_stack(replicas=3)
    pauses = PauseInfo(), PauseInfo(level=1), PauseInfo(level=2)
    for scheduler, pause in zip(stack.schedulers, pauses, strict=True):
        scheduler.stats = SchedulerStats(pause=pause)
    states = selected(await scrape(stack), "vllm:engine_sleep_state")
    counts = {"awake": 1.0, "weights_offloaded": 1.0, "discard_all": 1.0}
    assert {one.labels["sleep_state"]: one.value for one in states} == counts
    stack.schedulers[1].stats = SchedulerStats()
    paused = selected(await scrape(stack), "surestep:paused")
    assert [one.value for one in paused] == [1.0, 0.0, 1.0]


async def test_numbers_of_several_schedulers_are_added_up(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2)
    stack.schedulers[0].stats, stack.schedulers[1].stats = told(1), told(4)
    samples = await scrape(stack)
    for name, value in (
        ("vllm:num_requests_running", 5),
        ("vllm:num_requests_waiting", 7),
        ("vllm:kv_cache_usage_perc", 125 / 200),
        ("vllm:prompt_tokens_total", 200),
        ("vllm:prompt_tokens_cached_total", 40),
        ("vllm:generation_tokens_total", 100),
        ("vllm:iteration_tokens_total_sum", 300),
        ("vllm:iteration_tokens_total_count", 12),
    ):
        (one,) = selected(samples, name)
        assert one.value == value, name
    for name, (label, values) in FURTHER.items():
        assert {one.labels[label]: one.value for one in selected(samples, name)} == values
    buckets = selected(samples, "vllm:iteration_tokens_total_bucket")
    assert {one.labels["le"]: one.value for one in buckets} == {"1.0": 6, "8.0": 10, "+Inf": 12}


async def test_sums_never_fall(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2)
    first, second = stack.schedulers

    async def prompt_tokens() -> float:
        (one,) = selected(await scrape(stack), "vllm:prompt_tokens_total")
        return one.value

    first.stats, second.stats = told(1), told(1, scale=3)
    assert await prompt_tokens() == 400
    first.stats = told(1, scale=2)
    assert await prompt_tokens() == 500
    await second.stop()
    assert await prompt_tokens() == 500  # it does not answer, and what it did stays done
    second.stats = told(1)
    await second.start()
    await stack.until_serving(2)
    assert await prompt_tokens() == 600  # it has started again, and counts from zero
    assert await prompt_tokens() == 600


async def test_what_requests_ask_for_is_counted(stack: Stack) -> None:
    await stack.chat(max_tokens=4, n=3)
    await stack.complete(prompt=["a", "b"], max_tokens=2, n=2)
    samples = await scrape(stack)

    def value(name: str) -> float:
        (one,) = selected(samples, f"vllm:{name}")
        return one.value

    assert (value("request_params_n_count"), value("request_params_n_sum")) == (3, 7)
    assert value("request_max_num_generation_tokens_sum") == 4 + 2 + 2
    assert (value("request_params_max_tokens_count"), value("request_params_max_tokens_sum")) == (
        7,
        3 * 4 + 4 * 2,
    )
    assert (value("request_num_preemptions_count"), value("request_num_preemptions_sum")) == (7, 0)
    assert value("request_prefill_kv_computed_tokens_sum") == value("request_prompt_tokens_sum")
    inference = value("request_inference_time_seconds_sum")
    parts = value("request_prefill_time_seconds_sum") + value("request_decode_time_seconds_sum")
    assert inference == pytest.approx(parts)
