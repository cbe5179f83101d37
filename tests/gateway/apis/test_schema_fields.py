"""Every field that OpenAI's and vLLM's clients can send is served, refused by name, or documented
as without effect (docs/use/openai.md)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import chat_completion_content_part_param as parts
from openai.types.chat import chat_completion_stream_options_param as stream_options
from openai.types.chat import completion_create_params as chat
from openai.types.embedding_create_params import EmbeddingCreateParams
from pydantic import BaseModel
from support.processes.gateway_stack import Stack, StartStack
from surestep_gateway.apis.embeddings.body import EmbeddingRequest
from surestep_gateway.apis.openai.job import DetokenizeBody, TokenizeBody, TokenizeChatBody
from surestep_gateway.request.parse import NOT_EMBEDDED, UNSUPPORTED, WITHOUT_EFFECT
from surestep_gateway.request.protocol import ChatRequest, CompletionRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PAGE = (Path(__file__).parents[3] / "docs" / "use" / "openai.md").read_text()
USER = [{"role": "user", "content": "x"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}]


def words(text: str) -> list[str]:
    return text.split()


# vLLM 0.32: what generation has in common, and what each request has besides.
VLLM_COMMON = words("""
allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty ignore_eos
include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs
max_tokens min_p min_tokens mm_payload model n presence_penalty priority prompt_logprobs
repetition_detection repetition_penalty request_id response_format return_mm_kwargs
return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed
session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream
stream_interval stream_options structured_outputs temperature thinking_token_budget top_k top_p
truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
add_special_tokens
""")
VLLM_CHAT = words("""
add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
include_reasoning max_completion_tokens media_io_kwargs messages mm_processor_kwargs
parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools top_logprobs
""")
# Of other servers, for what an output must be.
OTHERS = words("""
ebnf format grammar grammar_lazy grammar_triggers guided_json_object json_schema output_config
output_format regex text
""")
VLLM_COMPLETION = ["prompt", "prompt_embeds", "suffix"]
VLLM_OLDER = words("""
best_of early_stopping guided_choice guided_decoding_backend guided_grammar guided_json
guided_regex guided_whitespace_pattern logits_processors
""")
TEMPLATE = words("""
messages add_generation_prompt continue_final_message add_special_tokens chat_template
chat_template_kwargs documents media_io_kwargs mm_processor_kwargs reasoning_effort tools model
return_token_strs verbosity
""")
# What goes with messages there, too.
VLLM_EMBEDDING = words("""
add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
continue_final_message dimensions embed_dtype encoding_format endianness input media_io_kwargs
messages mm_processor_kwargs model normalize padding priority request_id truncate_prompt_tokens
truncation_side use_activation user
""")

OPENAI_CHAT = [*chat.CompletionCreateParamsBase.__annotations__, "stream"]
OPENAI_COMPLETION = [*completion.CompletionCreateParamsBase.__annotations__, "stream"]
ENDPOINTS: dict[str, tuple[type[BaseModel], dict[str, Any], set[str]]] = {
    CHAT: (
        ChatRequest,
        {"messages": USER},
        {*OPENAI_CHAT, *VLLM_COMMON, *VLLM_CHAT, *VLLM_OLDER, *OTHERS},
    ),
    COMPLETIONS: (
        CompletionRequest,
        {"prompt": "x"},
        {*OPENAI_COMPLETION, *VLLM_COMMON, *VLLM_COMPLETION, *VLLM_OLDER, *OTHERS},
    ),
    "/v1/embeddings": (
        EmbeddingRequest,
        {"input": "x"},
        {*EmbeddingCreateParams.__annotations__, *VLLM_EMBEDDING, "stream"},
    ),
    "/tokenize text": (
        TokenizeBody,
        {"prompt": "x"},
        {"model", "prompt", "add_special_tokens", "return_token_strs"},
    ),
    "/tokenize chat": (TokenizeChatBody, {"messages": USER}, set(TEMPLATE)),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}, {"model", "tokens"}),
}
REFUSED_CHATS = ("/v1/embeddings", "messages")  # a field, so that it is refused first
# A value that asks for something, and what must stand beside it.
SAMPLES: dict[str, dict[str, Any]] = {
    **{name: {name: True} for name in (
        "add_generation_prompt", "add_special_tokens", "echo", "ignore_eos", "include_reasoning",
        "include_stop_str_in_output", "parallel_tool_calls", "return_token_ids",
        "return_token_strs", "return_tokens_as_token_ids", "skip_special_tokens",
        "normalize", "spaces_between_special_tokens", "stream", "use_activation",
    )},
    **{name: {name: 0.5} for name in (
        "frequency_penalty", "min_p", "presence_penalty", "repetition_penalty", "temperature",
        "top_p",
    )},
    **{name: {name: 2} for name in (
        "max_completion_tokens", "max_tokens", "min_tokens", "n", "priority", "prompt_logprobs",
        "seed", "top_k", "truncate_prompt_tokens",
    )},
    **{name: {name: "x"} for name in (
        "cache_salt", "reasoning_effort", "request_id", "safety_identifier", "stop", "user",
    )},
    "allowed_token_ids": {"allowed_token_ids": [5]},
    "guided_choice": {"guided_choice": ["a"]},
    "guided_grammar": {"guided_grammar": 'start: "a"'},
    "guided_json": {"guided_json": {"type": "object"}},
    "guided_json_object": {"guided_json_object": True},
    "guided_regex": {"guided_regex": "a"},
    "json_schema": {"json_schema": {"type": "object"}},
    "regex": {"regex": "a"},
    "ebnf": {"ebnf": 'root ::= "a"'},
    "grammar": {"grammar": 'root ::= "a"'},
    "guided_whitespace_pattern": {"guided_json": {}, "guided_whitespace_pattern": " ?"},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "structural_tag": {
        "structural_tag": '{"structures": [{"begin": "<a>"}], "triggers": ["<a>"]}',
    },
    "bad_words": {"bad_words": ["x"]},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 2, "min_count": 9}},
    "chat_template_kwargs": {"chat_template_kwargs": {"x": 1}},
    "dimensions": {"dimensions": 8},
    "documents": {"documents": [{"title": "x", "text": "y"}]},
    "encoding_format": {"encoding_format": "base64"},
    "input": {"input": "y"},
    "continue_final_message": {
        "continue_final_message": True, "messages": [{"role": "assistant", "content": "x"}],
    },
    "logit_bias": {"logit_bias": {"5": 1}},
    "messages": {"messages": USER},
    "model": {"model": "tiny"},
    "prompt": {"prompt": "y"},
    "stop_token_ids": {"stop_token_ids": [5]},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "tokens": {"tokens": [5, 6]},
    "tool_choice": {"tools": TOOLS, "tool_choice": "auto"},
    "tools": {"tools": TOOLS},
    "thinking_token_budget": {"thinking_token_budget": -1},  # the tokenizer here has no <think>
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "verbosity": {"verbosity": "high"},
    "truncation_side": {"truncate_prompt_tokens": 1, "truncation_side": "right"},
}  # fmt: skip
CASES = [
    (endpoint, name)
    for endpoint, (_, _, fields) in sorted(ENDPOINTS.items())
    for name in sorted(fields)
]


def section(title: str) -> set[str]:
    """Names in code style in a section of the page."""
    _, _, rest = PAGE.partition(f"\n## {title}\n")
    assert rest, title
    return set(re.findall(r"`([a-z_]+)`", rest.partition("\n## ")[0]))


SERVED, REFUSED = section("Served fields"), section("Refused fields")
NO_EFFECT = section("Fields without effect")


@pytest.fixture
async def tooled(start_stack: StartStack) -> Stack:
    return await start_stack(
        enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
    )


@pytest.mark.rotates(4)
async def test_every_field(tooled: Stack, subtests: pytest.Subtests) -> None:
    for endpoint, name in CASES:
        with subtests.test(endpoint=endpoint, field=name):
            kind, required, _ = ENDPOINTS[endpoint]
            await check_null(tooled, endpoint, name, required)
            if name == "spaces_between_special_tokens" or name in WITHOUT_EFFECT:
                await check_without_effect(tooled, endpoint, name, required)
            elif name in kind.model_fields and (endpoint, name) != REFUSED_CHATS:
                await check_served(tooled, endpoint, name, required)
            else:
                await check_refused(tooled, endpoint, name, required)


async def send(stack: Stack, endpoint: str, body: dict[str, Any]) -> Any:
    return await stack.client.post(endpoint.partition(" ")[0], json=body)


async def check_null(stack: Stack, endpoint: str, name: str, required: dict[str, Any]) -> None:
    if name not in required:
        response = await send(stack, endpoint, required | {"max_tokens": 2} | {name: None})
        assert response.status_code == 200, response.text


async def check_served(stack: Stack, endpoint: str, name: str, required: dict[str, Any]) -> None:
    assert name in SERVED
    if name == "chat_template":
        sample: dict[str, Any] = {name: "{{ messages }}"}
        status = 400  # unless the server trusts its clients
    elif name == "logprobs":
        sample, status = {name: True if endpoint == CHAT else 1}, 200
    else:
        sample, status = SAMPLES[name], 200
    response = await send(stack, endpoint, {"max_tokens": 2} | required | sample)
    assert response.status_code == status, response.text
    value: Any = {} if name == "documents" else [{}]  # who reads it sees that this is wrong
    wrong = await send(stack, endpoint, required | {name: value})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"].startswith(name), wrong.text


async def check_refused(stack: Stack, endpoint: str, name: str, required: dict[str, Any]) -> None:
    assert name in REFUSED
    response = await send(stack, endpoint, required | {name: {"a": 1}})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "unsupported_parameter")
    assert error["param"] == name
    assert f"'{name}'" in error["message"]


async def check_without_effect(
    stack: Stack, endpoint: str, name: str, required: dict[str, Any]
) -> None:
    assert name in NO_EFFECT
    assert name not in SERVED | REFUSED
    body = required | {"max_tokens": 5, "seed": 1}
    value: Any = True if name == "spaces_between_special_tokens" else {"a": 1}
    with_it, without = [
        (await send(stack, endpoint, one)).json()["choices"] for one in (body | {name: value}, body)
    ]
    assert with_it == without


def test_the_page_says_what_the_code_does() -> None:
    assert WITHOUT_EFFECT | {"spaces_between_special_tokens"} <= NO_EFFECT
    assert UNSUPPORTED | NOT_EMBEDDED | {"best_of"} <= REFUSED
    for kind, _, _ in ENDPOINTS.values():
        assert kind.model_fields.keys() <= SERVED | NO_EFFECT
    options = stream_options.ChatCompletionStreamOptionsParam.__annotations__
    assert options.keys() <= set(re.findall(r"[a-z_]+", PAGE))


async def test_every_kind_of_content(stack: Stack) -> None:
    kinds = get_args(parts.ChatCompletionContentPartParam)
    names = {name for kind in kinds for name in get_args(get_type_hints(kind)["type"])}
    assert {"text", "image_url", "input_audio", "file"} <= names
    for name in names:
        part = {"type": name, name: "x"}
        response = await stack.chat(messages=[{"role": "user", "content": [part]}], max_tokens=1)
        if name == "text":
            assert response.status_code == 200
            continue
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (
            "messages[0].content[0]",
            "unsupported_parameter",
        )
        assert repr(name) in error["message"]
        assert f"`{name}`" in PAGE
