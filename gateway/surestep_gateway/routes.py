"""The OpenAI endpoints and vLLM's tokenizer endpoints."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from surestep_common.errors import NotFound

from .context import Gateway
from .errors import JsonResponse
from .generation import Origin, chat_generation, completion_generation
from .prompts import render_chat
from .protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    TokenizeChatBody,
    parse,
)
from .respond import EventStream, json_answer
from .sampling import check_vocab
from .shapes import ChatShape, CompletionShape
from .tenants import Caller


class OpenAIRoutes:
    """Handlers bound to one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """What to mount."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        arrived = time.perf_counter()
        body = parse(ChatBody, await request.body())
        generation = await chat_generation(self._gateway, body, _origin(request, body, arrived))
        shape = ChatShape(self._gateway, generation)
        if body.stream:
            return EventStream(generation, shape, self._gateway.admission)
        return await json_answer(generation, shape, request.receive, self._gateway.admission)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        arrived = time.perf_counter()
        body = parse(CompletionBody, await request.body())
        origin = _origin(request, body, arrived)
        generation = await completion_generation(self._gateway, body, origin)
        shape = CompletionShape(self._gateway, generation)
        if body.stream:
            return EventStream(generation, shape, self._gateway.admission)
        return await json_answer(generation, shape, request.receive, self._gateway.admission)

    async def models(self, request: Request) -> Response:
        """GET /v1/models; 503 until the model is loaded, which readiness probes rely on."""
        names = self._gateway.settings.model_names()
        return JsonResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}"""
        name = request.path_params["model"]
        if name not in self._gateway.settings.model_names():
            raise NotFound(f"the model '{name}' does not exist", param="model")
        return JsonResponse(self._card(name))

    def _card(self, name: str) -> dict[str, object]:
        info = self._gateway.pool.info
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "surestep",
            "root": info.model_path or str(self._gateway.settings.model),
            "parent": None,
            "max_model_len": info.max_model_len,
        }

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize"""
        raw = await request.body()
        tokenizer = self._gateway.tokenizer
        info = self._gateway.pool.info
        body: TokenizeBody | TokenizeChatBody
        if b'"messages"' in raw:
            body = parse(TokenizeChatBody, raw)
            text, add_special = render_chat(self._gateway, body), bool(body.add_special_tokens)
        else:
            body = parse(TokenizeBody, raw)
            text, add_special = body.prompt, body.add_special_tokens is not False
        self._gateway.check_model(body.model)
        ids = await tokenizer.encode(text, add_special_tokens=add_special)
        return JsonResponse(
            {
                "count": len(ids),
                "max_model_len": info.max_model_len,
                "tokens": ids,
                "token_strs": list(map(tokenizer.token, ids)) if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize"""
        body = parse(DetokenizeBody, await request.body())
        self._gateway.check_model(body.model)
        check_vocab(body.tokens, "tokens", self._gateway.pool.info.vocab_size)
        text = self._gateway.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return JsonResponse({"prompt": text})


def _origin(request: Request, body: GenerationBody, arrived: float) -> Origin:
    """The header names a request before the body does."""
    state, caller = request.scope["state"], Caller.of(request.scope)
    if body.request_id is not None and not state["request_id_given"]:
        return Origin(body.request_id, arrived, caller)
    return Origin(state["request_id"], arrived, caller)
