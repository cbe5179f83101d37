"""The endpoints of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import orjson
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from surestep_common.errors import (
    InvalidRequest,
    NotFound,
    PreviousNotFound,
    RequestTooLarge,
    SurestepError,
    UnsupportedParameter,
)

from surestep_gateway.api_keys import Caller
from surestep_gateway.apis.requests import (
    body_of,
    deadline_of,
    model_of,
    origin_of,
    prepare_bytes,
)
from surestep_gateway.apis.route import COUNTED_ERRORS, DescribedRoute, Description, Parameter
from surestep_gateway.context import Gateway, Models
from surestep_gateway.generation.event_stream import respond
from surestep_gateway.generation.generation import chat_generation
from surestep_gateway.generation.request_records import log_request
from surestep_gateway.http.admission import Access, RuledRoute
from surestep_gateway.http.bodies import JsonPieces
from surestep_gateway.http.errors import JsonResponse
from surestep_gateway.request.parse import renamed
from surestep_gateway.text.wire import framed, unframed

from .answer import ResponseAnswer
from .body import ResponseRequest
from .request import CONTINUED, FIELD_NAMES, RESPONSE, PreparedResponse
from .running import Running
from .store import Store, key_of

_PATH = "/v1/responses"
_MOST_ITEMS = 100  # of one page, as at OpenAI
_ITEMS = 20

_CREATE = Description(
    summary="Answer as a response with items.",
    bodies=(ResponseRequest,),
    streams=True,
    errors=COUNTED_ERRORS,
)
_STORED_ERRORS = (400, 401, 404, 503)
_RETRIEVE = Description(summary="A stored response, or one being written.", errors=_STORED_ERRORS)
_DELETE = Description(summary="Forget a stored response.", errors=_STORED_ERRORS)
_CANCEL = Description(summary="End a response that is being written.", errors=_STORED_ERRORS)
_INPUT_ITEMS = Description(
    summary="The items that a stored response was made from.",
    parameters=(
        Parameter("limit", {"type": "integer", "minimum": 1, "maximum": _MOST_ITEMS}),
        Parameter("order", {"type": "string", "enum": ["asc", "desc"]}),
        Parameter("after", {"type": "string"}),
    ),
    errors=_STORED_ERRORS,
)


class ResponsesRoutes:
    def __init__(self, models: Models, store: Store) -> None:
        self._models, self._store = models, store
        self._answers = models.first.answers
        self._running = Running()

    def routes(self) -> list[RuledRoute]:
        one = f"{_PATH}/{{response_id}}"
        counted = partial(DescribedRoute, access=Access.CLIENTS, counted=True)
        at_once = partial(DescribedRoute, access=Access.CLIENTS, counted=False)
        return [
            counted("POST", _PATH, self.create, _CREATE),
            at_once("GET", one, self.retrieve, _RETRIEVE),
            at_once("DELETE", one, self.delete, _DELETE),
            at_once("POST", f"{one}/cancel", self.cancel, _CANCEL),
            at_once("GET", f"{one}/input_items", self.input_items, _INPUT_ITEMS),
        ]

    async def create(self, request: Request) -> Response:
        """POST /v1/responses"""
        arrived = time.perf_counter()
        gateway = await model_of(self._models, request)
        deadline = deadline_of(gateway)
        with renamed(FIELD_NAMES):
            prepared = await self._prepare(gateway, request, deadline)
            chat = prepared.chat
            assert chat is not None, "what it needed is there"
            origin = origin_of(request, chat.body, arrived)
            name = f"resp_{prepared.token}"
            generation = await chat_generation(gateway, chat, origin, deadline, name)
        log_request(gateway, generation)
        answer = ResponseAnswer(gateway, generation, prepared, self._store)
        within = self._running.interruptible(answer.key, answer)
        return await respond(gateway, generation, answer, request.receive, within)

    async def _prepare(
        self, gateway: Gateway, request: Request, deadline: float
    ) -> PreparedResponse:
        """Prepare a request, with the stored responses that it needs. Raise SurestepError."""
        body = body_of(request)
        try:
            prepared = await prepare_bytes(gateway, RESPONSE, body.data, request, deadline)
            if not prepared.wanted:
                return prepared
            caller, parts = Caller.of(request.scope), [bytes(body.data)]
            for wanted in prepared.wanted:
                record = await self._store.get(key_of(caller, wanted))
                if record is None:
                    raise _nothing_stored(wanted, prepared.asked.get("previous_response_id"))
                parts.append(record)
                _check_size(parts, gateway.settings.responses_store_bytes)
            data = framed(parts)
            return await prepare_bytes(gateway, CONTINUED, data, request, deadline)
        finally:
            body.release()

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/responses/{response_id}"""
        if request.query_params.get("stream", "false") not in ("false", "0"):
            raise UnsupportedParameter("'stream' is not supported here", param="stream")
        live = self._running.find(self._key(request))
        if live is not None:
            return JsonResponse(live.shown())
        response = unframed(await self._record(request))[0]
        return JsonPieces([bytes(response)], self._answers)

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/responses/{response_id}"""
        key = self._key(request)
        if self._running.find(key) is not None:
            raise InvalidRequest("the response is being written: cancel it", param="response_id")
        if not await self._store.delete(key):
            raise _not_found(request)
        name = request.path_params["response_id"]
        return JsonResponse({"id": name, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """POST /v1/responses/{response_id}/cancel"""
        live = await self._running.interrupt(self._key(request))
        if live is not None:
            return JsonResponse(live.shown())
        await self._record(request)
        raise InvalidRequest(
            "the response is over: there is nothing to cancel", param="response_id"
        )

    async def input_items(self, request: Request) -> Response:
        """GET /v1/responses/{response_id}/input_items"""
        query = request.query_params
        limit, order = _limit(query), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order: must be asc or desc", param="order")
        record = await self._record(request)
        page = await asyncio.to_thread(
            _page, record, limit, query.get("after"), newest_first=order == "desc"
        )
        return JsonPieces([page], self._answers)

    def _key(self, request: Request) -> str:
        return key_of(Caller.of(request.scope), request.path_params["response_id"])

    async def _record(self, request: Request) -> bytes:
        record = await self._store.get(self._key(request))
        if record is None:
            raise _not_found(request)
        return record


def _check_size(parts: Sequence[bytes], most: int) -> None:
    if sum(map(len, parts)) > most:
        raise RequestTooLarge(
            f"the request and the stored responses that it needs have more than {most} bytes",
            param="input",
        )


def _nothing_stored(wanted: str, previous: str | None) -> SurestepError:
    """Return the error for a request that goes on from, or refers to, what is not there."""
    message = f"no response with the id '{wanted}' is stored"
    if wanted == previous:
        return PreviousNotFound(message, param="previous_response_id")
    return NotFound(message, param="input")


def _not_found(request: Request) -> NotFound:
    name = request.path_params["response_id"]
    return NotFound(f"no response with the id '{name}' is stored", param="response_id")


def _limit(query: QueryParams) -> int:
    given = query.get("limit", str(_ITEMS))
    limit = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0
    if not 1 <= limit <= _MOST_ITEMS:
        raise InvalidRequest(f"limit: must be from 1 to {_MOST_ITEMS}", param="limit")
    return limit


def _page(record: bytes, limit: int, after: str | None, *, newest_first: bool) -> bytes:
    """Return a page of the items of a record as JSON. Raise InvalidRequest for an unknown id."""
    items = unframed(record)[1:]
    if newest_first:
        items.reverse()
    first = 0
    if after is not None:
        names = [orjson.loads(item)["id"] for item in items]
        if after not in names:
            raise InvalidRequest(f"after: no item with the id '{after}'", param="after")
        first = names.index(after) + 1
    shown = items[first : first + limit]
    page = {
        "object": "list",
        "data": [orjson.Fragment(item) for item in shown],
        "first_id": orjson.loads(shown[0])["id"] if shown else None,
        "last_id": orjson.loads(shown[-1])["id"] if shown else None,
        "has_more": first + limit < len(items),
    }
    return orjson.dumps(page)
