"""The endpoints of Anthropic's Messages API."""

from __future__ import annotations

import secrets
import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from surestep_gateway.apis.requests import deadline_of, model_of, origin_of, prepare
from surestep_gateway.apis.route import COUNTED_ERRORS, DescribedRoute, Description
from surestep_gateway.context import Models
from surestep_gateway.generation.event_stream import respond
from surestep_gateway.generation.generation import chat_generation
from surestep_gateway.generation.request_records import log_request
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.http.bodies import JsonPieces
from surestep_gateway.request.parse import renamed

from .answer import MessageAnswer
from .body import CountTokensRequest, MessagesRequest
from .request import COUNT, FIELD_NAMES, MESSAGE

_CREATE = Description(
    summary="Answer as a message of Anthropic's API.",
    bodies=(MessagesRequest,),
    streams=True,
    errors=COUNTED_ERRORS,
)
_COUNT = Description(
    summary="Tokens of a prompt of that API.",
    bodies=(CountTokensRequest,),
    errors=COUNTED_ERRORS,
)


class MessagesRoutes:
    def __init__(self, models: Models) -> None:
        self._models = models

    def routes(self) -> list[RuledRoute]:
        counted = partial(DescribedRoute, access=Access.CLIENTS, counted=True)
        return [
            counted("POST", "/v1/messages", self.create, _CREATE),
            counted("POST", "/v1/messages/count_tokens", self.count, _COUNT),
        ]

    async def create(self, request: Request) -> Response:
        """POST /v1/messages"""
        arrived = time.perf_counter()
        gateway = await model_of(self._models, request)
        deadline = deadline_of(gateway)
        with renamed(FIELD_NAMES):
            prepared = await prepare(gateway, MESSAGE, request, deadline)
            origin = origin_of(request, prepared.body, arrived)
            name = f"msg_{secrets.token_hex(12)}"
            generation = await chat_generation(gateway, prepared, origin, deadline, name)
        log_request(gateway, generation)
        return await respond(gateway, generation, MessageAnswer(generation), request.receive)

    async def count(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens"""
        gateway = await model_of(self._models, request)
        with renamed(FIELD_NAMES):
            answer = await prepare(gateway, COUNT, request, deadline_of(gateway))
        return JsonPieces([answer], gateway.answers)
