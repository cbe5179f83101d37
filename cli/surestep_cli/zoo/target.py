"""A server under test: what it is asked, what it answers, and what it is able to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
from surestep_common.errors import Unavailable

from surestep_cli.api.http import message_in
from surestep_cli.api.sessions import post, stream
from surestep_cli.api.stream import UNFINISHED, StreamEnded

Body = dict[str, Any]

CHAT, TEXT = "v1/chat/completions", "v1/completions"
_REFUSALS = (400, 401, 403, 404, 405, 413, 415, 422, 501)
_ONCE = "Once upon a time"
_TELLING: Body = {"return_token_ids": True, "stream_options": {"include_usage": True}}


class Refused(Exception):
    """The server says that it does not do what was asked, with a reason."""


class Broken(Exception):
    """The server failed: a 5xx, a connection that broke, an error or a lack in a stream."""


class Answer(NamedTuple):
    """Choice, whole or put together from its stream."""

    text: str
    ids: list[int]  # empty: the server does not tell
    finish: str | None
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments
    logprobs: tuple[LogProb, ...] = ()
    usage: Mapping[str, Any] = {}

    @property
    def key(self) -> tuple[Any, ...]:
        """All that has to be equal in two answers to one request."""
        return self.ids or (self.text, self.reasoning), self.calls, self.finish

    @property
    def num_tokens(self) -> int | None:
        """Tokens by the usage, None where it does not tell."""
        return self.usage.get("completion_tokens")


class LogProb(NamedTuple):
    """Log-probability of a token, and those of the best ones at its position."""

    token: str
    logprob: float
    best: dict[str, float]


class Target:
    """A model of a server. Everything raises Refused or Broken."""

    def __init__(self, session: aiohttp.ClientSession, model: str, *, is_ours: bool) -> None:
        self._session, self.model = session, model
        self.is_ours = is_ours  # speculation may be turned off for a request
        self._refused = frozenset[str]()  # of _TELLING
        self._says_done = True  # behind a stream; transformers serve never does

    async def get(self, path: str) -> str:
        """Return the body of a GET."""
        try:
            async with self._session.get(path) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Broken(f"/{path}: {error or 'no answer in time'}") from error
        if response.status != 200:
            raise Refused(f"/{path}: HTTP {response.status}")
        return text

    async def status_of(self, path: str, body: Body) -> int:
        """Return the status of the answer to a POST, whatever it is, of a stream too."""
        async with self._posted(path, body) as response:
            return response.status

    async def post(self, path: str, body: Body) -> Body:
        """Return the answer to a request that is not streamed."""
        async with self._posted(path, body) as response:
            text = await response.text()
        if response.status in _REFUSALS:
            raise Refused(f"HTTP {response.status}: {message_in(text)[:300]}")
        if response.status != 200:
            raise Broken(f"HTTP {response.status}: {message_in(text)[:300]}")
        try:
            answer: Body = json.loads(text)
        except ValueError as error:
            raise Broken(f"no JSON at status 200: {text[:100]!r}") from error
        return answer

    async def events(self, path: str, body: Body) -> list[Body]:
        """Return all events of a stream."""
        found: list[Body] = []
        try:
            await stream(self._session, path, self._whole(streamed(body)), found.append)
        except StreamEnded as end:
            if not self._says_done and end.kind == UNFINISHED and _ended(found):
                return found
            if end.status in _REFUSALS:
                raise Refused(str(end)[:300]) from end
            raise Broken(str(end)[:300]) from end
        return found

    @contextlib.asynccontextmanager
    async def begun(self, path: str, body: Body) -> AsyncIterator[None]:
        """A stream whose first event has come; leaving the block drops the connection."""
        async with self._posted(path, body | {"stream": True}) as response:
            if response.status != 200:
                raise Broken(f"HTTP {response.status}: {message_in(await response.text())[:300]}")
            await response.content.readline()
            yield
            response.close()

    @contextlib.asynccontextmanager
    async def _posted(self, path: str, body: Body) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a POST."""
        try:
            async with await post(self._session, path, self._whole(body)) as response:
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Broken(f"/{path}: {error or 'no answer in time'}") from error

    async def try_out(self) -> None:
        """Leave out of all requests what the server refuses, where that only tells more, and see
        whether it ends streams with [DONE]."""
        asked: Body = {"prompt": _ONCE, "max_tokens": 1, "stream": True}
        statuses = {
            name: await self.status_of(TEXT, asked | {name: value})
            for name, value in _TELLING.items()
        }
        self._refused = frozenset(name for name, status in statuses.items() if status in _REFUSALS)
        try:
            await stream(self._session, TEXT, self._whole(streamed(asked)), lambda _: None)
        except StreamEnded as end:
            self._says_done = end.kind != UNFINISHED

    def _whole(self, body: Body) -> Body:
        whole = {"model": self.model, "temperature": 0} | body
        return {name: value for name, value in whole.items() if name not in self._refused}

    async def ask(self, body: Body) -> list[Answer]:
        """Return all choices of a request: a chat where it has messages."""
        told = await self.post(path_of(body), body)
        with _reading():
            usage = told.get("usage") or {}
            choices = sorted(told["choices"], key=lambda choice: choice.get("index", 0))
            return [_answer(choice, usage) for choice in choices]

    async def ask_one(self, body: Body) -> Answer:
        """Return the only choice."""
        answers = await self.ask(body)
        if len(answers) != 1:
            raise Broken(f"{len(answers)} choices, asked for one")
        return answers[0]

    async def stream_one(self, body: Body) -> Answer:
        """Return the only choice, put together from its stream."""
        events = await self.events(path_of(body), body)
        with _reading():
            return joined(events)

    async def together(self, bodies: Sequence[Body]) -> list[Answer]:
        """Return the only choices of requests that are open at once."""
        return list(await asyncio.gather(*map(self.ask_one, bodies)))


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Raise Broken for an answer in another form than the API's."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        raise Broken(f"an answer of another form: {type(error).__name__}: {error}") from error


