"""Forced calls, strict calls and structured outputs under tokenizers as they are published.

Their `<think>` and `<tool_call>` are added tokens that are not special. The models are random, apart
from the hybrid: a bias has them think, end the thought, call and end, where the grammar allows it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import httpx
import jsonschema
import pytest
from support.checkpoints.published import make_published_checkpoint
from support.clients.published_calls import APIS, CITY, ask
from support.processes.stack import serve
from tokenizers import Tokenizer

pytestmark = pytest.mark.timeout(300)
FLAGS = ("--max-num-seqs", "8", "--kv-cache-memory", "0.05", "--speculative-config", "none")
COMPACT = (
    "--structured-outputs-config",
    '{"disable_any_whitespace": true}',  # or a random model writes white space for ever
)
HYBRID = Path(__file__).parents[1] / "data" / "tiny-hybrid"
THINK, OWN = ("<think>", "</think>"), ("[THINK]", "[/THINK]")
GLM = (*THINK, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>")
MINIMAX = (*THINK, "<minimax:tool_call>", "</minimax:tool_call>")
DEEPSEEK = "<｜tool▁calls▁begin｜>"
SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI = (
    *THINK,
    *SECTION,
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
# What templates of MiniMax and DeepSeek do: begin the thought, or leave it out.
OPENED = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    "{{ 'assistant: ' + ('</think>' if enable_thinking is false else '<think>') }}"
)


class Setup(NamedTuple):
    """A tokenizer, what is added to it, and the parsers of its server."""

    tokenizer: str
    tools: str
    reasoning: str
    markers: tuple[str, ...] = ()
    template: str | None = None
    call: str = "<tool_call>"
    chooses: bool = True  # to call by itself: it is random, and has a token for that


SETUPS = {
    "qwen3-hermes": Setup("qwen3", "hermes", "qwen3"),
    "qwen3-coder": Setup("qwen3", "qwen3_coder", "qwen3"),
    "qwen3-xml": Setup("qwen3", "qwen3_xml", "qwen3"),
    "glm45": Setup("qwen3", "glm45", "glm45", (*GLM, "</arg_value>")),
    "glm47": Setup("qwen3", "glm47", "glm47", (*GLM, "</arg_value>")),
    "minimax": Setup("qwen3", "minimax_m2", "minimax_m2", MINIMAX, OPENED, MINIMAX[2]),
    "kimi": Setup("deepseek_v3", "kimi_k2", "kimi_k2", KIMI, OPENED, SECTION[0]),
    "deepseek": Setup("deepseek_v3", "deepseek_v3", "", call=DEEPSEEK),
    "deepseek31": Setup("deepseek_v3", "deepseek_v31", "deepseek_v3", THINK, OPENED, DEEPSEEK),
    "deepseek32": Setup("deepseek_v3", "deepseek_v32", "deepseek_v3", THINK, OPENED, chooses=False),
    "llama-json": Setup("llama3_1", "llama3_json", "", chooses=False),
    "llama-pythonic": Setup("llama3_1", "pythonic", "", chooses=False),
    "llama-xlam": Setup("llama3_1", "xlam", "", call="]", chooses=False),  # which ends the list
    "mistral": Setup(
        *("qwen3", "mistral", "mistral", (*OWN, "[TOOL_CALLS]", "[ARGS]")), call="[TOOL_CALLS]"
    ),
    "mistral-lists": Setup("llama3_1", "mistral", "", call="]", chooses=False),
    "llama-hermes": Setup("llama3_1", "hermes", "qwen3", chooses=False),
    "gemma-hermes": Setup("gemma3", "hermes", "qwen3", chooses=False),
    "hybrid-hermes": Setup("", "hermes", "qwen3", chooses=False),
    "hybrid-coder": Setup("", "qwen3_coder", "qwen3", chooses=False),
}


@contextlib.contextmanager
def served(setup: Setup, folder: Path) -> Iterator[tuple[httpx.Client, dict[str, float]]]:
    """A server of a model, and the bias that leads its answers."""
    model = HYBRID
    if setup.tokenizer:
        model = make_published_checkpoint(
            folder / "model", setup.tokenizer, *setup.markers, template=setup.template
        )
    flags = ["--tool-call-parser", setup.tools, "--enable-auto-tool-choice"]
    flags += ["--reasoning-parser", setup.reasoning] if setup.reasoning else []
    with (
        serve(model, folder / "logs", *FLAGS, *COMPACT, *flags) as stack,
        httpx.Client(base_url=stack.url, timeout=60) as client,
    ):
        yield client, _bias(model, setup)


def _bias(folder: Path, setup: Setup) -> dict[str, float]:
    """A thought once, then its end, then one call, then the end of the answer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = json.loads((folder / "config.json").read_text())["eos_token_id"]
    thought = OWN if setup.reasoning == "mistral" else THINK
    ids = [tokenizer.token_to_id(token) for token in (*thought, "</arg_value>", setup.call)]
    ids += ends if isinstance(ends, list) else [ends]
    return {str(id_): 95.0 - place for place, id_ in enumerate(ids) if id_ is not None}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.rotates(16)
def test_calls_and_json(setup: str, tmp_path: Path) -> None:
    with served(SETUPS[setup], tmp_path) as (client, bias):
        calls = ("required", "named", "strict")[: 2 + SETUPS[setup].chooses]
        for api, stream, thinking in product(APIS, (False, True), (False, True)):
            for wanted in ("json", *calls) if api != "completions" else ("json",):
                case = f"{api}, {wanted}, {stream=}, {thinking=}"
                answer = ask(client, api, wanted, bias, stream=stream, thinking=thinking)
                found = answer.calls
                if wanted == "json":
                    found = [("weather", json.loads(answer.text))]
                assert found, case
                for name, arguments in found:
                    assert name == "weather", case
                    jsonschema.validate(arguments, CITY)


def test_reasoning_that_would_not_end(tmp_path: Path) -> None:
    """The bias has the model think for ever; what may follow a thought ends the answer."""
    with served(SETUPS["qwen3-hermes"], tmp_path) as (client, bias):
        think, _, _, end = bias
        body = {
            "model": "model",
            "messages": [{"role": "user", "content": "hello"}],
            "logit_bias": {think: 95.0, end: 95.0, "17": 94.0},
            "max_tokens": 60,
        }
        for budget in (0, 5, 50, -1):
            body |= {"thinking_token_budget": budget, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            details = answer["usage"]["completion_tokens_details"]
            if budget < 0:
                assert answer["choices"][0]["finish_reason"] == "length"
                continue
            assert answer["choices"][0]["finish_reason"] == "stop", answer
            assert details["reasoning_tokens"] - budget in (0, 1)
            assert not answer["choices"][0]["message"]["content"]
