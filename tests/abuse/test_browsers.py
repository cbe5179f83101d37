"""What a page in a browser sends: it is not served unless its origin is allowed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.processes.gateway_stack import Stack, StartStack, stacks

EVIL = "https://evil.example"
GOOD = "https://app.example"
BODY = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
JSON = {"content-type": "application/json"}


@pytest.fixture
async def start_stack(model: Path) -> AsyncIterator[StartStack]:
    async with stacks(model) as start:
        yield start


def check_error(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["type"] == kind
    message: str = error["message"]
    return message


async def simple(stack: Stack, path: str, kind: str | None) -> httpx.Response:
    """A request that a page may send without asking first."""
    headers = [(b"origin", EVIL.encode())]
    headers += [] if kind is None else [(b"content-type", kind.encode("latin-1"))]
    return await stack.client.post(path, content=BODY, headers=headers)


@pytest.mark.parametrize("path", PATHS)
async def test_only_json_is_json(start_stack: StartStack, path: str) -> None:
    stack = await start_stack(admin_api_key="secret")
    simple_kinds = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; a=b")
    for kind in (*simple_kinds, None, "", "application/jsonx", "text/json", "json", "\xff"):
        message = check_error(await simple(stack, path, kind), 415, "invalid_request_error")
        assert "application/json" in message
    assert stack.scheduler.requests == []
    key = {"authorization": "Bearer secret"}
    admin = await stack.client.post("/admin/workers/restart", content=b"{}", headers=key)
    check_error(admin, 415, "invalid_request_error")


@pytest.mark.parametrize(
    "kind",
    ["application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8"],
)
async def test_what_clients_send_is_taken(start_stack: StartStack, kind: str) -> None:
    stack = await start_stack()
    answer = await stack.client.post(
        "/v1/completions", content=BODY, headers={"content-type": kind}
    )
    assert answer.status_code == 200


def preflight(origin: str, method: str = "POST") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": "authorization,content-type",
    }


async def test_pages_are_not_answered_by_default(start_stack: StartStack) -> None:
    stack = await start_stack()
    asked = await stack.client.options("/v1/completions", headers=preflight(GOOD))
    assert asked.status_code >= 400
    answered = await stack.complete(max_tokens=1)
    for response in (asked, answered):
        assert not [name for name in response.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("origins", ['["https://app.example", "https://b.example"]', GOOD, ["*"]])
async def test_allowed_pages_are(start_stack: StartStack, origins: str | list[str]) -> None:
    stack = await start_stack(allowed_origins=origins, api_key="secret", max_body_bytes=1000)
    allowed = "*" if origins == ["*"] else GOOD
    asked = await stack.client.options("/v1/completions", headers=preflight(GOOD))
    assert asked.status_code == 200, asked.text  # without a key: browsers send none here
    assert asked.headers["access-control-allow-origin"] == allowed
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    key = {"authorization": "Bearer secret"}
    requests = [
        (JSON | key, BODY, 200),
        (JSON, BODY, 401),
        (key, BODY, 415),
        (JSON | key, b"{", 400),
        (JSON | key, b" " * 2000, 413),
    ]
    for headers, body, status in requests:
        given = headers | {"origin": GOOD}
        response = await stack.client.post("/v1/completions", content=body, headers=given)
        assert response.status_code == status, response.text
        assert response.headers["access-control-allow-origin"] == allowed
        assert "x-request-id" in response.headers["access-control-expose-headers"]
    if allowed == GOOD:
        refused = await stack.client.options("/v1/completions", headers=preflight(EVIL))
        assert refused.status_code == 400
        other = await stack.client.get("/health", headers={"origin": EVIL})
        assert "access-control-allow-origin" not in other.headers


async def test_methods_headers_and_credentials_are_settings(start_stack: StartStack) -> None:
    stack = await start_stack(
        allowed_origins=GOOD,
        allowed_methods='["GET", "POST"]',
        allowed_headers="authorization, content-type",
        allow_credentials=True,
    )
    asked = await stack.client.options("/v1/completions", headers=preflight(GOOD))
    assert asked.headers["access-control-allow-credentials"] == "true"
    assert asked.headers["access-control-allow-methods"] == "GET, POST"
    for headers in (
        preflight(GOOD, "DELETE"),
        preflight(GOOD) | {"access-control-request-headers": "x-y"},
    ):
        assert (await stack.client.options("/v1/completions", headers=headers)).status_code == 400


NAMES = ("localhost:80", "127.0.0.1", "127.1.2.3:8000", "[::1]:8000", "app.localhost", "LOCALHOST")
OTHERS = (
    "evil.example",
    "evil.example:8000",
    "10.0.0.1",
    "127.0.0.1.evil.example",
    "",
    "[::1",
)


@pytest.mark.parametrize(
    "mark",
    [
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "same-origin"},
        {"user-agent": "Mozilla/5.0 (X11; Linux x86_64) Firefox/142.0"},
    ],
)
async def test_names_that_were_bound_to_loopback(
    start_stack: StartStack, mark: dict[str, str]
) -> None:
    """DNS rebinding: the page believes that the server is its own."""
    stack = await start_stack()
    for path in ("/status", "/v1/models", "/metrics"):
        for name in OTHERS:
            headers = [(key.encode(), value.encode()) for key, value in mark.items()]
            headers.append((b"host", name.encode()))
            response = await stack.client.get(path, headers=headers)
            assert "--allowed-origins" in check_error(response, 403, "permission_error")
        for name in NAMES:
            assert (await stack.client.get(path, headers=mark | {"host": name})).status_code == 200
        assert (await stack.client.get(path, headers={"host": "my.name"})).status_code == 200
    posted = await stack.client.post(
        "/v1/completions", content=BODY, headers=mark | JSON | {"host": "evil.example"}
    )
    check_error(posted, 403, "permission_error")
    assert stack.scheduler.requests == []


async def test_names_of_allowed_pages(start_stack: StartStack) -> None:
    """A page that a proxy on this machine serves together with the API."""
    stack = await start_stack(allowed_origins=GOOD)
    page = {"origin": GOOD, "host": "app.example"}
    assert (await stack.client.get("/v1/models", headers=page)).status_code == 200
    page = {"origin": EVIL, "host": "evil.example"}
    assert (await stack.client.get("/v1/models", headers=page)).status_code == 403


async def test_a_server_on_other_interfaces_has_other_names(start_stack: StartStack) -> None:
    stack = await start_stack(host="0.0.0.0")
    port = stack.server.address.rpartition(":")[2]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        page = {"origin": "http://gpu.lan:8000", "host": "gpu.lan:8000"}
        assert (await client.get("/v1/models", headers=page)).status_code == 200
