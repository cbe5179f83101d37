from __future__ import annotations

import os

from gateway_stack import Stack, StartStack
from prometheus_client.parser import text_string_to_metric_families
from surestep_gateway.tokenizer import Tokenizer
from surestep_proto.generate_pb2 import SchedulerStats

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
    "surestep:speculation_suspensions_total": 18.0,
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
        num_speculation_suspensions=18,
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
    assert {dict(labels)["position"]: value for labels, value in per_position.items()} == {
        "0": 8,
        "1": 4,
    }
    ended = tuple(sorted((LABELS | {"finished_reason": "length"}).items()))
    assert found["vllm:request_success_total"][ended] == 1
    ((facts, _),) = found["vllm:cache_config_info"].items()
    assert dict(facts)["block_size"] == "16"


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
    for path in ("/v1/models", "/health/ready"):
        assert (await stack.client.get(path)).status_code == 503
    assert (await stack.chat()).status_code == 503
    assert (await stack.client.get("/health")).status_code == 200
    status = (await stack.client.get("/status")).json()
    assert status["gateway"]["state"] == "WAITING_FOR_SCHEDULER"
