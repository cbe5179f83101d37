"""vllm-project/vllm#39295: gpt-oss with an EAGLE-3 head under load, by the report's command line.

What it saw: an assertion that took all requests down once min_p or logit_bias was there, -1 in
place of drafts among the tokens, and a status of 200 with an error in the stream. Every answer is
compared with the one the same server gives alone and without drafts.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import openai
import pytest
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file
from support.checkpoints import harmony
from support.checkpoints.eagle3 import make_reference, save_head
from support.checkpoints.gpt_oss import make_mxfp4_twins
from support.checkpoints.tiny_tokenizer import VOCAB_SIZE
from support.clients.harmony_cases import ids_of
from support.processes.stack import Stack, serve

pytestmark = [pytest.mark.timeout(400), pytest.mark.rotates(4, turn=2)]

NAME = "openai/gpt-oss-120b"
HEAD = "gpt-oss-120b-Eagle3-long-context"
LONGEST = 65536
SIZES = {"max_position_embeddings": LONGEST, "intermediate_size": 96}  # of 3 blocks in MXFP4
# As in the report, but for the number of GPUs; vLLM finds the parsers of gpt-oss by itself.
REPORTED = (
    *("--served-model-name", NAME, "--tensor-parallel-size", "2", "--max-num-seqs", "256"),
    *("--gpu-memory-utilization", "0.96", "--kv-cache-dtype", "fp8_e4m3"),
    *("--max-model-len", f"{LONGEST}", "--enable-prefix-caching", "--async-scheduling"),
    *("--reasoning-parser", "openai_gptoss", "--tool-call-parser", "openai"),
    "--enable-auto-tool-choice",
)
OURS = ("--kv-cache-memory", "0.05", "--no-adaptive-draft-length")
AT_ONCE = 32
LOUD = range(300, 306)  # tokens that this model likes, and so does its head
TEXT = "the quick brown fox jumps over the lazy dog"


def make_report(folder: Path) -> tuple[Path, Path]:
    """gpt-oss with packed experts, and a head in the form and with the shapes of NVIDIA's."""
    stops = [ids_of([marker])[0] for marker in ("<|return|>", "<|call|>")]
    model = make_mxfp4_twins(folder, vocab=VOCAB_SIZE, eos_token_ids=stops, **SIZES).quantized
    harmony.save(model)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][LOUD.start : LOUD.stop] *= 4.0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    head = make_reference(model)
    return model, save_head(folder / HEAD, head, form="modelopt", layer_ids=(1, 2, 4))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model, head = make_report(tmp_path_factory.mktemp("report"))
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 5}
    flags = (*REPORTED, *OURS, "--speculative-config", json.dumps(speculation))
    with serve(model, tmp_path_factory.mktemp("report-logs"), *flags) as running:
        yield running


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=stack.url + "/v1", api_key="none", max_retries=0, timeout=180
    ) as made:
        yield made


class Answer(NamedTuple):
    ids: list[int]
    text: str
    finish: str | None


def cases() -> list[dict[str, Any]]:
    """Parameters of all kinds, alone and together."""
    rng, made = random.Random(39295), []
    for i in range(AT_ONCE):
        options: dict[str, Any] = {
            "prompt": f"{TEXT} {i % 8}",
            "temperature": (0.0, 0.7, 1.0, 1.3)[i % 4],
            "seed": i,
            "max_tokens": rng.randint(20, 40),
        }
        extra: dict[str, Any] = {"min_p": (0.0, 0.05, 0.2)[i % 3], "min_tokens": i % 5}
        if i % 2:
            options["logit_bias"] = {str(rng.choice(LOUD)): -100, str(rng.randrange(50, 300)): 3}
        if i % 3 == 0:
            options |= {"presence_penalty": 0.7, "frequency_penalty": 0.3, "top_p": 0.9}
            extra |= {"repetition_penalty": 1.2, "top_k": 50}
        if i % 4 == 3:
            extra["stop_token_ids"] = rng.sample(LOUD, 2)
        made.append(options | {"extra_body": extra})
    return made


async def ask(client: AsyncOpenAI, options: dict[str, Any], drafts: int | None = None) -> Answer:
    extra = {"return_token_ids": True, **options["extra_body"]}
    if drafts is not None:
        extra["speculative"] = {"num_tokens": drafts}
    reply = await client.completions.create(model=NAME, **options | {"extra_body": extra})
    [choice] = reply.choices
    assert reply.usage is not None
    ids: list[int] = choice.token_ids  # type: ignore[attr-defined]
    assert reply.usage.completion_tokens == len(ids)
    return Answer(ids, choice.text, choice.finish_reason)


async def stream(
    client: AsyncOpenAI, options: dict[str, Any], victim: asyncio.Future[int] | None = None
) -> Answer:
    """The same in pieces; with a victim, this process is killed once some tokens are here."""
    extra = {"return_token_ids": True, **options["extra_body"]}
    pieces = await client.completions.create(
        model=NAME, stream=True, **options | {"extra_body": extra}
    )
    ids, text = list[int](), ""
    finish: str | None = None
    async for piece in pieces:
        for choice in cast(list[Any], piece.choices):
            text += choice.text
            ids += getattr(choice, "token_ids", None) or []
            finish = choice.finish_reason or finish
        if victim is not None and len(ids) >= 5:
            os.kill(victim.result(), signal.SIGKILL)
            victim = None
    assert victim is None
    return Answer(ids, text, finish)


