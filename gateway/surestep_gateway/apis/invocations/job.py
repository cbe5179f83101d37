"""Prepare a request of any kind, which its fields tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from surestep_common.errors import MissingParameter
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.apis.embeddings.job import EMBEDDING, RERANK, SCORE
from surestep_gateway.apis.openai.job import CHAT, COMPLETION
from surestep_gateway.request.parse import parse
from surestep_gateway.request.protocol import Body
from surestep_gateway.text.service import Draft, Job, TextProcessor
from surestep_gateway.text.wire import Parts

# Requests of SageMaker's one path, by the field that no other kind has.
_KINDS: dict[str, Job[Any]] = {
    "messages": CHAT,
    "prompt": COMPLETION,
    "input": EMBEDDING,
    "query": RERANK,
    "text_1": SCORE,
}
_BY_NAME = {job.name: job for job in _KINDS.values()}


class Invoked(NamedTuple):
    """A request of any kind that has been prepared."""

    kind: bytes  # name of its job
    prepared: Any


def _draft_invocation(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[Invoked]:
    """POST /invocations. Raise SurestepError."""
    fields = parse(Body, raw).model_extra or {}
    job = next((job for name, job in _KINDS.items() if name in fields), None)
    if job is None:
        raise MissingParameter(f"one of these is required: {', '.join(_KINDS)}", param=None)
    draft, kind = job.draft(processor, raw, info), job.name
    return Draft(draft.texts, lambda encoded: Invoked(kind, draft.finish(encoded)))


def _dump_invoked(invoked: Invoked) -> Parts:
    return [invoked.kind, *_BY_NAME[invoked.kind].dump(invoked.prepared)]


def _load_invoked(parts: Sequence[bytes]) -> Invoked:
    kind, *rest = parts
    return Invoked(kind, _BY_NAME[kind].load(rest))


INVOCATION: Job[Invoked] = Job(b"invocation", _draft_invocation, _dump_invoked, _load_invoked)
