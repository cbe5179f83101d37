from __future__ import annotations

import asyncio
import os

from prometheus_client.parser import text_string_to_metric_families
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.text.tokenizer import Tokenizer
from surestep_proto.scheduler_pb2 import DraftingValue, SchedulerStats

SCHEDULER_NAMES = {
    "vllm:num_requests_running": 1.0,
    "vllm:num_requests_waiting": 2.0,
    "vllm:kv_cache_usage_perc": 0.25,
    "vllm:prompt_tokens_total": 5.0,
    "vllm:generation_tokens_total": 6.0,
    "vllm:prefix_cache_queries_total": 7.0,
    "vllm:prefix_cache_hits_total": 8.0,
    "vllm:num_preemptions_total": 9.0,
    "vllm:spec_decode_num_drafts_total": 10.0,
    "vllm:spec_decode_num_draft_tokens_total": 11.0,
    "vllm:spec_decode_num_accepted_tokens_total": 12.0,
    "vllm:admission_rejections_total": 13.0,
    "surestep:snapshot_queries_total": 14.0,
    "surestep:snapshot_hits_total": 15.0,
    "surestep:snapshots_taken_total": 16.0,
    "surestep:snapshot_evictions_total": 17.0,
    "surestep:speculation_suspended": 1.0,
    "surestep:drafter_broken": 1.0,
    "surestep:speculation_suspensions_total": 18.0,
    "surestep:step_deadlines_exceeded_total": 19.0,
    "surestep:replayed_requests_total": 20.0,
    "surestep:replayed_tokens_total": 21.0,
    "surestep:fenced_messages_total": 22.0,
    "surestep:drafter_faults_total": 23.0,
    "surestep:poisoned_requests_total": 24.0,
    "surestep:canaries_total": 25.0,
    "surestep:last_token_age_seconds": 0.5,
    "surestep:queued_tokens": 26.0,
    "surestep:fault_detection_seconds_sum": 1.5,
    "surestep:fault_detection_seconds_count": 5.0,
    "surestep:fault_recovery_seconds_sum": 2.5,
    "surestep:fault_recovery_seconds_count": 4.0,
    "surestep:drafting_value": 1.25,
    "surestep:drafting_time_factor": 1.5,
    "surestep:drafting_trials_total": 7.0,
}
GATEWAY_HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_inference_time_seconds",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_num_preemptions",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "vllm:request_prefill_kv_computed_tokens",
)
LABELS = {"model_name": "tiny", "engine": "0"}


