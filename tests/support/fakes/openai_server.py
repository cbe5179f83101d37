"""A server that speaks OpenAI's protocol, makes its tokens up, and may be wrong on purpose."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, Literal

from aiohttp import web

MODEL = "made-up"
WRONG_AT = 5  # position of a wrong token
Wrong = Literal[
    "nothing",
    "speculation",  # a token of answers with speculation
    "everything",  # no answer is like another
    "length",  # an answer with speculation ends early
    "ending",  # or for another reason
    "text",  # no token ids
    "broken",  # streams with speculation break off
    "error",  # or have an error in them
    "refusal",  # every request is refused
]
_METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} %d
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} %d
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} %d
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0",engine="0"} %d
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1",engine="0"} %d
# TYPE surestep:steps counter
surestep:steps_total{engine="0"} 1
"""


class MadeUpServer:
    """`gap` is that of the two best tokens wherever it is asked for."""

    def __init__(self, wrong: Wrong = "nothing", gap: float = 1.5, *, own: bool = True) -> None:
        self.wrong = wrong
        self.gap = gap
        self.own = own  # whether it has metrics like Surestep's
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self._drafts = 0

    async def models(self, _: web.Request) -> web.Response:
        """One model, sampled at 0.7 where nobody says otherwise."""
        card = {"id": MODEL, "default_sampling_params": {"temperature": 0.7}}
        return web.json_response({"data": [card]})

    async def metrics(self, _: web.Request) -> web.Response:
        """Two of three drafts are accepted."""
        if not self.own:
            raise web.HTTPNotFound
        count = self._drafts
        return web.Response(text=_METRICS % (count, 3 * count, 2 * count, count, count))

    async def detokenize(self, request: web.Request) -> web.Response:
        """Letters."""
        (token,) = (await request.json())["tokens"]
        return web.json_response({"prompt": chr(ord("a") + token % 26)})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """One stream."""
        body = await request.json()
        self.bodies.append(body)
        if self.wrong == "refusal":
            error = {"message": "no room for this", "param": "max_tokens"}
            return web.json_response({"error": error}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self._events(body):
            await response.write(b"data: " + event + b"\n\n")
        return response

    def _events(self, body: dict[str, Any]) -> list[bytes]:
        drafts = body.get("speculative") != {"num_tokens": 0}
        self._drafts += drafts
        tokens = self._tokens(body, drafts=drafts)
        if drafts and self.wrong in ("broken", "error"):
            events = [self._chunk(body, token) for token in tokens[:WRONG_AT]]
            error = {"error": {"message": "the engine is dead"}}
            return events + ([json.dumps(error).encode()] if self.wrong == "error" else [])
        events = [self._chunk(body, token) for token in tokens]
        reason = "stop" if drafts and self.wrong == "ending" else "length"
        ending = {"choices": [{"index": 0, "token_ids": [], "finish_reason": reason}]}
        return [*events, json.dumps(ending).encode(), b"[DONE]"]

    def _tokens(self, body: dict[str, Any], *, drafts: bool) -> list[int]:
        said = json.dumps(body.get("prompt") or body["messages"])
        start = sum(said.encode()) + (body["seed"] if body["temperature"] else 0)
        tokens = [(start + 7 * i) % 1000 for i in range(body.get("max_tokens") or 8)]
        if len(tokens) > WRONG_AT and self.wrong == "everything":
            tokens[WRONG_AT - 1] += len(self.bodies)
        elif len(tokens) > WRONG_AT and self.wrong == "speculation" and drafts:
            tokens[WRONG_AT] += 1
        return tokens[:-1] if drafts and self.wrong == "length" else tokens

    def _chunk(self, body: dict[str, Any], token: int) -> bytes:
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": None}
        if "messages" in body:
            choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": None}
        if self.wrong != "text":
            choice["token_ids"] = [token]
        best = [("a", -0.1), ("b", -0.1 - self.gap)]
        if body.get("logprobs") is True:
            top = [{"token": t, "logprob": p} for t, p in best]
            choice["logprobs"] = {"content": [{"top_logprobs": top}]}
        elif body.get("logprobs"):
            choice["logprobs"] = {"top_logprobs": [dict(best)]}
        return json.dumps({"choices": [choice]}).encode()


@contextlib.asynccontextmanager
async def serving(server: MadeUpServer) -> AsyncIterator[MadeUpServer]:
    """On a free port, which its `url` tells."""
    app = web.Application()
    app.add_routes(
        [
            web.get("/v1/models", server.models),
            web.get("/metrics", server.metrics),
            web.post("/detokenize", server.detokenize),
            web.post("/v1/completions", server.generate),
            web.post("/v1/chat/completions", server.generate),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
