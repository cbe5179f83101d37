"""The format between the gateway and its text processes: frames of byte strings.

A reply costs the gateway's event loop next to nothing: ids are packed as the protocol packs them,
and of the body only what is needed after its prompts are made comes back.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Sequence
from typing import BinaryIO

import orjson
from surestep_common import errors
from surestep_common.errors import InternalError, SurestepError
from surestep_proto.sampling_pb2 import SamplingParams
from surestep_proto.scheduler_pb2 import GenerateRequest

from surestep_gateway.apis.embeddings.body import EmbeddingBody
from surestep_gateway.apis.embeddings.inputs import PreparedInputs
from surestep_gateway.apis.embeddings.score_inputs import PreparedScores
from surestep_gateway.apis.responses.request import PreparedResponse
from surestep_gateway.apis.responses.tools import Called
from surestep_gateway.grammars.fields import StructuredBody
from surestep_gateway.request.prompts import PreparedRequest, Prompt
from surestep_gateway.request.protocol import ChatBody, CompletionBody

Parts = Sequence[bytes | bytearray]

CHECKING = b"checking"  # a frame ahead of the answer; behind it the field, or nothing: it is done
_COUNT = struct.Struct("<I")
_WRITE_BYTES = 256 << 10  # at a time
# Fields that the sampling parameters or the prompts contain already.
_LEFT_OUT = {
    *("logit_bias", "bad_words", "allowed_token_ids", "stop_token_ids"),
    *StructuredBody.model_fields,
}


def _head(parts: Parts) -> bytes:
    return _COUNT.pack(len(parts)) + struct.pack(f"<{len(parts)}Q", *map(len, parts))


def write(stream: BinaryIO, parts: Parts) -> None:
    """Send a frame, blocking."""
    stream.write(_head(parts))
    for part in parts:
        stream.write(part)
    stream.flush()


def read(stream: BinaryIO) -> list[bytes] | None:
    """Return the next frame, blocking; None at the end."""
    head = stream.read(_COUNT.size)
    if len(head) < _COUNT.size:
        return None
    (count,) = _COUNT.unpack(head)
    sizes = struct.unpack(f"<{count}Q", stream.read(8 * count))
    return [stream.read(size) for size in sizes]


async def send(stream: asyncio.StreamWriter, parts: Parts) -> None:
    """Send a frame, piece by piece. Raise ConnectionError."""
    _write(stream, _head(parts))
    for part in parts:
        view = memoryview(part)
        for at in range(0, len(view), _WRITE_BYTES):
            _write(stream, view[at : at + _WRITE_BYTES])
            await stream.drain()


def _write(stream: asyncio.StreamWriter, data: bytes | memoryview) -> None:
    if stream.is_closing():  # uvloop has a RuntimeError for that
        raise ConnectionResetError
    stream.write(data)


async def receive(stream: asyncio.StreamReader) -> list[bytes]:
    """Return the next frame. Raise asyncio.IncompleteReadError."""
    (count,) = _COUNT.unpack(await stream.readexactly(_COUNT.size))
    sizes = struct.unpack(f"<{count}Q", await stream.readexactly(8 * count))
    return [await stream.readexactly(size) for size in sizes]


def dump_prepared(prepared: PreparedRequest) -> Parts:
    """Serialise a generation request."""
    kind = ChatBody if isinstance(prepared.body, ChatBody) else CompletionBody
    fields = kind.model_fields.keys() - _LEFT_OUT
    body = prepared.body.model_dump_json(include=fields, exclude_none=True)
    about = {
        "kind": kind.__name__,
        "body": orjson.Fragment(body),
        "opening": prepared.opening,
        "begun": prepared.begun,
        "role": prepared.role,
        "texts": [prompt.text for prompt in prepared.prompts],
        "promised": list(prepared.promised),
    }
    ids = (GenerateRequest(prompt_ids=prompt.token_ids) for prompt in prepared.prompts)
    return [
        orjson.dumps(about),
        json.dumps(prepared.schemas, ensure_ascii=False).encode(),  # integers of any size
        prepared.sampling.SerializeToString(),
        *prepared.promised.values(),
        *(one.SerializeToString() for one in ids),
    ]


def load_prepared(parts: Sequence[bytes]) -> PreparedRequest:
    about, schemas, sampling, *rest = orjson.loads(parts[0]), *parts[1:]
    names, ids = about["promised"], rest[len(about["promised"]) :]
    kind = ChatBody if about["kind"] == ChatBody.__name__ else CompletionBody
    return PreparedRequest(
        body=kind.model_validate(about["body"]),
        prompts=[
            Prompt(token_ids=GenerateRequest.FromString(one).prompt_ids, text=text)
            for one, text in zip(ids, about["texts"], strict=True)
        ],
        sampling=SamplingParams.FromString(sampling),
        schemas=json.loads(schemas),
        promised=dict(zip(names, rest, strict=False)),
        opening=about["opening"],
        begun=about["begun"],
        role=about["role"],
    )


def dump_response(prepared: PreparedResponse) -> Parts:
    """Serialise a request of the Responses API."""
    about = {
        "wanted": prepared.wanted,
        "token": prepared.token,
        "asked": prepared.asked,
        "called": prepared.called,
        "num_items": prepared.num_items,
    }
    chat = [] if prepared.chat is None else dump_prepared(prepared.chat)
    return [json.dumps(about, ensure_ascii=False).encode(), prepared.items, *chat]


def load_response(parts: Sequence[bytes]) -> PreparedResponse:
    about, items, *chat = parts
    loaded = load_prepared(chat) if chat else None
    fields = json.loads(about)
    fields["called"] = {name: Called(*what) for name, what in fields["called"].items()}
    return PreparedResponse(**fields, items=items, chat=loaded)


def dump_inputs(prepared: PreparedInputs) -> Parts:
    """Serialise an embedding request."""
    fields = set(EmbeddingBody.model_fields)
    body = prepared.body.model_dump_json(include=fields, exclude_none=True)
    rest = (prepared.label_ids, *prepared.inputs)
    ids = (GenerateRequest(prompt_ids=one).SerializeToString() for one in rest)
    return [body.encode(), *ids]


def load_inputs(parts: Sequence[bytes]) -> PreparedInputs:
    body, *rest = parts
    label_ids, *inputs = (GenerateRequest.FromString(one).prompt_ids for one in rest)
    return PreparedInputs(
        body=EmbeddingBody.model_validate_json(body), inputs=inputs, label_ids=label_ids
    )


def dump_scores(prepared: PreparedScores) -> Parts:
    """Serialise a request to compare texts."""
    about = {
        "pairs": prepared.pairs,
        "documents": prepared.documents,
        "top_n": prepared.top_n,
    }
    return [json.dumps(about).encode(), *dump_inputs(prepared.inputs)]


def load_scores(parts: Sequence[bytes]) -> PreparedScores:
    about, *inputs = parts
    return PreparedScores(**json.loads(about), inputs=load_inputs(inputs))


def dump_error(error: SurestepError) -> bytes:
    """Serialise an expected error."""
    return orjson.dumps(
        {
            "kind": type(error).__name__,
            "message": error.message,
            "param": error.param,
        }
    )


def load_error(data: bytes) -> SurestepError:
    about = orjson.loads(data)
    kind: Callable[..., SurestepError] = getattr(errors, about["kind"], InternalError)
    return kind(about["message"], param=about["param"])