async def test_32_at_once_answer_what_each_answers_alone(stack: Stack, client: AsyncOpenAI) -> None:
    """No assertion, no placeholder among the tokens, and no error behind a status of 200."""
    asked = cases()
    alone = [await ask(client, options, drafts=0) for options in asked]
    drafted = stack.metric("vllm:spec_decode_num_draft_tokens_total")
    assert drafted == 0
    together = await asyncio.gather(
        *(ask(client, options) for options in asked), *(stream(client, o) for o in asked)
    )
    assert together[:AT_ONCE] == alone
    assert together[AT_ONCE:] == alone
    assert {answer.finish for answer in alone} == {"stop", "length"}
    assert all(0 <= token < VOCAB_SIZE for answer in together for token in answer.ids)
    assert stack.metric("vllm:spec_decode_num_draft_tokens_total") > 500
    assert stack.metric("vllm:spec_decode_num_accepted_tokens_total") > 50
    for count in ("worker_restarts", "drafter_faults", "poisoned_requests", "replayed_requests"):
        assert stack.metric(f"surestep:{count}_total") == 0, count
    scheduler = stack.status()["scheduler"]
    assert (scheduler["state"], len(scheduler["ranks"])) == ("SERVING", 2)


async def test_what_min_p_and_logit_bias_ask_for_is_done(client: AsyncOpenAI) -> None:
    """At every position of every window, accepted drafts included."""
    plain: dict[str, Any] = {"prompt": TEXT, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    greedy = await ask(client, plain | {"temperature": 0.0})
    sharp = plain | {"temperature": 1.0, "seed": 3}
    only_best = {"extra_body": {"ignore_eos": True, "min_p": 1.0}}
    assert (await ask(client, sharp | only_best)).ids == greedy.ids
    banned = greedy.ids[7]
    without = await ask(client, plain | {"temperature": 0.0, "logit_bias": {str(banned): -100}})
    assert without.ids[: greedy.ids.index(banned)] == greedy.ids[: greedy.ids.index(banned)]
    assert banned not in without.ids
    forced = await ask(client, plain | {"temperature": 0.0, "logit_bias": {"123": 100}})
    assert set(forced.ids) == {123}


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"extra_body": {"min_p": 2.0}}, "min_p"),
        ({"extra_body": {"min_p": "much"}}, "min_p"),
        ({"extra_body": {}, "logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
        ({"extra_body": {}, "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"extra_body": {}, "logit_bias": {"5": 1000}}, "logit_bias"),
        ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
    ],
)
async def test_what_is_wrong_is_refused_before_the_first_byte(
    stack: Stack, client: AsyncOpenAI, wrong: dict[str, Any], param: str
) -> None:
    before = stack.metric("vllm:generation_tokens_total")
    with pytest.raises(openai.BadRequestError) as refused:
        await stream(client, {"prompt": TEXT, "max_tokens": 8, **wrong})
    assert param in str(refused.value.param)
    assert stack.metric("vllm:generation_tokens_total") == before


async def test_chats_in_harmony(client: AsyncOpenAI) -> None:
    """Whole and in pieces, with drafts and without: the same reasoning, content and end."""

    async def chat(drafts: int, seed: int) -> Any:
        made: dict[str, Any] = {
            "model": NAME,
            "messages": [{"role": "user", "content": TEXT}],
            "temperature": 1.0,
            "seed": seed,
            "max_tokens": 30,
            "logit_bias": {str(ids_of(["<|channel|>"])[0]): 4},
            "extra_body": {"min_p": 0.02, "speculative": {"num_tokens": drafts}},
        }
        reply = await client.chat.completions.create(**made)
        pieces = [
            choice
            async for piece in await client.chat.completions.create(**made, stream=True)
            for choice in piece.choices
        ]
        [whole] = reply.choices
        for part in ("content", "reasoning_content"):
            said = [getattr(piece.delta, part, None) or "" for piece in pieces]
            assert "".join(said) == (getattr(whole.message, part, None) or "")
        assert pieces[-1].finish_reason == whole.finish_reason
        return whole.model_dump()

    seeds = range(4)
    plain = await asyncio.gather(*(chat(0, seed) for seed in seeds))
    assert await asyncio.gather(*(chat(5, seed) for seed in seeds)) == plain


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_changes_nothing(stack: Stack, client: AsyncOpenAI, rank: int) -> None:
    asked = [case | {"max_tokens": 60} for case in cases()[:8]]
    for case in asked:
        case["extra_body"] = {**case["extra_body"], "ignore_eos": True, "stop_token_ids": []}
    alone = [await ask(client, options, drafts=0) for options in asked]
    victim = asyncio.get_running_loop().create_future()
    victim.set_result(stack.status()["scheduler"]["ranks"][rank]["pid"])
    first, *others = asked
    together = await asyncio.gather(
        stream(client, first, victim), *(stream(client, options) for options in others)
    )
    assert together == alone