async def scrape(stack: Stack) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by name and labels."""
    response = await stack.client.get("/metrics")
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            key = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[key] = sample.value
    return found


async def test_metrics(stack: Stack) -> None:
    stack.scheduler.stats = SchedulerStats(
        num_running=1,
        num_waiting=2,
        num_blocks_used=4,
        num_blocks_total=16,
        prompt_tokens=5,
        generation_tokens=6,
        prefix_cache_queries=7,
        prefix_cache_hits=8,
        num_preemptions=9,
        num_drafts=10,
        num_draft_tokens=11,
        num_accepted_tokens=12,
        num_rejected_requests=13,
        num_accepted_tokens_per_pos=[8, 4],
        num_snapshot_queries=14,
        num_snapshot_hits=15,
        num_snapshots_taken=16,
        num_snapshot_evictions=17,
        speculation_suspended=True,
        drafter_broken=True,
        num_speculation_suspensions=18,
        num_step_deadlines_exceeded=19,
        num_replayed_requests=20,
        num_replayed_tokens=21,
        num_fenced_messages=22,
        num_drafter_faults=23,
        num_poisoned_requests=24,
        num_canaries=25,
        last_token_age_s=0.5,
        num_queued_tokens=26,
        num_incidents={"worker_exit": 3, "worker_hang": 2},
        detect_s_sum=1.5,
        recover_s_sum=2.5,
        num_recoveries=4,
        drafting=[DraftingValue(rows=8, value=1.25, drafts=True, time_factor=1.5, num_trials=7)],
    )
    await stack.chat(max_tokens=4)
    found = await scrape(stack)
    for name, value in SCHEDULER_NAMES.items():
        ((labels, got),) = found[name].items()
        assert got == value, name
        assert LABELS.items() <= dict(labels).items()
    for name in GATEWAY_HISTOGRAMS:
        count = found[f"{name}_count"][tuple(sorted(LABELS.items()))]
        assert count == (3 if "inter_token" in name else 1), name
    per_position = found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    by_position = {dict(labels)["position"]: value for labels, value in per_position.items()}
    assert by_position == {"0": 8, "1": 4}
    restarts = found["surestep:worker_restarts_total"]
    assert {dict(labels)["cause"]: count for labels, count in restarts.items()} == {
        "worker_exit": 3,
        "worker_hang": 2,
    }
    ended = tuple(sorted((LABELS | {"finished_reason": "length"}).items()))
    assert found["vllm:request_success_total"][ended] == 1
    ((facts, _),) = found["vllm:cache_config_info"].items()
    assert dict(facts)["block_size"] == "16"


async def test_every_scheduler_has_its_numbers(start_stack: StartStack) -> None:
    stack = await start_stack(replicas=2)
    for running, scheduler in enumerate(stack.schedulers, start=1):
        scheduler.stats = SchedulerStats(num_running=running, num_blocks_total=1)
    found = (await scrape(stack))["surestep:requests_running"]
    expected = {
        (str(engine), f"127.0.0.1:{scheduler.port}"): engine + 1.0
        for engine, scheduler in enumerate(stack.schedulers)
    }
    assert {(dict(k)["engine"], dict(k)["scheduler"]): v for k, v in found.items()} == expected
    assert (await stack.client.get("/load")).json()["num_running"] == 3


async def test_not_ready_when_requests_run_and_no_token_comes(start_stack: StartStack) -> None:
    stack = await start_stack(first_token_timeout_s=5)
    (link,) = stack.server.gateway.pool.schedulers
    for stats, status in (
        (SchedulerStats(num_running=1, last_token_age_s=6), 503),
        (SchedulerStats(num_running=1, last_token_age_s=4), 200),
        (SchedulerStats(num_running=0, last_token_age_s=6), 200),
    ):
        link.stats = stats
        response = await stack.client.get("/health/ready")
        assert response.status_code == status, stats


async def test_metrics_without_a_scheduler(stack: Stack) -> None:
    who = (("scheduler", f"127.0.0.1:{stack.scheduler.port}"),)
    assert (await scrape(stack))["surestep:scheduler_up"][who] == 1
    await stack.scheduler.stop()
    found = await scrape(stack)
    assert found["surestep:scheduler_up"][who] == 0
    assert found["surestep:circuit_breaker_state"][who] == 0
    assert "vllm:num_requests_running" not in found
    assert "vllm:time_to_first_token_seconds_count" in found


async def test_status(stack: Stack) -> None:
    status = (await stack.client.get("/status")).json()
    assert status["gateway"]["pid"] == os.getpid()
    assert status["gateway"]["address"] == stack.server.address
    assert status["gateway"]["state"] == "SERVING"
    (scheduler,) = status["schedulers"]
    assert scheduler["url"] == f"127.0.0.1:{stack.scheduler.port}"
    assert (scheduler["admits"], scheduler["circuit_breaker"]) == (True, "CLOSED")
    assert scheduler["status"]["state"] == "SERVING"
    assert (scheduler["status"]["epoch"], scheduler["status"]["step"]) == (3, 7)
    await stack.scheduler.stop()
    (scheduler,) = (await stack.client.get("/status")).json()["schedulers"]
    assert scheduler["status"] is None


async def test_small_endpoints(stack: Stack) -> None:
    assert (await stack.client.get("/health")).status_code == 200
    assert (await stack.client.post("/ping")).status_code == 200
    assert (await stack.client.get("/version")).json()["version"]
    stack.scheduler.stats = SchedulerStats(num_running=3, num_blocks_total=4, num_blocks_used=1)
    assert (await stack.client.get("/load")).json() == {
        "server_load": 0,
        "num_running": 3,
        "num_waiting": 0,
        "kv_cache_usage": 0.25,
    }


async def test_models(start_stack: StartStack) -> None:
    stack = await start_stack(served_model_name="one,org/two")
    cards = (await stack.client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["one", "org/two"]
    assert cards[0]["max_model_len"] == 256
    assert (await stack.client.get("/v1/models/org/two")).json() == cards[1]
    assert (await stack.chat(model="org/two", max_tokens=1)).json()["model"] == "org/two"
    assert (await stack.chat(max_tokens=1)).json()["model"] == "one"


async def test_tokenize_and_back(stack: Stack, tokenizer: Tokenizer) -> None:
    answer = (
        await stack.client.post("/tokenize", json={"prompt": "the dog", "return_token_strs": True})
    ).json()
    ids = tokenizer.encode_now("the dog", add_special_tokens=True)
    assert answer == {
        "count": len(ids),
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": [tokenizer.token(i) for i in ids],
    }
    back = (await stack.client.post("/detokenize", json={"tokens": ids})).json()
    assert back == {"prompt": "the dog"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    ids = (await stack.client.post("/tokenize", json=chat)).json()["tokens"]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_tokenizer_refusals(stack: Stack) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [400]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ):
        response = await stack.client.post(path, json=body)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param


async def test_request_ids(stack: Stack) -> None:
    given = await stack.client.get("/health", headers={"x-request-id": "abc"})
    assert given.headers["x-request-id"] == "abc"
    odd = await stack.client.get("/health", headers={"x-request-id": "a b"})
    assert odd.headers["x-request-id"] not in ("", "a b")
    stack.client.headers["x-request-id"] = "abc"
    body = (await stack.chat(max_tokens=1, request_id="other")).json()
    assert body["id"] == "chatcmpl-abc"


async def test_before_the_model_is_known(start_stack: StartStack) -> None:
    stack = await start_stack(ready=False, scheduler_url="127.0.0.1:1")
    for path in ("/v1/models", "/health/ready", "/health", "/ping"):
        assert (await stack.client.get(path)).status_code == 503
    assert (await stack.chat()).status_code == 503
    assert (await stack.client.get("/health/live")).status_code == 200
    status = (await stack.client.get("/status")).json()
    assert status["gateway"]["state"] == "WAITING_FOR_SCHEDULER"


async def test_health_has_patience_with_ranks_that_come_back(start_stack: StartStack) -> None:
    stack = await start_stack(resume_timeout_s=0.5)
    paths = ("/health", "/v1/models")
    assert [(await stack.client.get(path)).status_code for path in paths] == [200, 200]
    await stack.scheduler.stop()
    await stack.until_serving(0)
    assert [(await stack.client.get(path)).status_code for path in paths] == [200, 200]
    async with asyncio.timeout(20):
        while (await stack.client.get("/health")).status_code == 200:
            await asyncio.sleep(0.02)
    assert (await stack.client.get("/v1/models")).status_code == 503
    assert (await stack.client.get("/health/live")).status_code == 200


async def test_probes_are_no_responses_of_the_server_s_work(stack: Stack) -> None:
    """A server that starts answers 503 to each of them: nobody should be told of errors for that."""
    await stack.chat(max_tokens=2)
    for path in ("/health", "/health/ready", "/ping"):
        await stack.client.get(path)
    text = (await stack.client.get("/metrics")).text
    counts = {
        sample.labels["status"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "surestep:http_responses_total"
    }
    assert counts == {"200": 1.0}
