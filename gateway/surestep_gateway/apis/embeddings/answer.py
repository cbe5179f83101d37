"""Embeddings: computed input by input, returned in the order of the request."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import orjson
from starlette.responses import Response
from starlette.types import Receive
from surestep_common import tracing
from surestep_common.errors import InvalidRequest, ModelChanged
from surestep_proto.sampling_pb2 import LABEL_LOGITS
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.context import Gateway
from surestep_gateway.generation.event_stream import until_disconnect
from surestep_gateway.generation.generation import Origin, most_open
from surestep_gateway.generation.request_records import PROVIDER, ending, log_body
from surestep_gateway.generation.sequence import first_error
from surestep_gateway.http.bodies import JsonPieces
from surestep_gateway.observability.metrics import SequenceEnd, SequenceTimer
from surestep_gateway.schedulers.journal import Journal, ResumableStream, Timeouts
from surestep_gateway.schedulers.pool import Siblings

from .body import EmbeddingBody
from .config import EmbeddingConfig
from .inputs import PreparedInputs

logger = logging.getLogger(__name__)

_LEAST_NORM = 1e-12  # a vector of zeros has no direction

Vector = npt.NDArray[np.float32]
T = TypeVar("T")


def _end(reason: str, prompt_tokens: int) -> SequenceEnd:
    return SequenceEnd(
        reason=reason,
        prompt_tokens=prompt_tokens,
        cached_tokens=0,
        tokens=0,
        max_tokens=0,
        preemptions=0,
    )


class _VectorFormat(NamedTuple):
    """The way from hidden states to vectors, and the encoding of these."""

    dimensions: int
    normalize: bool
    as_base64: bool

    @classmethod
    def of(cls, body: EmbeddingBody, config: EmbeddingConfig, info: SchedulerInfo) -> _VectorFormat:
        """Return the format of a request. Raise InvalidRequest for unsupported dimensions."""
        wanted = body.dimensions or config.default_dimensions
        if wanted is not None:
            config.check(wanted, info.hidden_size)
        given = body.normalize if body.normalize is not None else body.use_activation
        normalize = config.normalize if given is None else given
        return cls(wanted or info.hidden_size, normalize, body.encoding_format == "base64")

    def vector(self, pooled: bytes) -> Vector:
        return _finished(pooled, self.dimensions, normalize=self.normalize)

    def written(self, index: int, pooled: bytes) -> bytes:
        """Return one entry of the response as JSON."""
        vector = self.vector(pooled)
        value: Any = base64.b64encode(vector.tobytes()).decode() if self.as_base64 else vector
        entry = {"object": "embedding", "index": index, "embedding": value}
        return orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)


def _finished(pooled: bytes, dimensions: int, *, normalize: bool) -> Vector:
    """Return the vector in little-endian order; its norm is summed exactly, on any machine."""
    vector = np.frombuffer(pooled, dtype="<f4")[:dimensions].astype(np.float64)
    if normalize:
        vector /= max(math.sqrt(math.fsum(np.square(vector).tolist())), _LEAST_NORM)
    return vector.astype("<f4")


class Embedding:
    """An embedding request that has passed every check, ready to run."""

    def __init__(
        self,
        gateway: Gateway,
        config: EmbeddingConfig,
        prepared: PreparedInputs,
        origin: Origin,
        deadline: float,
    ) -> None:
        """`deadline` is on the event loop's clock. Raise SurestepError."""
        origin.caller.check_priority(prepared.body.priority)
        self._format = _VectorFormat.of(prepared.body, config, gateway.pool.info)
        self._gateway, self._body, self._origin = gateway, prepared.body, origin
        self._inputs, self._deadline = prepared.inputs, deadline
        self._label_ids = prepared.label_ids
        self._pooling = LABEL_LOGITS if prepared.label_ids else config.pooling
        self._num_tokens = sum(map(len, prepared.inputs))
        self.id = f"embd-{origin.request_id}"
        self.model = prepared.body.model or gateway.name
        self._adapter = gateway.settings.adapter_named(prepared.body.model)
        # Clients may repeat an id of theirs; the scheduler's must be unique among open requests.
        self._call_id = f"{self.id}-{secrets.token_hex(4)}"
        self._tenant = origin.caller.tenant(prepared.body.user)
        self._siblings = Siblings()
        self._size = 0  # of what is written, bytes
        self._model = ""  # fingerprint of the model that made the first vector
        longest = max(map(len, prepared.inputs))
        self._slots = asyncio.Semaphore(most_open(gateway.pool.info, longest))

    async def answer(self, receive: Receive) -> Response:
        """Run to the end and return the response. Raise SurestepError."""
        entries = await self._run(receive, self._entry)
        return JsonPieces(self._whole(entries), self._gateway.answers)

    async def vectors(self, receive: Receive) -> list[Vector]:
        """Run to the end and return the vectors. Raise SurestepError."""
        return await self._run(receive, self._vector)

    @property
    def usage(self) -> dict[str, int]:
        """The counts of the response."""
        return {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens}

    async def _run(
        self, receive: Receive, one: Callable[[int, Sequence[int]], Coroutine[Any, Any, T]]
    ) -> list[T]:
        with ending(self._log_end):
            return await until_disconnect(receive, self._each(one), self._gateway.admission)

    async def _each(self, one: Callable[[int, Sequence[int]], Coroutine[Any, Any, T]]) -> list[T]:
        tasks: list[asyncio.Task[T]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for index, ids in enumerate(self._inputs):
                    tasks.append(group.create_task(one(index, ids)))
                    await asyncio.sleep(0)  # each is sent in a turn of its own
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [task.result() for task in tasks]

    async def _vector(self, index: int, ids: Sequence[int]) -> Vector:
        async with self._slots:
            pooled = await self._pooled(index, ids)
        return np.frombuffer(pooled, "<f4") if self._label_ids else self._format.vector(pooled)

    async def _entry(self, index: int, ids: Sequence[int]) -> bytes:
        async with self._slots:
            entry = self._format.written(index, await self._pooled(index, ids))
        self._size += len(entry)
        limit = self._gateway.settings.max_answer_bytes
        if self._size > limit:
            raise InvalidRequest(f"the answer is larger than {limit} bytes: ask for less at once")
        return entry

    async def _pooled(self, index: int, ids: Sequence[int]) -> bytes:
        """Return the vector as the scheduler sends it."""
        journal, settings = self._journal(index, ids), self._gateway.settings
        timer = SequenceTimer(self._gateway.requests, self._origin.arrived)
        timeouts = Timeouts.of(settings)
        source = ResumableStream(
            self._gateway.pool, journal, timeouts, self._deadline, self._siblings
        )
        pooled, reason = b"", "error"
        try:
            async with contextlib.aclosing(source.chunks()) as chunks:
                async for chunk in chunks:
                    timer.started(chunk.start.queue_s)
                    timer.tokens()
                    self._check_model(chunk.start.model_fingerprint)
                    pooled, reason = chunk.pooled, "stop"
        except asyncio.CancelledError:
            reason = "abort"
            raise
        finally:
            timer.resumed(journal.num_resumes, journal.num_resumed_tokens)
            timer.finished(_end(reason, len(ids)))
        return pooled

    def _check_model(self, fingerprint: str) -> None:
        """Raise unless all vectors come from one model: those of two cannot be compared."""
        self._model = self._model or fingerprint
        if fingerprint != self._model:
            raise ModelChanged("the model changed while the inputs were embedded; send them again")

    def _journal(self, index: int, ids: Sequence[int]) -> Journal:
        return Journal(
            request_id=f"{self._call_id}-{index}",
            prompt_ids=ids,
            pooling=self._pooling,
            label_ids=self._label_ids,
            model_fingerprint=self._model,
            tenant=self._tenant,
            priority=self._body.priority or 0,
            cache_salt=self._body.cache_salt or "",
            adapter=self._adapter,
        )

    def _whole(self, entries: Sequence[bytes]) -> list[bytes | bytearray]:
        """Return the response in pieces."""
        head = {
            "id": self.id,
            "object": "list",
            "created": int(time.time()),
            "model": self.model,
        }
        usage = orjson.dumps({"usage": self.usage})
        pieces: list[bytes | bytearray] = [orjson.dumps(head)[:-1], b',"data":[']
        for index, entry in enumerate(entries):
            pieces += [b",", entry] if index else [entry]
        return [*pieces, b"],", usage[1:]]

    def _log_end(self, outcome: str) -> None:
        """Log and trace the request, which has ended."""
        tokens = self._num_tokens
        _tell(self.model, self._origin.request_id, tokens)
        logger.info("%s %s: inputs=%d tokens=%d", self.id, outcome, len(self._inputs), tokens)


def log_embedding(gateway: Gateway, name: str, origin: Origin, prepared: PreparedInputs) -> None:
    """Log a request for embeddings."""
    log_body(gateway, name, origin, prepared.body, prepared.inputs)


def _tell(model: str, request_id: str, num_tokens: int) -> None:
    """Record the attributes of a finished embedding request."""
    tracing.current.get().set(
        {
            "gen_ai.operation.name": "embeddings",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.request.id": request_id,
            "gen_ai.usage.input_tokens": num_tokens,
            "gen_ai.usage.prompt_tokens": num_tokens,
        }
    )
