"""A trained hybrid with its MTP head behind `surestep serve`, used with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from support.clients.completions import client_of, read
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(180), pytest.mark.rotates(3, turn=1)]

MODEL = Path(__file__).parents[1] / "data" / "tiny-hybrid"
FLAGS = (
    *("--dtype", "float32", "--max-num-seqs", "16", "--kv-cache-memory", "0.05"),
    *("--speculative-config", '{"method": "qwen3_5_mtp", "num_speculative_tokens": 4}'),
    "--no-adaptive-draft-length",
    *("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--enable-auto-tool-choice"),
)
LEARNT = json.loads((MODEL / "prompts.json").read_text())
TEXT = "The statement is"


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with serve(MODEL, tmp_path_factory.mktemp("hybrid-logs"), *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(hybrid: Stack) -> OpenAI:
    return client_of(hybrid)


def complete(client: OpenAI, drafts: int | None, **options: Any) -> Any:
    """A completion with at most so many drafts per step; None = as the server likes."""
    extra = {"speculative": {"num_tokens": drafts}} if drafts is not None else {}
    extra |= options.pop("extra_body", {})
    options = {"max_tokens": 48, "temperature": 0.0} | options
    return client.completions.create(model="tiny-hybrid", prompt=TEXT, extra_body=extra, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_change_no_text_and_are_accepted(
    hybrid: Stack, client: OpenAI, temperature: float
) -> None:
    options = {"temperature": temperature, "seed": 11}
    plain = complete(client, 0, **options).choices[0].text
    before = hybrid.metric("vllm:spec_decode_num_accepted_tokens_total")
    for drafts in (1, 2, 4, None):
        assert complete(client, drafts, **options).choices[0].text == plain
    assert hybrid.metric("vllm:spec_decode_num_accepted_tokens_total") > before
    assert hybrid.metric("surestep:drafter_check_acceptance") > 0.05


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_39295_max_tokens_inside_a_window(client: OpenAI, max_tokens: int) -> None:
    whole = complete(client, 4, extra_body={"return_token_ids": True}).choices[0].token_ids
    cut = complete(client, 4, max_tokens=max_tokens, extra_body={"return_token_ids": True})
    assert cut.choices[0].token_ids == whole[:max_tokens]
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens == max_tokens


def test_39295_stop_strings_inside_a_window(client: OpenAI) -> None:
    whole = complete(client, 4).choices[0].text
    for start in range(5, 25):
        stop = whole[start : start + 3]
        plain, drafted = (complete(client, k, stop=[stop]) for k in (0, 4))
        assert drafted.choices[0].text == plain.choices[0].text == whole[: whole.index(stop)]
        assert drafted.choices[0].finish_reason == "stop"
        assert drafted.usage.completion_tokens == plain.usage.completion_tokens


def test_39295_every_parameter_is_honoured(client: OpenAI) -> None:
    """Refused with a status or honoured at every position, never an error in a stream."""
    whole = complete(client, 0, extra_body={"return_token_ids": True}).choices[0].token_ids
    banned = str(whole[3])
    for options in (
        {"logit_bias": {banned: -100}},
        {"temperature": 1.0, "seed": 3, "extra_body": {"min_p": 0.2}},
        {"temperature": 1.0, "seed": 3, "extra_body": {"top_k": 4, "min_tokens": 20}},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0},
        {"extra_body": {"repetition_penalty": 1.3, "bad_words": ["the"]}},
    ):
        texts = set()
        for drafts in (0, 4):
            stream = complete(client, drafts, stream=True, **json.loads(json.dumps(options)))
            texts.add("".join(choice.text for chunk in stream for choice in chunk.choices))
        assert len(texts) == 1, options


def test_the_next_turn_starts_from_the_snapshot_behind_the_answer(
    hybrid: Stack, client: OpenAI
) -> None:
    messages: list[Any] = [{"role": "user", "content": "Tell me about loops. " * 12}]
    taken = hybrid.metric("surestep:snapshots_taken_total")
    first = client.chat.completions.create(
        model="tiny-hybrid", messages=messages, max_tokens=100, temperature=0
    )
    assert hybrid.metric("surestep:snapshots_taken_total") > taken
    again = client.chat.completions.create(
        model="tiny-hybrid", messages=messages, max_tokens=100, temperature=0
    )
    assert again.choices[0].message == first.choices[0].message
    details = again.usage.prompt_tokens_details  # type: ignore[union-attr]
    assert details.cached_tokens > 64  # type: ignore[union-attr,operator]
    assert hybrid.metric("surestep:snapshot_hits_total") > 0


def test_a_killed_worker_changes_no_text(hybrid: Stack, client: OpenAI) -> None:
    """State is rebuilt from prompt and emitted tokens, drafts and all."""
    options = {"temperature": 0.8, "seed": 5, "max_tokens": 90}
    ignore_eos = {"extra_body": {"ignore_eos": True}}
    quiet = complete(client, None, **options, **ignore_eos).choices[0].text
    stream = complete(client, None, stream=True, **options, **ignore_eos)
    assert read(stream, hybrid.kill_rank).text == quiet


@pytest.mark.parametrize("learnt", LEARNT[:12], ids=lambda p: p["messages"][-1]["content"][:40])
def test_reasoning_and_tool_calls_of_a_trained_model(client: OpenAI, learnt: Any) -> None:
    """Whole and streamed, with drafts and without."""
    thinking = learnt.get("enable_thinking", True)
    options: dict[str, Any] = {
        "model": "tiny-hybrid",
        "messages": learnt["messages"],
        "temperature": 0,
        "max_tokens": 120,
        **({"tools": learnt["tools"]} if learnt.get("tools") else {}),
    }
    body = {"chat_template_kwargs": {"enable_thinking": thinking}}
    seen = []
    for drafts in (0, 4):
        extra = {**body, "speculative": {"num_tokens": drafts}}
        whole = client.chat.completions.create(**options, extra_body=extra).choices[0].message
        calls = [(c.function.name, c.function.arguments) for c in whole.tool_calls or []]
        reasoning = getattr(whole, "reasoning_content", None) or ""
        seen.append((reasoning, whole.content or "", calls))
        seen.append(streamed(client, options, extra))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert bool(seen[0][2]) == ("<tool_call>" in learnt["answer"])
    assert seen[0][0].strip() == (learnt.get("reasoning") or "").strip()


def streamed(client: OpenAI, options: dict[str, Any], extra: dict[str, Any]) -> tuple[Any, ...]:
    """The same three from a stream."""
    reasoning, content = "", ""
    calls: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(**options, extra_body=extra, stream=True):
        for choice in chunk.choices:
            delta = choice.delta
            reasoning += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
            for call in delta.tool_calls or []:
                held = calls.setdefault(call.index, ["", ""])
                held[0] += (call.function.name if call.function else None) or ""
                held[1] += (call.function.arguments if call.function else None) or ""
    return reasoning, content, [tuple(call) for _, call in sorted(calls.items())]
