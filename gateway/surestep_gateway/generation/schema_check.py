"""Checks of finished answers whose grammar is wider than the client's schema."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
from pydantic_core import from_json
from surestep_common.errors import SurestepError
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.parsers import Content, Event, ToolArguments, ToolCallStart
from surestep_gateway.text.service import (
    Draft,
    Job,
    TextProcessor,
    TextService,
    dump_bytes,
    load_bytes,
)
from surestep_gateway.text.tokenizer import Texts
from surestep_gateway.text.wire import framed, unframed

CONTENT = ""  # the name of the schema of the content, among those of functions

Promised = Mapping[str, bytes]  # schemas with their fields, as JSON, by names of functions
Violations = list[dict[str, Any]]


class Written(NamedTuple):
    """A text that must be as a schema says; `call` is the index of the call it belongs to."""

    name: str  # of the schema
    text: bytearray
    call: int | None


Ask = Callable[[Promised, Sequence[Written]], Awaitable[Violations]]


class Checks:
    """The checks of one request, one at a time. Behind one that fails or takes too much there is
    none: each would end a text process.
    """

    def __init__(self, promised: Promised, ask: Ask) -> None:
        """`ask` returns the violations of schemas in texts. It may raise SurestepError."""
        self.promised, self._ask = promised, ask
        self._turn = asyncio.Lock()
        self._fault: str | None = None

    async def violations(self, written: Sequence[Written]) -> Violations:
        """Return where texts violate their schemas; a check that fails is one that says so."""
        async with self._turn:
            if self._fault is None:
                try:
                    return await self._ask(self.promised, written)
                except SurestepError as error:
                    self._fault = f"it could not be checked: {error.message}"
        return [{"tool_call": None, "path": "$", "message": self._fault}]


class SchemaCheck:
    """The texts of one sequence that were promised to be as schemas say."""

    def __init__(self, checks: Checks) -> None:
        self._checks, self._promised = checks, checks.promised
        self._content = bytearray()
        self._calls = dict[int, Written]()

    def add(self, events: Sequence[Event]) -> None:
        """Take in what was written."""
        for event in events:
            match event:
                case Content(text) if CONTENT in self._promised:
                    self._content += text.encode()
                case ToolCallStart(index, name):
                    self._calls[index] = Written(name, bytearray(), index)
                case ToolArguments(index, text) if self._calls[index].name in self._promised:
                    self._calls[index].text.extend(text.encode())

    async def violations(self) -> Violations:
        """Return the violations in an output that is over."""
        asked = [call for call in self._calls.values() if call.name in self._promised]
        # Content may be there in place of calls.
        if CONTENT in self._promised and (self._content or not self._calls):
            asked.append(Written(CONTENT, self._content, None))
        return await self._checks.violations(asked) if asked else []


async def violations(
    text: TextService, promised: Promised, written: Sequence[Written], caller: str
) -> Violations:
    """Return where texts violate their schemas, found in a text process. Raise SurestepError."""
    names = list(promised)
    about = orjson.dumps([[names.index(one.name), one.call] for one in written])
    texts = (one.text for one in written)
    frames: list[bytes | bytearray] = [about, *promised.values(), *texts]
    answer = await text.ask(CHECK, framed(frames), caller)
    found: Violations = orjson.loads(answer)
    return found


def violations_shown(found: Violations | None) -> dict[str, Any]:
    """Return the violations of the client's schema, where an answer was checked."""
    return {} if found is None else {"schema_violations": found}


def _draft_check(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[bytes]:
    """Check the texts of an answer, to the JSON of the violations. Raise NeedsProcess.

    The frames are `[[number of the schema, call], ...]` of the texts, the schemas, and the texts.
    """
    processor.only_apart(True)
    from surestep_gateway.grammars.violations import (  # a tenth of a second, seldom
        MOST,
        violations_of,
    )

    about, *frames = unframed(raw)
    texts: list[tuple[int, int | None]] = from_json(about)
    schemas = [from_json(one) for one in frames[: len(frames) - len(texts)]]
    found: list[dict[str, Any]] = []
    with processor.checking(schemas[0][0]):
        for (number, call), text in zip(texts, frames[len(schemas) :], strict=True):
            told = violations_of(schemas[number][1], text.decode())
            found += [{"tool_call": call} | one for one in told]
            if len(found) >= MOST:
                break
    return Draft(Texts([], add_special_tokens=False), lambda _: orjson.dumps(found[:MOST]))


CHECK: Job[bytes] = Job(b"check", _draft_check, dump_bytes, load_bytes)
