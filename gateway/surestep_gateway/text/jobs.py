"""The kinds of requests to prepare, and how their results are serialised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import orjson
from pydantic_core import from_json
from surestep_common.errors import MissingParameter
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.apis.embeddings.inputs import PreparedInputs, draft_embedding
from surestep_gateway.apis.embeddings.score_inputs import PreparedScores, draft_rerank, draft_score
from surestep_gateway.apis.messages.request import draft_count, draft_message
from surestep_gateway.apis.responses.request import (
    PreparedResponse,
    draft_continued,
    draft_response,
)
from surestep_gateway.request.parse import parse
from surestep_gateway.request.prepare import (
    Draft,
    Kind,
    draft_chat,
    draft_completion,
    draft_detokenize,
    draft_tokenize,
)
from surestep_gateway.request.prompts import PreparedRequest
from surestep_gateway.request.protocol import Body

from . import wire
from .frames import unframed
from .text_processor import TextProcessor
from .tokenizer import Texts
from .wire import Parts

T = TypeVar("T")


class Job(NamedTuple, Generic[T]):
    """A kind of request."""

    name: bytes
    draft: Kind[T]
    dump: Callable[[T], Parts]
    load: Callable[[Sequence[bytes]], T]


def _dump(answer: bytes) -> Parts:
    return [answer]


def _load(parts: Sequence[bytes]) -> bytes:
    return parts[0]


_PREPARED = (wire.dump_prepared, wire.load_prepared)
CHAT: Job[PreparedRequest] = Job(b"chat", draft_chat, *_PREPARED)
COMPLETION: Job[PreparedRequest] = Job(b"completion", draft_completion, *_PREPARED)
TOKENIZE: Job[bytes] = Job(b"tokenize", draft_tokenize, _dump, _load)
DETOKENIZE: Job[bytes] = Job(b"detokenize", draft_detokenize, _dump, _load)

EMBEDDING: Job[PreparedInputs] = Job(
    b"embedding", draft_embedding, wire.dump_inputs, wire.load_inputs
)
_SCORES = (wire.dump_scores, wire.load_scores)
SCORE: Job[PreparedScores] = Job(b"score", draft_score, *_SCORES)
RERANK: Job[PreparedScores] = Job(b"rerank", draft_rerank, *_SCORES)

_RESPONSE = (wire.dump_response, wire.load_response)
RESPONSE: Job[PreparedResponse] = Job(b"response", draft_response, *_RESPONSE)
CONTINUED: Job[PreparedResponse] = Job(b"continued", draft_continued, *_RESPONSE)

MESSAGE: Job[PreparedRequest] = Job(b"message", draft_message, *_PREPARED)
COUNT: Job[bytes] = Job(b"count", draft_count, _dump, _load)

# Requests of SageMaker's one path, by the field that no other kind has.
_INVOKED: dict[str, Job[Any]] = {
    "messages": CHAT,
    "prompt": COMPLETION,
    "input": EMBEDDING,
    "query": RERANK,
    "text_1": SCORE,
}


class Invoked(NamedTuple):
    """A request of any kind that has been prepared."""

    kind: bytes  # name of its job
    prepared: Any


def _draft_invocation(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[Invoked]:
    """POST /invocations. Raise SurestepError."""
    fields = parse(Body, raw).model_extra or {}
    job = next((job for name, job in _INVOKED.items() if name in fields), None)
    if job is None:
        raise MissingParameter(f"one of these is required: {', '.join(_INVOKED)}", param=None)
    draft, kind = job.draft(processor, raw, info), job.name
    return Draft(draft.texts, lambda encoded: Invoked(kind, draft.finish(encoded)))


def _dump_invoked(invoked: Invoked) -> Parts:
    return [invoked.kind, *BY_NAME[invoked.kind].dump(invoked.prepared)]


def _load_invoked(parts: Sequence[bytes]) -> Invoked:
    kind, *rest = parts
    return Invoked(kind, BY_NAME[kind].load(rest))


INVOCATION: Job[Invoked] = Job(b"invocation", _draft_invocation, _dump_invoked, _load_invoked)


def _draft_check(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[bytes]:
    """Check the texts of an answer, to the JSON of the violations. Raise NeedsProcess.

    The frames are `[[number of the schema, call], ...]` of the texts, the schemas, and the texts.
    """
    processor.only_apart(True)
    from surestep_gateway.grammars.violations import MOST, violations  # a tenth of a second, seldom

    about, *frames = unframed(raw)
    texts: list[tuple[int, int | None]] = from_json(about)
    schemas = [from_json(one) for one in frames[: len(frames) - len(texts)]]
    found: list[dict[str, Any]] = []
    with processor.checking(schemas[0][0]):
        for (number, call), text in zip(texts, frames[len(schemas) :], strict=True):
            told = violations(schemas[number][1], text.decode())
            found += [{"tool_call": call} | one for one in told]
            if len(found) >= MOST:
                break
    return Draft(Texts([], add_special_tokens=False), lambda _: orjson.dumps(found[:MOST]))


CHECK: Job[bytes] = Job(b"check", _draft_check, _dump, _load)

_ALL: tuple[Job[Any], ...] = (
    *(CHAT, COMPLETION, TOKENIZE, DETOKENIZE, EMBEDDING, SCORE, RERANK),
    *(RESPONSE, CONTINUED, MESSAGE, COUNT, INVOCATION, CHECK),
)
BY_NAME = {job.name: job for job in _ALL}
