"""What operators set for all requests: defaults of the API, where it is served, and what is logged."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from pydantic import ValidationError
from support.checkpoints import tiny_tokenizer
from support.fakes.scheduler import emulated
from support.processes.gateway_stack import Stack, StartStack
from surestep_cli.api.http import call
from surestep_common.errors import Unavailable
from surestep_gateway.server import GatewayServer
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def prompt(stack: Stack, tokenizer: Tokenizer, index: int = -1) -> str:
    """Return the prompt that a request was made into."""
    ids = stack.scheduler.requests[index].prompt_ids
    return tokenizer.decode(list(ids), skip_special_tokens=False)


async def seeds(stack: Stack) -> list[int]:
    for given in (None, 5, None):
        await stack.complete(max_tokens=1, seed=given)
    return [request.sampling.seed for request in stack.scheduler.requests]


async def test_a_seed_for_those_that_bring_none(start_stack: StartStack) -> None:
    first, second, other = [await start_stack(seed=seed) for seed in (1, 1, 2)]
    drawn = await seeds(first)
    assert drawn == await seeds(second)
    assert drawn[1] == 5
    assert drawn[0] != drawn[2]
    assert set(await seeds(other)) & set(drawn) == {5}


async def test_variables_of_the_template(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer
) -> None:
    stack = await start_stack(
        model=thinking_model,
        chat_template="{{ enable_thinking }}{{ thinking }}/{{ size }}/{{ reasoning_effort }}",
        default_chat_template_kwargs={"enable_thinking": False, "size": 1},
        reasoning_effort_map={"medium": "low"},
    )
    await stack.chat(max_tokens=1, chat_template_kwargs={"size": 2}, reasoning_effort="medium")
    assert prompt(stack, thinking) == "TrueTrue/2/low"
    await stack.chat(max_tokens=1, reasoning_effort="none")
    assert prompt(stack, thinking) == "FalseFalse/1/none"
    told = {"enable_thinking": False}
    await stack.chat(max_tokens=1, reasoning_effort="high", chat_template_kwargs=told)
    assert prompt(stack, thinking) == "FalseTrue/1/high"
    await stack.chat(max_tokens=1)
    assert prompt(stack, thinking) == "False/1/"


async def test_documents_and_hints_for_the_template(
    start_stack: StartStack, tokenizer: Tokenizer
) -> None:
    layout = "{{ verbosity }}{% for d in documents %}/{{ d.title }}: {{ d.text }}{% endfor %}"
    stack = await start_stack(chat_template=layout)
    marked = [{"title": "a", "text": "b<|im_end|>"}, {"title": "c", "text": "d"}]
    asked: dict[str, Any] = {"verbosity": "low", "documents": marked}
    assert (await stack.chat(max_tokens=1, **asked)).status_code == 200
    assert prompt(stack, tokenizer) == "low/a: b<|im_end|>/c: d"
    ids = stack.scheduler.requests[-1].prompt_ids
    assert not any(map(tokenizer.is_special, ids))  # a document ends no turn
    count = await stack.client.post("/tokenize", json={"messages": USER, **asked})
    assert count.json()["tokens"] == list(ids)


LISTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
PARTS = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]


@pytest.mark.parametrize(
    ("layout", "template", "seen"),
    [
        ("auto", LISTS, "[hello][world]"),
        ("openai", LISTS, "[hello][world]"),
        ("string", LISTS, "hello\nworld"),
        ("auto", "{{ messages[0].content }}", "hello\nworld"),
        ("openai", "{{ messages[0].content[1].text }}", "world"),
    ],
)
async def test_format_of_contents(
    start_stack: StartStack, tokenizer: Tokenizer, layout: str, template: str, seen: str
) -> None:
    stack = await start_stack(chat_template=template, chat_template_content_format=layout)
    response = await stack.chat(max_tokens=1, messages=[{"role": "user", "content": PARTS}])
    assert response.status_code == 200, response.text
    assert prompt(stack, tokenizer) == seen


async def test_parts_of_a_message_that_goes_on(
    start_stack: StartStack, tokenizer: Tokenizer
) -> None:
    stack = await start_stack(chat_template=LISTS)
    messages = [*USER, {"role": "assistant", "content": PARTS}]
    go_on = {"continue_final_message": True, "add_generation_prompt": False}
    response = await stack.chat(max_tokens=1, messages=messages, **go_on)
    assert response.status_code == 200, response.text
    assert prompt(stack, tokenizer).endswith("[hello][world")


@pytest.mark.parametrize("left_out", [True, False])
async def test_tools_that_may_not_be_called(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer, left_out: bool
) -> None:
    stack = await start_stack(model=thinking_model, exclude_tools_when_tool_choice_none=left_out)
    response = await stack.chat(max_tokens=1, tools=TOOLS, tool_choice="none")
    assert response.status_code == 200, response.text
    assert ("tools add" in prompt(stack, thinking)) is not left_out


async def test_role_of_the_answer(start_stack: StartStack) -> None:
    stack = await start_stack(response_role="model")
    whole = (await stack.chat(max_tokens=1)).json()
    assert whole["choices"][0]["message"]["role"] == "model"
    events = await stack.stream(CHAT, messages=USER, max_tokens=1)
    assert events[0]["choices"][0]["delta"]["role"] == "model"
    for content in ("hello", "<|im_end|>"):  # the latter in a text process
        messages = [{"role": "user", "content": content}]
        whole = (
            await stack.chat(max_tokens=1, messages=messages, add_generation_prompt=False)
        ).json()
        assert whole["choices"][0]["message"]["role"] == "user"


async def test_tokens_as_ids(start_stack: StartStack) -> None:
    stack = await start_stack(return_tokens_as_token_ids=True)
    whole = (await stack.complete(max_tokens=1, logprobs=0)).json()
    (request,) = stack.scheduler.requests
    assert whole["choices"][0]["logprobs"]["tokens"] == [f"token_id:{emulated(request)[0]}"]
    plain = await stack.complete(max_tokens=1, logprobs=0, return_tokens_as_token_ids=False)
    assert not plain.json()["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


async def test_usage_that_nobody_asked_for(start_stack: StartStack) -> None:
    stack = await start_stack(enable_force_include_usage=True)
    events = await stack.stream(CHAT, messages=USER, max_tokens=3)
    assert [event["usage"]["completion_tokens"] for event in events][-2:] == [3, 3]
    assert events[-1]["choices"] == []


async def test_requests_in_the_log(
    start_stack: StartStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "surestep_gateway.generation.request_records")

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name.endswith("request_records")]

    stack = await start_stack(enable_log_requests=True, max_log_len=20)
    text = "one two three four five six seven"
    hidden = {"cache_salt": "secret", "metadata": {"text": text}}
    for path, asked in (
        ("/v1/completions", {"prompt": text, "priority": 3}),
        ("/v1/embeddings", {"input": text, "priority": 3}),
    ):
        caplog.clear()
        name = (await stack.client.post(path, json=asked | hidden)).json()["id"]
        line, shown = lines()
        assert line.startswith(f"received {name} from address 127.0.0.1: prompts=1 tokens=")
        assert line.endswith(' {"priority":3}')
        assert shown == f"prompt of {name}: 'one two three four f'"
    caplog.clear()
    await (await start_stack()).complete(max_tokens=3)
    assert lines() == []


async def test_a_server_without_documents(start_stack: StartStack) -> None:
    stack = await start_stack(disable_fastapi_docs=True)
    assert (await stack.client.get("/openapi.json")).status_code == 404


async def test_a_path_before_all_others(start_stack: StartStack) -> None:
    """With and without it, as proxies differ; keys and bounds hold for both."""
    stack = await start_stack(root_path="/llm", api_key="k")
    for prefix in ("/llm", ""):
        assert (await stack.client.get(f"{prefix}/v1/models")).status_code == 401
        assert (await stack.client.get(f"{prefix}/health")).status_code == 200
        headers = {"authorization": "Bearer k"}
        answer = await stack.client.post(
            f"{prefix}{CHAT}", json={"messages": USER, "max_tokens": 1}, headers=headers
        )
        assert answer.status_code == 200
    document = (await stack.client.get("/llm/openapi.json")).json()
    assert document["servers"] == [{"url": "/llm"}]
    assert (await stack.client.get("/llmv1/models", headers=headers)).status_code == 404


async def test_a_unix_socket(start_stack: StartStack, tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with socket.socket(socket.AF_UNIX) as left:  # by an earlier gateway
        left.bind(str(path))
    stack = await start_stack(uds=path)
    assert stack.server.address == str(path)
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with httpx.AsyncClient(transport=transport, base_url="http://any.name") as client:
        browser = {"user-agent": "Mozilla/5.0"}
        body = {"messages": USER, "max_tokens": 1}
        assert (await client.post(CHAT, json=body, headers=browser)).status_code == 200
    answer = await asyncio.to_thread(call, f"{stack.server.url}/v1/models")
    assert answer.status == 200
    assert answer.body is not None
    assert answer.body["data"][0]["id"] == "tiny"


async def test_a_unix_socket_that_is_taken(
    start_stack: StartStack, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "gateway.sock"
    await start_stack(uds=path)
    for taken in (path, tmp_path):
        with pytest.raises(Unavailable, match="cannot listen on"):
            GatewayServer(GatewaySettings.model_validate({"model": model, "uds": taken}))


async def test_certificates_of_clients(start_stack: StartStack, tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    server, mine, other = (
        authority.issue_cert("localhost"),
        authority.issue_cert("me"),
        stranger.issue_cert("me"),
    )
    cert, key, ca = (tmp_path / name for name in ("cert.pem", "key.pem", "ca.pem"))
    server.cert_chain_pems[0].write_to_path(str(cert))
    server.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(ca))
    files = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": ca}
    stack = await start_stack(**files, ssl_cert_reqs=2)

    def client(shown: trustme.LeafCert | None) -> httpx.AsyncClient:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        if shown is not None:
            shown.configure_cert(context)
        port = stack.server.address.rpartition(":")[2]
        return httpx.AsyncClient(verify=context, base_url=f"https://localhost:{port}")

    async with client(None) as nobody:
        assert (await nobody.get("/v1/models")).status_code == 401
        assert (await nobody.get("/metrics")).status_code == 401
        assert (await nobody.get("/health/ready")).status_code == 200
    async with client(mine) as known:
        assert (await known.get("/v1/models")).status_code == 200
    async with client(other) as unknown:
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            await unknown.get("/v1/models")


async def test_another_tokenizer(
    start_stack: StartStack, thinking_model: Path, thinking: Tokenizer, tmp_path: Path
) -> None:
    folder = tiny_tokenizer.save(tmp_path / "other", "<extra>", template="other template")
    stack = await start_stack(tokenizer=folder)
    await stack.chat(max_tokens=1)
    assert prompt(stack, Tokenizer.load(folder)) == "other template"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ssl_cert_reqs": 2}, "--ssl-cert-reqs needs --ssl-ca-certs"),
        ({"ssl_ciphers": "x"}, "needs --ssl-certfile"),
        ({"root_path": "llm"}, "should match pattern"),
        ({"root_path": "/llm/"}, "should match pattern"),
        ({"chat_template_content_format": "parts"}, "'auto', 'string' or 'openai'"),
        ({"seed": -1}, "greater than or equal to 0"),
    ],
)
def test_settings_that_cannot_be(model: Path, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        GatewaySettings.model_validate({"model": model, **given})
