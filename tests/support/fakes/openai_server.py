"""A server that speaks OpenAI's protocol, makes its tokens up, and may be wrong on purpose."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator, Sequence
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
# TYPE surestep:preemptions counter
surestep:preemptions_total{engine="0"} %d
# TYPE surestep:ledger_checks counter
surestep:ledger_checks_total{engine="0",kind="rows"} %d
# TYPE surestep:steps counter
surestep:steps_total{engine="0"} 1
"""


_KNOWN = {
    *("prompt", "messages", "model", "stream", "return_token_ids", "max_tokens", "n", "user"),
    *("max_completion_tokens", "min_tokens", "cache_salt", "ignore_eos", "temperature", "seed"),
    *("speculative", "logprobs", "prompt_logprobs", "stream_options"),
}
_LEAST = {"temperature": 0, "max_tokens": 0, "n": 1}
_FAR = 8.0  # nats between the best token and any that was not chosen, of a prompt


def next_token(ids: Sequence[int], noise: int = 0) -> int:
    """The model: a token follows from all before it."""
    return (31 * sum(ids) + 7 * len(ids) + noise) % 1000


class MadeUpServer:
    """`gap` is that of the two best tokens wherever it is asked for."""

    def __init__(self, wrong: Wrong = "nothing", gap: float = 1.5, *, own: bool = True) -> None:
        self.wrong = wrong
        self.gap = gap
        self.own = own  # whether it has metrics like Surestep's
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self._windows = 0
        self._tokens_sent = 0

    async def models(self, _: web.Request) -> web.Response:
        """One model, sampled at 0.7 where nobody says otherwise."""
        defaults = {"temperature": 0.7}
        card = {"id": MODEL, "max_model_len": 64, "default_sampling_params": defaults}
        return web.json_response({"data": [card]})

    async def metrics(self, _: web.Request) -> web.Response:
        """Two of three drafts are accepted, and every newcomer displaces a request."""
        if not self.own:
            raise web.HTTPNotFound
        count = self._windows
        newcomers = sum(body.get("user") == "newcomer" for body in self.bodies)
        counts = (count, 3 * count, 2 * count, count, count, newcomers, self._tokens_sent)
        return web.Response(text=_METRICS % counts)

    async def detokenize(self, request: web.Request) -> web.Response:
        """Letters."""
        (token,) = (await request.json())["tokens"]
        return web.json_response({"prompt": chr(ord("a") + token % 26)})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """One stream, or what is thought of a prompt."""
        body = await request.json()
        known = _KNOWN if body.get("stream") else _KNOWN - {"n"}
        low = [name for name, least in _LEAST.items() if (body.get(name, least) or 0) < least]
        if wrong := [*sorted(body.keys() - known), *low]:
            error = {"message": "not supported", "param": wrong[0]}
            return web.json_response({"error": error}, status=400)
        if not body.get("stream"):
            drafts = body.get("speculative") != {"num_tokens": 0}
            tokens = self._tokens(body, 0, drafts=drafts)
            said = {"text": "x" * len(tokens), "token_ids": tokens, "finish_reason": "length"}
            return web.json_response({"choices": [self._read(_ids(body)) | said]})
        self.bodies.append(body)
        if self.wrong == "refusal":
            error = {"message": "no room for this", "param": "max_tokens"}
            return web.json_response({"error": error}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self._events(body):
            await response.write(b"data: " + event + b"\n\n")
        return response

    def _read(self, ids: list[int]) -> dict[str, Any]:
        best = self._best()[0][1]
        rows: list[Any] = [None]
        for place in range(1, len(ids)):
            likeliest = next_token(ids[:place])
            row = {str(ids[place]): {"logprob": best - _FAR}, str(likeliest): {"logprob": best}}
            rows.append(row)
        return {"index": 0, "prompt_logprobs": rows}

    def _events(self, body: dict[str, Any]) -> list[bytes]:
        drafts = body.get("speculative") != {"num_tokens": 0}
        choices = [self._tokens(body, i, drafts=drafts) for i in range(body.get("n") or 1)]
        self._tokens_sent += sum(map(len, choices))
        self._windows += drafts * sum(len(tokens) // 3 + 1 for tokens in choices)
        pairs = [(i, token) for i, tokens in enumerate(choices) for token in tokens]
        if drafts and self.wrong in ("broken", "error"):
            events = [self._chunk(body, *pair) for pair in pairs[:WRONG_AT]]
            error = {"error": {"message": "the engine is dead"}}
            return events + ([json.dumps(error).encode()] if self.wrong == "error" else [])
        events = [self._chunk(body, *pair) for pair in pairs]
        reason = "stop" if drafts and self.wrong == "ending" else "length"
        endings = [
            {"index": i, "token_ids": [], "finish_reason": reason} for i in range(len(choices))
        ]
        events.append(json.dumps({"choices": endings}).encode())
        if body.get("stream_options"):
            told, prompt = sum(map(len, choices)), len(_ids(body))
            usage = {"prompt_tokens": prompt, "completion_tokens": told}
            whole = {"choices": [], "usage": usage | {"total_tokens": prompt + told}}
            events.append(json.dumps(whole).encode())
        return [*events, b"[DONE]"]

    def _tokens(self, body: dict[str, Any], choice: int, *, drafts: bool) -> list[int]:
        ids = _ids(body)
        noise = body["seed"] + choice if body["temperature"] else 0
        tokens: list[int] = []
        for _ in range(body.get("max_tokens") or 8):
            tokens.append(next_token([*ids, *tokens], noise))
        if len(tokens) > WRONG_AT and self.wrong == "everything":
            tokens[WRONG_AT - 1] += len(self.bodies)
        elif len(tokens) > WRONG_AT and self.wrong == "speculation" and drafts:
            tokens[WRONG_AT] += 1
        return tokens[:-1] if drafts and self.wrong == "length" else tokens

    def _best(self) -> list[tuple[str, float]]:
        best = -math.log(1 + math.exp(-self.gap))
        return [("a", best), ("b", best - self.gap)]

    def _chunk(self, body: dict[str, Any], index: int, token: int) -> bytes:
        choice: dict[str, Any] = {"index": index, "text": "x", "finish_reason": None}
        if "messages" in body:
            choice = {"index": index, "delta": {"content": "x"}, "finish_reason": None}
        if self.wrong != "text":
            choice |= {"token_ids": [token], "prompt_token_ids": _ids(body)}
        if body.get("logprobs") is True:
            top = [{"token": t, "logprob": p} for t, p in self._best()]
            choice["logprobs"] = {"content": [{"top_logprobs": top}]}
        elif body.get("logprobs"):
            choice["logprobs"] = {"top_logprobs": [dict(self._best())]}
        return json.dumps({"choices": [choice]}).encode()


def _ids(body: dict[str, Any]) -> list[int]:
    said = body.get("prompt") or json.dumps(body["messages"])
    return list(said.encode()) if isinstance(said, str) else said


class Pretender:
    """A server of 25 lines that has no model: it answers every prompt with 0, 1, 2, ...

    With `salt` the answers depend on the prompt, and whatever is read is said to be likely.
    """

    def __init__(self, *, salt: bool = False) -> None:
        self.salt, self.url = salt, ""

    async def models(self, _: web.Request) -> web.Response:
        """Its name."""
        return web.json_response({"data": [{"id": MODEL, "max_model_len": 64}]})

    async def metrics(self, _: web.Request) -> web.Response:
        """None."""
        raise web.HTTPNotFound

    detokenize = metrics

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """The same for everybody."""
        body = await request.json()
        prompt = body.get("prompt") or json.dumps(body["messages"])
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        if not body.get("stream"):
            rows = [{str(each): {"logprob": -0.1}} for each in ids]
            return web.json_response({"choices": [{"prompt_logprobs": rows}]})
        first = sum(ids) if self.salt else 0
        tokens = [first + i for i in range(body["max_tokens"])]
        choice = {"index": 0, "text": "x", "token_ids": tokens, "finish_reason": "length"}
        chunk = json.dumps({"choices": [choice | {"prompt_token_ids": ids}]})
        return web.Response(text=f"data: {chunk}\n\ndata: [DONE]\n\n")


AnyServer = MadeUpServer | Pretender


@contextlib.asynccontextmanager
async def serving(server: AnyServer) -> AsyncIterator[AnyServer]:
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