def _ended(events: Sequence[Body]) -> bool:
    """Return whether a choice of a stream was given a reason to end."""
    choices = (choice for event in events for choice in event.get("choices", ()))
    return any(choice.get("finish_reason") for choice in choices)


def streamed(body: Body) -> Body:
    """Return the request for a stream that tells its usage."""
    return body | {"stream": True, "stream_options": _TELLING["stream_options"]}


def path_of(body: Body) -> str:
    """Return the endpoint of a request."""
    return CHAT if "messages" in body else TEXT


def _answer(choice: Body, usage: Body) -> Answer:
    message = choice.get("message") or {}
    calls = tuple(
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return Answer(
        text=choice.get("text") or message.get("content") or "",
        ids=choice.get("token_ids") or [],
        finish=choice.get("finish_reason"),
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        calls=calls,
        logprobs=_logprobs(choice.get("logprobs")),
        usage=usage,
    )


def joined(events: Sequence[Body], index: int = 0) -> Answer:
    """Put a choice together from the events of its stream."""
    text, reasoning, finish = "", "", None
    usage: Body = {}
    ids: list[int] = []
    calls: dict[int, list[str]] = {}
    logprobs: list[LogProb] = []
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            if choice.get("index", 0) != index:
                continue
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
            ids += choice.get("token_ids") or []
            finish = choice.get("finish_reason") or finish
            logprobs += _logprobs(choice.get("logprobs"))
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], ["", ""])
                function = call.get("function") or {}
                known[0] += function.get("name") or ""
                known[1] += function.get("arguments") or ""
    named = tuple((name, arguments) for name, arguments in calls.values())
    return Answer(text, ids, finish, reasoning, named, tuple(logprobs), usage)


def _logprobs(told: Any) -> tuple[LogProb, ...]:
    """Return what either format of the OpenAI API tells of each token."""
    if not told:
        return ()
    if "content" in told:
        return tuple(
            LogProb(
                one["token"],
                one["logprob"],
                {best["token"]: best["logprob"] for best in one.get("top_logprobs") or ()},
            )
            for one in told["content"] or ()
        )
    best = told.get("top_logprobs") or [{}] * len(told.get("tokens") or ())
    columns = told.get("tokens") or (), told.get("token_logprobs") or (), best
    return tuple(
        LogProb(token, logprob, top or {}) for token, logprob, top in zip(*columns, strict=False)
    )


class Subject(NamedTuple):
    """Server of the cases, and its means."""

    target: Target
    plain: Target | None  # the same model without speculation, or None
    repeats: bool  # a greedy answer is the same when asked for again
    pace: float  # tokens a second that it has alone
    max_len: int | None  # tokens of prompt and answer
    long: int = 1024  # tokens of a long answer
    process: int | None = None  # that may be stopped for a while

    async def ask_plain(self, body: Body) -> Answer:
        """Ask without speculation. There must be `plain`."""
        assert self.plain is not None
        off = {"speculative": {"num_tokens": 0}} if self.plain.is_ours else {}
        return await self.plain.ask_one(body | off)


def max_len_of(card: Mapping[str, Any]) -> int | None:
    """Return the context length that a card of /v1/models tells, as vLLM's or llama.cpp's."""
    known = card.get("max_model_len") or (card.get("meta") or {}).get("n_ctx_train")
    return known if isinstance(known, int) else None


async def tried_out(target: Target) -> tuple[bool, float]:
    """Return whether the server answers the same twice, and its pace. Raise Unavailable for one
    that answers no text at all."""
    body = {"prompt": _ONCE, "max_tokens": 24}
    try:
        await target.try_out()
        first = await target.ask_one(body)
        began = time.monotonic()
        second = await target.ask_one(body)
        pace = (second.num_tokens or 24) / (time.monotonic() - began)
        return first.key == second.key, pace
    except (Refused, Broken) as error:
        raise Unavailable(f"the server completes no text: {error}") from error
