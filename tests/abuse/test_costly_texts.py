"""Short texts that take long to check, and texts that are no text: their own requests' faults."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from costly_texts import KINDS, search
from support.fakes.scheduler import FakeScheduler, default_info, running
from support.processes.gateway import gateway, until_ready
from support.processes.ports import free_port
from support.processes.stalls import Watched, long_stalls, read_stream, script

pytestmark = pytest.mark.timeout(240)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GREEDY, MODEST = ({"authorization": f"Bearer {name}"} for name in ("greedy", "modest"))
ANSWER_S = 15.0  # half a second of computing, on a machine that many share
ATTEMPTS = 3  # what else the machine does is not ours to answer for
SEARCH_S = 20.0
SMALL = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

Json = dict[str, Any]


class Server:
    """A gateway, what a neighbour reads from it meanwhile, and whose fault was what."""

    def __init__(self, client: httpx.AsyncClient, scheduler: FakeScheduler) -> None:
        self.client, self.scheduler = client, scheduler

    async def post(self, path: str, body: Json, headers: dict[str, str] = GREEDY) -> httpx.Response:
        """Post, and look at what holds for every answer."""
        began = time.monotonic()
        response = await self.client.post(path, json=body, headers=headers)
        assert time.monotonic() - began < ANSWER_S, body
        assert response.status_code in (200, 400, 413), response.text[:500]
        if response.status_code != 200:
            assert len(response.content) < 4000
        return response


@pytest.fixture
async def server(model: Path) -> AsyncIterator[Server]:
    """A gateway whose event loop stands still for nobody, and that lives to the end."""
    port = free_port()
    flags = ("--api-key", "greedy,modest", "--trust-request-chat-template")
    limits = ("--chat-template-timeout-s", "1", "--text-memory-bytes", "512M")
    async with (
        running(script=script, info=default_info(max_model_len=100_000)) as scheduler,
        gateway(model, port, scheduler.port, *flags, *limits) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        asyncio.TaskGroup() as group,
    ):
        assert process.stderr is not None
        log = group.create_task(process.stderr.read())
        await until_ready(client, process)
        done = asyncio.Event()
        stream = group.create_task(read_stream(client, done, MODEST))
        served = Server(client, scheduler)
        assert (await served.post(COMPLETIONS, asking(SMALL))).status_code == 200
        yield served
        assert process.returncode is None
        done.set()
        watched: Watched = await stream
        assert watched.events > 10
        assert watched.longest_gap_s < 2, watched  # as long as the machine may take for itself
        process.terminate()
        assert b"Traceback" not in await log


def asking(schema: Json | str) -> Json:
    return {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": schema}}


def patterns(count: int) -> Json:
    """A schema that takes twice as long for each pattern."""
    parts = [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in range(1, count + 1)]
    return {"allOf": parts}


def in_each_api(schema: Json) -> list[tuple[str, Json, str | None]]:
    """Requests that ask for this schema, and the name of its field."""
    user, named = {"role": "user", "content": "x"}, {"name": "n", "schema": schema}
    kind = {"type": "json_schema", "json_schema": named}
    flat = {"format": {"type": "json_schema"} | named}
    config = {"format": {"type": "json_schema", "schema": schema}}
    return [
        (CHAT, {"messages": [user], "response_format": kind}, "response_format"),
        (COMPLETIONS, {"prompt": "x", "response_format": kind}, "response_format"),
        (RESPONSES, {"input": "x", "text": flat}, "text.format"),
        (MESSAGES, {"messages": [user], "max_tokens": 2, "output_config": config}, None),
    ]


@pytest.mark.rotates(3)
async def test_a_costly_schema_is_its_requests_fault(server: Server) -> None:
    """In each API; a stream of another client goes on, and the event loop."""
    for path, body, field in in_each_api(patterns(25)):
        before = await long_stalls(server.client)
        for _ in range(3):  # as official clients try
            response = await server.post(path, body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert "too much time or memory to check" in error["message"]
            assert error.get("param") == field
        stalls = (await long_stalls(server.client)).since(before)
        assert stalls.busy < ATTEMPTS, f"{path}: {stalls}"


@pytest.mark.rotates(3)
async def test_others_get_their_turn(server: Server) -> None:
    """Whoever has a costly schema checked, again and again and many at once, has the text processes
    but one.
    """
    done = False

    async def insist() -> None:
        while not done:
            response = await server.client.post(
                COMPLETIONS, json=asking(patterns(25)), headers=GREEDY, timeout=120
            )
            assert response.status_code == 400, response.text

    async with asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(insist())
        for number in range(10):
            schema = SMALL | {"title": str(number)}  # new, so that nobody remembers it
            assert (await server.post(COMPLETIONS, asking(schema), MODEST)).status_code == 200
        done = True


COSTLY: dict[str, Json] = {
    "references": {
        "$defs": {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2000)},
        "$ref": "#/$defs/d0",
    },
    "faulty and costly": {"allOf": [*patterns(15)["allOf"], {"type": "nonesuch"}]},
    "many faulty parts": {
        "properties": {f"p{n}": patterns(9) for n in range(100)} | {"z": {"type": "nonesuch"}}
    },
    "not": {"not": patterns(25), "allOf": [{"type": "nonesuch"}]},
}


@pytest.mark.parametrize("name", COSTLY)
async def test_a_costly_schema_is_refused_soon(server: Server, name: str) -> None:
    response = await server.post(COMPLETIONS, asking(COSTLY[name]))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].startswith("structured_outputs")
    assert (await server.post(COMPLETIONS, asking(SMALL))).status_code == 200


async def test_what_a_grammar_leaves_out_is_not_compiled(server: Server) -> None:
    asked = asking({"not": patterns(25)})
    for _ in range(3):
        assert (await server.post(COMPLETIONS, asked)).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotates(9)
async def test_the_slowest_text_that_is_found_keeps_nobody_waiting(
    server: Server, kind: str, pytestconfig: pytest.Config
) -> None:
    """Each share looks for it from elsewhere."""
    rng = random.Random(f"{kind} {pytestconfig.option.share}")
    user = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}

    async def measure(text: str) -> float:
        began = time.monotonic()
        await server.post(CHAT, user | KINDS[kind][1](text))
        return time.monotonic() - began

    before = await long_stalls(server.client)
    found = [one async for one in search(kind, rng, measure, SEARCH_S)]
    stalls = (await long_stalls(server.client)).since(before)
    assert stalls.busy < ATTEMPTS, (stalls, max(found))
    assert (await server.post(COMPLETIONS, asking(SMALL))).status_code == 200


DEEP = '{"a":' * 900 + "1" + "}" * 900
FAULTY: list[tuple[str, Json, str | None]] = [
    *(
        (COMPLETIONS, {"prompt": "x", **fields}, param)
        for text in (DEEP, "[" * 100_000, '{"a": "\\ud800"}', '{"a": NaN}', "9" * 5000)
        for fields, param in (
            ({"structured_outputs": {"json": text}}, "structured_outputs.json"),
            ({"guided_json": text}, "guided_json"),
            (
                {"structured_outputs": {"structural_tag": text}},
                "structured_outputs.structural_tag",
            ),
            ({"structural_tag": text}, "structural_tag"),
        )
    ),
    *(
        (path, body, None)
        for name in ("\\", "\\1", "\\g<0>", "a\\q", "(", "x" * 3000)
        for path, body, _ in in_each_api({"properties": {name: {"type": "nonesuch"}}})
    ),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"grammar": "(" * 100_000}}, None),
    (COMPLETIONS, {"prompt": "x", "structured_outputs": {"regex": "(" * 100_000}}, None),
    (COMPLETIONS, {"prompt": "x", "guided_grammar": "root ::= " + "(" * 100_000}, None),
]


async def test_what_is_wrong_with_a_text_is_told(server: Server) -> None:
    for path, body, param in FAULTY:
        response = await server.post(path, body)
        assert response.status_code == 400, (json.dumps(body)[:200], response.text)
        assert param is None or response.json()["error"]["param"] == param


LONG = "m" * (20 << 20)
ECHOED: list[tuple[str, Json]] = [
    (CHAT, {"model": LONG, "messages": [{"role": "user", "content": "x"}]}),
    (COMPLETIONS, {"model": LONG, "prompt": "x"}),
    (RESPONSES, {"model": LONG, "input": "x"}),
    (RESPONSES, {"input": "x", "previous_response_id": LONG}),
    (RESPONSES, {"input": [{"type": LONG}]}),
    (RESPONSES, {"input": "x", "include": [LONG]}),
    (MESSAGES, {"model": LONG, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}),
    (MESSAGES, {"max_tokens": 2, "messages": [{"role": LONG, "content": "x"}]}),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {LONG: "y"}}),
    ("/tokenize", {"model": LONG, "prompt": "x"}),
    ("/v1/embeddings", {"model": LONG, "input": "x"}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
]


async def test_errors_repeat_little_of_a_request(server: Server) -> None:
    for path, body in ECHOED:
        response = await server.client.post(path, json=body, headers=GREEDY)
        assert response.status_code in (400, 404, 413), response.text[:500]
        assert len(response.content) < 4000, path
    long_name = await server.client.get(f"/v1/models/{LONG[:50_000]}", headers=GREEDY)
    assert long_name.status_code == 404
    assert len(long_name.content) < 4000
